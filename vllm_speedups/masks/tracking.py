"""Follows the matchers of a backend: which state each is in, which rows are known, and when to leave it to stock.

One `Grammar` a compiled grammar, shared by all requests that use it, and one `Request` a matcher. The owner (the glue
of a patch) tells a request what its matcher accepted, asks `look_up()` before a row is filled and calls `filled()`
after stock filled one.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Callable

import numpy as np

from .history import History
from .network import Full, Network, State
from .pace import BUILD_MOST, BUILD_RETURNS, BUILD_SHARE, Later, Pace, resting
from .rows import GrammarRows, RowCache, key_bytes
from .serialized import Unnumbered, Unsupported
from .trail import Lost, Trail
from .worth import Worth

logger = logging.getLogger("vllm.speedups")

# Seconds of filling by stock after which a network is built: grammars used once or twice cost nothing more. And seconds
# that a fill has to take on average: walking and copying take some 5 us.
BUILD_AFTER, CHEAP = 0.005, 6e-6
# Seconds from which on a row is kept under the exact tokens.
EXPENSIVE = 1e-4
# Tokens that a request may have behind it when a network appears, and how many of them it walks at each row: where all
# states are new that is some milliseconds.
CATCH_UP, STRIDE = 512, 8
# Rows between two looks of a request that was told to come later, or whose grammar was cheap for so many fills.
WAIT, KNOWN_CHEAP = 8, 512
# Networks that wait to be built: each holds on to a compiled grammar. What finds no place asks again.
MAX_WAITING = 8
# What an entry without network and trie costs beside its key, roughly.
_ENTRY_BYTES = 2000
# Misses between two looks at what a grammar's network or trie holds, and seconds between two looks at all networks:
# walks to states whose rows are known add to a network without a miss.
ACCOUNT_EVERY, ACCOUNT_S = 64, 10.0


class Arrays:
    """The NumPy view of a bitmask, made once: an engine fills one and the same tensor, and a view costs 1 us."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple = (None, None)

    def __call__(self, bitmask) -> np.ndarray:
        """int32 [rows, words], sharing memory with the CPU tensor."""
        tensor, array = self._last
        if tensor is not bitmask:
            array = bitmask.numpy()
            self._last = (bitmask, array)
        return array


class Grammar:
    """What is known of one compiled grammar, by whatever it was compiled from."""

    __slots__ = (
        "__weakref__",
        "counted",
        "dear",
        "fill_s",
        "fills",
        "history",
        "keeps",
        "key",
        "misses",
        "network",
        "reason",
        "rows",
        "worth",
    )

    def __init__(self, key: Hashable, rows: GrammarRows):
        self.key = key
        self.rows = rows
        self.network: Network | None = None
        self.history: History | None = None
        self.worth = Worth()
        self.reason = ""  # why it has no network, and will not get one
        self.keeps = False  # whether, then, rows may be kept under the exact tokens
        self.fill_s = 0.0  # seconds that stock filled before the network was asked for
        self.fills = 0
        self.dear = False  # whether a fill was ever expensive
        self.misses = 0
        self.counted = self.nbytes  # bytes in the account

    @property
    def nbytes(self) -> int:
        """Bytes held by key, network and trie, roughly; rows are counted where they are kept."""
        held = _ENTRY_BYTES + key_bytes(self.key)
        return held + (self.network.nbytes if self.network else 0) + (self.history.nbytes if self.history else 0)


class Tracker:
    """The grammars of one patch: builds their networks beside the engine, and keeps them within a budget.

    Networks are built on a thread of their own. Serialising runs outside the interpreter lock, and what follows takes a
    few milliseconds, so that neither compiling nor the engine waits for it.
    """

    def __init__(self, rows: RowCache, budget: int, counters: dict):
        self.rows = rows
        self.budget = budget
        self.counters = counters
        self.nbytes = 0
        self.pace = Pace()
        self.saved = 0.0  # seconds that copied rows had taken to fill, since building was last accounted for
        self._builds = Pace(BUILD_SHARE, BUILD_MOST)
        self._grammars: OrderedDict = OrderedDict()
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def grammar(self, key: Hashable) -> Grammar:
        """The grammar that `key` identifies; made if unknown."""
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is None:
                grammar = self._grammars[key] = Grammar(key, self.rows.grammar(key))
                self.nbytes += grammar.counted
                self._trim()
            else:
                self._grammars.move_to_end(key)
            return grammar

    def __len__(self) -> int:
        return len(self._grammars)

    def request_build(self, grammar: Grammar, source: Callable[[], tuple]) -> None:
        """Have the network built, soon. `source` returns (Automaton, Vocabulary), on another thread."""
        if self._jobs.qsize() >= MAX_WAITING:
            grammar.fill_s, grammar.fills = 0.0, 0
            return
        grammar.fill_s = float("-inf")
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="vllm-speedups-networks", daemon=True)
                self._thread.start()
        self._jobs.put((grammar, source))

    def build(self, grammar: Grammar, source: Callable[[], tuple]) -> None:
        """Build the network now, on this thread. Never raises."""
        try:
            automaton, vocabulary = source()
            grammar.network = Network(automaton, vocabulary, pace=self.pace, budget=self.budget)
            self.counters["networks built"] += 1
            self.account(grammar)
        except Unsupported as error:
            self.decline(grammar, str(error), keeps=isinstance(error, Unnumbered))
        except Exception as error:
            logger.warning("vllm-speedups: no state ids for a grammar, its rows are filled by stock: %r", error)
            self.decline(grammar, f"unexpected {type(error).__name__}")

    def _work(self) -> None:
        counted = time.monotonic()
        while True:
            if time.monotonic() - counted > ACCOUNT_S:
                self.account_all()
                counted = time.monotonic()
            try:
                job = self._jobs.get(timeout=ACCOUNT_S)
            except queue.Empty:
                continue
            # A client can have as many networks built as it sends grammars, and none need ever pay.
            while not self._builds.allows(time.process_time()):
                saved, self.saved = self.saved, 0.0
                self._builds.earn(saved * BUILD_RETURNS)
                time.sleep(0.2)
            begun = time.thread_time()
            with resting():
                self.build(*job)
            self._builds.spend(time.thread_time() - begun)
            # Whoever waits for the next job holds nothing of the last.
            del job

    def decline(self, grammar: Grammar, reason: str, keeps: bool = False) -> None:
        """Give no state ids for this grammar any more. `keeps`: its expensive rows are kept under the exact tokens."""
        grammar.network, grammar.reason, grammar.keeps = None, reason, keeps
        self.counters[f"declined: {reason}"] += 1

    def refresh(self, grammar: Grammar, network: Network) -> None:
        """`network` has met its bounds: begin another where it paid, decline where it did not."""
        with self._lock:
            if grammar.network is not network:
                return
        if grammar.worth.balance > 0 and not grammar.reason:
            grammar.network = Network(network.automaton, network.vocabulary, network.horizon, self.pace, self.budget)
            self.counters["networks begun anew"] += 1
        else:
            self.decline(grammar, network.closed or "its network is full", keeps=True)

    def account(self, grammar: Grammar) -> None:
        """Count what a grammar in use holds, and forget the least recently used ones past the budget."""
        with self._lock:
            if self._grammars.get(grammar.key) is not grammar:
                return
            self._count(grammar)
            self._grammars.move_to_end(grammar.key)
            self._trim()

    def account_all(self) -> None:
        """The same for all that have a network, used or not."""
        with self._lock:
            for grammar in self._grammars.values():
                if grammar.network is not None:
                    self._count(grammar)
            self._trim()

    def _count(self, grammar: Grammar) -> None:
        size = grammar.nbytes
        self.nbytes += size - grammar.counted
        grammar.counted = size

    def _trim(self) -> None:
        while self.nbytes > self.budget and self._grammars:
            self._forget(next(iter(self._grammars)))

    def _forget(self, key: Hashable) -> None:
        # Requests that hold the grammar walk on in what they have; a new one begins from nothing.
        grammar = self._grammars.pop(key)
        self.nbytes -= grammar.counted
        grammar.counted = 0
        self.counters["networks forgotten"] += grammar.network is not None or grammar.history is not None


class Request:
    """One matcher: the tokens it holds, and where they lead. Used by one thread at a time."""

    __slots__ = ("grammar", "network", "source", "state", "tracker", "trail", "waits")

    def __init__(self, tracker: Tracker, grammar: Grammar, source: Callable[[], tuple] | None = None):
        """`source`: see `Tracker.request_build`; None where the matcher shows no automaton."""
        self.tracker = tracker
        self.grammar = grammar
        self.source = source
        self.trail = Trail(None, None)
        self.network: Any = None  # the network or trie that the trail follows, or False for neither any more
        self.state = None  # the state or node that was last looked up
        self.waits = 0  # rows to leave to stock before the next look: the owner counts them down

    def look_up(self) -> np.ndarray | None:
        """The row of the place that the tokens lead to, int32 [words], or None if stock has to fill it."""
        self.state = None
        network = self.network
        if network is None:
            if not self._attach():
                return None
        elif network is False:
            return None
        try:
            place = self.trail.place(STRIDE)
        except Later:
            self.waits = WAIT
            self.tracker.counters["walks put off"] += 1
            return None
        except (Lost, Unsupported) as error:
            self._stop(error)
            return None
        if place is None:
            return None
        state = self.state = place[0] if place.__class__ is tuple else place
        row = self.grammar.rows.rows.get(state.number)
        if row is not None:
            self.grammar.worth.hit(state.cost)
            self.tracker.saved += state.cost
        return row

    def filled(self, row: np.ndarray, seconds: float) -> None:
        """Stock filled this row, int32 [words], for what `look_up` just did not know."""
        grammar, state = self.grammar, self.state
        if seconds >= EXPENSIVE:
            grammar.dear = True
        if state is None:
            self._unknown(seconds)
            return
        # Rows kept or not, a miss may have made a place.
        grammar.misses += 1
        if grammar.misses % ACCOUNT_EVERY == 0:
            self.tracker.account(grammar)
        if state.__class__ is not State:
            if seconds < EXPENSIVE:
                return
        else:
            walked, self.network.walk_s = self.network.walk_s, 0.0
            if not grammar.worth.miss(walked, seconds):
                self.tracker.counters["walks paused"] += 1
                self._leave()
                return
        state.cost = seconds
        grammar.rows.put(state.number, row)

    def _unknown(self, seconds: float) -> None:
        grammar = self.grammar
        if not grammar.worth.walking:
            grammar.worth.idle()
        elif self.source and grammar.network is None and not grammar.reason:
            grammar.fill_s += seconds
            grammar.fills += 1
            if grammar.fill_s >= max(BUILD_AFTER, CHEAP * grammar.fills):
                self.tracker.request_build(grammar, self.source)
            elif grammar.fills >= KNOWN_CHEAP:
                self.waits = WAIT

    def _attach(self) -> bool:
        """Begin to follow the network, or the trie of a grammar that has none and whose fills are expensive."""
        grammar, trail = self.grammar, self.trail
        network: Any = grammar.network
        if network is not None:
            if not grammar.worth.walking or len(trail.tokens) > CATCH_UP:
                self.network = False
                return False
        elif grammar.dear and (grammar.keeps or not self.source):
            if grammar.history is None:
                grammar.history = History()
            network = grammar.history
        else:
            return False
        self.network = network
        self.trail = Trail(network.initial, network.follow, trail.tokens)
        return True

    def _leave(self) -> None:
        self.network = False
        self.state = None

    def _stop(self, error: Exception) -> None:
        """The walk cannot go on: this request is stock's, and the grammar too unless only its network was full."""
        grammar, network = self.grammar, self.network
        self._leave()
        if isinstance(error, Lost):
            # The matcher and the network disagree, so the premise is broken for this grammar.
            logger.warning("vllm-speedups: state ids of a grammar are off: %s", error)
            self.tracker.decline(grammar, "the matcher accepted what the network does not")
        elif isinstance(error, Full):
            self.tracker.refresh(grammar, network)
        elif grammar.network is network:
            self.tracker.decline(grammar, str(error), keeps=isinstance(error, Unnumbered))
