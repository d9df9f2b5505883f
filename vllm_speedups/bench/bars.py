"""The plot of the README: a report of the demo as an SVG of bars, by the standard library alone and alike on every machine."""

from __future__ import annotations

from html import escape

from .report import heading

WIDTH, LEFT, RIGHT, TOP, GROUP = 720, 90, 130, 60, 62
COLORS = {"stock": "#bab0ac", "patched": "#59a14f"}


def draw(report: dict) -> str:
    """Warm throughput of every backend, stock and patched, beside the same model without a grammar."""
    found = {(row["backend"], row["name"]): row for row in report["rows"]}
    backends = [backend for backend, name in found if name == "warm"]
    shown = [found[backend, name] for backend in backends for name in ("warm", "unguided") if (backend, name) in found]
    scale = (WIDTH - LEFT - RIGHT) / max((row[side] for row in shown for side in COLORS), default=1)
    height = TOP + GROUP * len(backends) + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" font-family="sans-serif" '
        'font-size="13" fill="#222">',
        "  <title>Tokens per second under a JSON schema, stock and patched</title>",
        f'  <rect width="{WIDTH}" height="{height}" rx="6" fill="#fff"/>',
        f'  <text x="14" y="24">tokens/s under a JSON schema; {escape(heading(report))}</text>',
        '  <text x="14" y="44" font-size="11" fill="#555">above stock, below patched; dotted: stock without a grammar</text>',
    ]
    for number, backend in enumerate(backends):
        top = TOP + GROUP * number
        lines.append(f'  <text x="14" y="{top + 28}">{escape(backend)}</text>')
        warm = found[backend, "warm"]
        for place, (side, color) in enumerate(COLORS.items()):
            y, width = top + 23 * place, warm[side] * scale
            label = f"{warm[side]:.0f}" + (f", {warm['ratio']:.2f} times" if side == "patched" else "")
            lines.append(f'  <rect x="{LEFT}" y="{y}" width="{width:.1f}" height="20" fill="{color}"/>')
            lines.append(f'  <text x="{LEFT + width + 6:.1f}" y="{y + 15}">{label}</text>')
        if (backend, "unguided") in found:
            x = LEFT + found[backend, "unguided"]["stock"] * scale
            lines.append(f'  <path d="M{x:.1f} {top - 3}V{top + 46}" stroke="#222" stroke-dasharray="2 3"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"
