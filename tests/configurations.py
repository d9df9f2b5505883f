"""Every configuration, stock against patched: `python tests/configurations.py [--scale 1] [--stock-alone] [NAME...]`.

Prints a table: guided tokens compared id by id, and how many answers differ. Ends with status 1 if one differs.
`--stock-alone` compares stock with itself, which says whether a comparison is one that stock passes.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "engine"))

from chat_model import build_chat_model
from matrix import CONFIGURATIONS, NotHere, compare

from vllm_speedups.bench.models import build_model


def main() -> int:
    """0 if all answers are equal, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="configurations whose names contain one of these; all without")
    parser.add_argument("--scale", type=float, default=1.0, help="how much to ask, as a share of the whole")
    parser.add_argument("--stock-alone", action="store_true", help="compare stock with itself")
    options = parser.parse_args()
    chosen = [
        one for name, one in CONFIGURATIONS.items() if not options.names or any(part in name for part in options.names)
    ]
    if not chosen:
        parser.error(f"no configuration is called so; there are: {'; '.join(CONFIGURATIONS)}")
    print(
        "| configuration | asked | requests | guided tokens | answers that differ | processes | rows copied |",
        flush=True,
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    tokens = failures = 0
    with tempfile.TemporaryDirectory() as folder:
        models = {"plain": build_model(Path(folder) / "plain"), "chat": build_chat_model(Path(folder) / "chat")}
        for configuration in chosen:
            begun = time.monotonic()
            try:
                works = compare(configuration, models, options.scale, options.stock_alone)
            except NotHere as reason:
                print(f"| {configuration.name} | not run: {reason} | | | | | |", flush=True)
                continue
            print(f"{configuration.name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
            for found in works:
                tokens += found["guided"]
                failures += found["different"] + bool(found["errors"]) + (not found["evidence"])
                cells = (
                    configuration.name,
                    found["work"],
                    f"{found['requests']:,}",
                    f"{found['guided']:,}",
                    found["different"] or "none",
                    found["processes"] or "",
                    f"{found['copied']:,}",
                )
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
                for example in found["examples"]:
                    print(f"  different: {example}"[:2000], file=sys.stderr)
                if found["errors"]:
                    print(f"  the server refused: {found['errors']}", file=sys.stderr)
                if not found["evidence"]:
                    print(f"  {found['work']}: it did not take place", file=sys.stderr)
    print(f"| all | | | {tokens:,} | {'see above' if failures else 'none'} | | |")
    return 1 if failures else 0


if __name__ == "__main__":
    # Servers end with the blocks that they were started in, also when somebody ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
