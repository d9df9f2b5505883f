"""Reports as the benchmarks make them, with figures made up."""

from __future__ import annotations

MACHINE = {"cpu": "A Processor", "cores": 4, "python": "3.11.0", "device": "cpu", "versions": {"vllm": "0.32.0"}}


def row(name: str, stock: list, patched: list, **more) -> dict:
    return {
        "backend": "xgrammar",
        "schema": None if name == "unguided" else "bounded",
        "batch": 64,
        "name": name,
        "timed": name != "greedy",
        "stock": sorted(stock)[len(stock) // 2],
        "patched": sorted(patched)[len(patched) // 2],
        "ratio": sorted(patched)[len(patched) // 2] / sorted(stock)[len(stock) // 2],
        "rates": {"stock": stock, "patched": patched},
        "ratios": [one / other for one, other in zip(patched, stock)],
        "tokens": 1000,
        "equal": True,
        **more,
    }


def guided(what: str = "guided", rows: list | None = None) -> dict:
    stages = {"steps": 10, **dict.fromkeys(("forward", "fill", "advance", "transfer", "apply", "sample", "other"), 1.0)}
    return {
        "what": what,
        "command": f"vllm-speedups bench {what}",
        "machine": MACHINE,
        "options": {"tokens": 32, "disable_any_whitespace": False},
        "vocabulary": 131_072,
        "rows": rows
        or [
            row("unguided", [900.0, 1000.0, 1100.0], [1000.0, 1000.0, 1000.0]),
            row("cold", [500.0], [750.0]),
            row("warm", [600.0, 500.0, 550.0], [1200.0, 1500.0, 1100.0]),
            row("new outputs", [600.0], [1200.0]),
            row("greedy", [1.0], [1.0], tokens=77),
        ],
        "stages": [
            {
                "backend": "xgrammar",
                "schema": "bounded",
                "batch": 64,
                "stock": stages,
                "patched": {**stages, "fill": 0.25},
            }
        ],
        "refused": [],
        "engines": {"xgrammar": {"failed": "", "patches": {"grammar-masks": "applied"}, "threads": 2}},
    }


def prefix() -> dict:
    stages = {stage: {"stock": 2.0, "patched": 1.0} for stage in ("hash", "lookup", "allocate", "free", "admission")}
    return {
        "what": "prefix",
        "command": "vllm-speedups bench prefix",
        "machine": MACHINE,
        "options": {"block_size": 16, "repeat": 3},
        "rows": [
            {"algorithm": algorithm, "length": length, "share": share, **stages}
            for algorithm in ("sha256", "xxhash")
            for length in (1024, 8192)
            for share in (0.0, 1.0)
        ],
        "small": [{"algorithm": "sha256", "a step": {"stock": 2.0, "patched": 1.0}}],
    }
