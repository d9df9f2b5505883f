"""Whether walking a grammar's network pays: what it costs against what it saves, measured as it runs."""

from __future__ import annotations

# Seconds that a grammar may owe before anybody asks, and seconds past which nobody asks any more. Then the most that
# past savings count for, in seconds.
ALLOWANCE, LIMIT, CREDIT = 0.02, 1.0, 1.0
# Misses between two verdicts. The first of a trial is never held against a grammar: requests that begin to walk in the
# middle walk many tokens for one row.
WINDOW = 32
# A row that was filled is taken to be worth so many fills, since its state may come again.
RETURNS = 16.0
# Fills by stock until walking is tried again; doubled each time that a trial ends in debt, up to the last.
FIRST_PAUSE, LAST_PAUSE = 20_000, 640_000
# Seconds that a hit costs (look-ups and the copy of the row), and a miss on top of the fill (keeping the row).
HIT_S, MISS_S = 3e-6, 6e-6


class Worth:
    """The account of one grammar. Threads may lose an addition to each other; the account can bear it.

    A grammar that saves more than it costs in the long run is not given up: it may owe while its states are new, and
    where it goes on owing walking pauses and is tried again, ever more seldom. So a grammar whose states never come
    again (palindromes: new stacks for ever) costs 0.1 us a token in the end.
    """

    __slots__ = ("_before", "_filled", "_misses", "_pause", "_waits", "balance", "walking")

    def __init__(self) -> None:
        self.walking = True
        self.balance = 0.0
        self._before = 0.0  # the balance when the window began
        self._filled = 0.0  # seconds that stock filled in this window
        self._misses = 0  # in this trial
        self._pause = FIRST_PAUSE
        self._waits = 0

    def hit(self, cost: float) -> None:
        """A row was copied that had taken stock `cost` seconds to fill."""
        self.balance += cost - HIT_S

    def miss(self, walked: float, cost: float) -> bool:
        """A row had to be filled, in `cost` seconds. `walked`: seconds walked since the last miss. Whether to go on."""
        balance = self.balance = min(self.balance - walked - MISS_S, CREDIT)
        self._filled += cost
        self._misses += 1
        if self._misses % WINDOW == 0:
            owes_more = balance - self._before + RETURNS * self._filled < 0
            if balance >= ALLOWANCE:
                self._pause = FIRST_PAUSE
            elif self._misses > WINDOW and ((owes_more and balance < -ALLOWANCE) or balance < -LIMIT):
                self.walking = False
                self._waits = self._pause
                self._pause = min(2 * self._pause, LAST_PAUSE)
            self._before, self._filled = balance, 0.0
        return self.walking

    def idle(self) -> None:
        """Stock filled a row while walking pauses."""
        self._waits -= 1
        if self._waits <= 0:
            self.balance = self._before = self._filled = 0.0
            self._misses, self.walking = 0, True
