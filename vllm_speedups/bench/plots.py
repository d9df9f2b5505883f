"""Plots of reports, through matplotlib, which only `--plot` needs."""

from __future__ import annotations

from .report import heading
from .stages import STAGES

_SIDES = ("stock", "patched")
_COLORS = {
    "forward": "#4e79a7",
    "fill": "#e15759",
    "advance": "#ff9da7",
    "transfer": "#f28e2b",
    "apply": "#edc948",
    "sample": "#76b7b2",
    "other": "#bab0ac",
    "hash": "#e15759",
    "lookup": "#4e79a7",
    "allocate": "#76b7b2",
}
_BARS = {"no cache (stock)": "#bab0ac", "cold": "#f28e2b", "warm": "#59a14f", "new outputs": "#4e79a7"}


def guided(report: dict, file: str) -> None:
    """Bars of throughput with their spread, and a step's time in stages, for every backend, schema and batch."""
    plt = _pyplot()
    cases = list(
        dict.fromkeys((row["backend"], row["schema"], row["batch"]) for row in report["rows"] if row["schema"])
    )
    rows = {(row["backend"], row["schema"], row["batch"], row["name"]): row for row in report["rows"] if row["timed"]}
    cases = [case for case in cases if (*case, "warm") in rows]
    figure, (above, below) = plt.subplots(2, 1, figsize=(max(7.0, 1.6 * len(cases) + 2), 9), layout="constrained")
    for number, (name, color) in enumerate(_BARS.items()):
        for place, case in enumerate(cases):
            row = rows.get((*case, "warm" if "stock" in name else name))
            if row is None:
                continue
            rates = row["rates"]["stock" if "stock" in name else "patched"]
            middle = row["stock" if "stock" in name else "patched"]
            spread = [[middle - min(rates)], [max(rates) - middle]]
            x = place + 0.2 * (number - 1.5)
            above.bar(x, middle, 0.19, yerr=spread, capsize=2, color=color, label=name if place == 0 else None)
    for place, (backend, _, batch) in enumerate(cases):
        unguided = rows.get((backend, None, batch, "unguided"))
        if unguided:
            label = "unguided (stock)" if place == 0 else None
            above.hlines(unguided["stock"], place - 0.42, place + 0.42, linestyles="dotted", color="black", label=label)
    above.set_ylabel("tokens/s")
    above.set_title(heading(report), fontsize=10)
    _labelled(above, [f"{backend}\n{schema}, {batch}" for backend, schema, batch in cases])
    staged = [one for one in report["stages"] if (one["backend"], one["schema"], one["batch"]) in cases]
    for number, side in enumerate(_SIDES):
        places = [place + 0.4 * number - 0.2 for place in range(len(staged))]
        _stack(below, places, 0.36, [one[side] for one in staged], STAGES, side == "stock")
        for at in places:
            below.annotate(side, (at, 0), (0, 2), textcoords="offset points", ha="center", fontsize=7, rotation=90)
    below.set_ylabel("ms a step")
    _labelled(below, [f"{one['backend']}\n{one['schema']}, {one['batch']}" for one in staged])
    _write(figure, file)


def prefix(report: dict, file: str) -> None:
    """What admitting a request costs, stage by stage, over the prompt's length: a panel for every algorithm and share."""
    plt = _pyplot()
    panels = list(dict.fromkeys((row["algorithm"], row["share"]) for row in report["rows"]))
    algorithms, shares = (list(dict.fromkeys(panel[index] for panel in panels)) for index in (0, 1))
    figure, axes = plt.subplots(
        len(algorithms),
        len(shares),
        figsize=(3.2 * len(shares) + 1, 2.8 * len(algorithms) + 0.6),
        squeeze=False,
        layout="constrained",
        sharey="row",
    )
    for algorithm, share in panels:
        axis = axes[algorithms.index(algorithm)][shares.index(share)]
        rows = [row for row in report["rows"] if (row["algorithm"], row["share"]) == (algorithm, share)]
        stages = ("hash", "lookup", "allocate")
        for number, side in enumerate(_SIDES):
            # Per token, so that a short prompt's bar can be read beside a long one's.
            values = [{stage: 1e3 * row[stage][side] / row["length"] for stage in stages} for row in rows]
            places = [place + 0.4 * number - 0.2 for place in range(len(rows))]
            first = side == "stock" and (algorithm, share) == panels[0]
            _stack(axis, places, 0.36, values, stages, first)
        axis.set_title(f"{algorithm}, {share:.0%} seen before", fontsize=9)
        axis.set_xticks(range(len(rows)), [f"{row['length']:,}" for row in rows])
        axis.tick_params(labelsize=8)
        if share == shares[0]:
            axis.set_ylabel("µs a token")
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"{heading(report)}: left bars stock, right bars patched, over tokens a prompt", fontsize=10)
    _write(figure, file)


def _pyplot():
    import matplotlib

    # Files only: no window system is asked for.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _stack(axis, places: list, width: float, values: list, stages: tuple, labelled: bool) -> None:
    """Stacked bars, one for each of `values` (stage -> height)."""
    bottom = [0.0] * len(places)
    for stage in stages:
        heights = [max(one[stage], 0.0) for one in values]
        axis.bar(places, heights, width, bottom=bottom, color=_COLORS[stage], label=stage if labelled else None)
        bottom = [one + height for one, height in zip(bottom, heights)]


def _labelled(axis, names: list) -> None:
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _write(figure, file: str) -> None:
    from matplotlib import pyplot

    figure.savefig(file, dpi=130)
    pyplot.close(figure)
