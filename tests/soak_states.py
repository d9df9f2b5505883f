"""A soak of state ids: `python tests/soak_states.py STEPS [SEED]` walks so many tokens, until the first wrong row.

Hand-made grammars over Tekken and over a small vocabulary, and random schemas, regular expressions and rules. The test
suite runs a few thousand steps of the same.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "masks"))

import grammars
import walking

GENERATORS = {"schema": grammars.random_schema, "regex": grammars.random_regex, "ebnf": grammars.random_ebnf}


def main(steps: int, seed: int = 0) -> int:
    """0, or 1 with what it takes to see the failure again."""
    total, declined, begun = Counter(), Counter(), time.monotonic()
    names = sorted(grammars.HAND_MADE)
    round_ = 0
    while total["hits"] + total["misses"] < steps:
        round_ += 1
        number = seed * 1_000_003 + round_
        random_ = random.Random(number)
        tongue = walking.tekken() if random_.random() < 0.15 else walking.small()
        if random_.random() < 0.5:
            kind, source = grammars.HAND_MADE[random_.choice(names)]
        else:
            kind = random_.choice(list(GENERATORS))
            source = GENERATORS[kind](random_)
        try:
            compiled = tongue.compile(kind, source)
        except Exception:
            declined["xgrammar refuses it"] += 1
            continue
        try:
            # Few states are met twice in a short walk: a wrong id would go unseen without many outputs.
            total += walking.walk(
                tongue,
                compiled,
                outputs=60,
                length=120,
                seed=number,
                seconds=30,
                spell_out=random_.random() < 0.02 and len(tongue.vocabulary) < 1000,
            )
            total["grammars"] += 1
        except walking.Unsupported as error:
            declined[str(error)] += 1
        except AssertionError as error:
            print(f"WRONG after {dict(total)}: seed {seed}, round {round_}, {kind} {source!r}: {error}", flush=True)
            return 1
        if round_ % 10 == 0:
            print(f"{time.monotonic() - begun:.0f} s: {dict(total)}; declined {dict(declined)}", flush=True)
    print(f"{time.monotonic() - begun:.0f} s, none wrong: {dict(total)}; declined {dict(declined)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
