"""The way one request has come: the tokens its matcher accepted and where each of them led, easily undone."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any, Callable

# Numbers every place that rows may be cached under, so that none is ever used twice within a process.
numbers = itertools.count()


class Lost(Exception):
    """The matcher accepted what the walk cannot follow: whatever was tracked for this request is void."""


class Trail:
    """Follows one matcher. Accepting only notes the tokens; they are walked when somebody asks where they lead.

    So a terminated matcher, tokens drafted and rolled back, and a walk that can begin only later need no special care:
    what counts is the list of tokens that the matcher holds. One trail is used by one thread at a time; what it walks
    may be shared by all.
    """

    __slots__ = ("follow", "places", "tokens")

    def __init__(self, start: Any, follow: Callable[[Any, int], Any], tokens: Iterable[int] = ()):
        """`start`: the place before any token. `follow(place, token)`: the place after one more; may raise `Lost`."""
        self.follow = follow
        self.tokens = list(tokens)
        self.places = [start]

    def __len__(self) -> int:
        return len(self.tokens)

    def accept(self, tokens: Iterable[int]) -> None:
        """The matcher took these tokens, all of them."""
        self.tokens.extend(tokens)

    def rollback(self, count: int) -> None:
        """The matcher forgot its last `count` tokens."""
        if count > 0:
            kept = max(len(self.tokens) - count, 0)
            del self.tokens[kept:]
            del self.places[kept + 1 :]

    def reset(self) -> None:
        """The matcher forgot all tokens."""
        del self.tokens[:]
        del self.places[1:]

    def place(self, limit: int = sys.maxsize) -> Any:
        """Where the tokens lead: walks those that were not walked yet, or `limit` of them and returns None."""
        places, tokens = self.places, self.tokens
        place = places[-1]
        behind = len(tokens) - len(places) + 1
        if behind > limit:
            for token in tokens[len(places) - 1 : len(places) - 1 + limit]:
                places.append(self.follow(places[-1], token))
            return None
        for token in tokens[len(places) - 1 :]:
            place = self.follow(place, token)
            places.append(place)
        return place
