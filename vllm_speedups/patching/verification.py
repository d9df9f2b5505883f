"""Verify mode: which answers of a patch stock computes again, and what is said where the two differ."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path

# Of its own, so that nobody's seeded sequence is disturbed.
_random = random.Random()


class Verification:
    """Draws a `share` (0 to 1) of all answers. `dump` is a folder for all that a difference takes to be reproduced.

    What clients sent, and what was generated for them, goes to that folder and nowhere else.
    """

    def __init__(self, share: float = 0.0, dump: str | None = None):
        self.share = share
        self.dump = dump

    def due(self) -> bool:
        """Whether to verify this answer."""
        return _random.random() < self.share

    def report(self, patch: str, facts: Mapping, private: Mapping) -> str:
        """What to log of a difference: `facts`, and where `private`, which may hold texts of requests, was written."""
        shown = json.dumps(facts, default=str)
        if self.dump is None:
            return f"{shown} (VLLM_SPEEDUPS_VERIFY_DUMP=FOLDER has the request's own data written there, too)"
        file = Path(self.dump) / f"{patch}-{os.getpid()}.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # Whoever may read the requests: the user that vLLM runs as.
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
                json.dump({"patch": patch, **facts, **private}, out, indent=1, default=str)
        except OSError as error:
            return f"{shown} (VLLM_SPEEDUPS_VERIFY_DUMP={self.dump!r} cannot be written: {error})"
        return f"{shown} (with the request's own data in {file})"
