"""State ids for xgrammar: its automaton walked as a recursive transition network, determinised as far as it is walked.

Equal ids have equal rows; docs/xgrammar-states.md has the argument. An *item* is an automaton state with the stack of
frames to return to, and a *state* is the closed set of items that can read a byte, together with whether the text so
far is complete: nothing else can matter to what comes next. A call in tail position pushes no frame, so a repetition
written as right recursion does not remember what was read.

The frame of a counted repetition holds how often it was done. Every repetition reads at least a byte, so where neither
bound can be met within one token the exact count cannot matter to the row, nor to which items come next. Such counts
are *far*: states hold them relative to a base, the base travels with the request, and only where a bound comes near
(or goes out of reach) are counts written out. A string of up to 100,000 characters has some hundreds of states.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from .pace import Later, Pace
from .serialized import Automaton, Unnumbered, Vocabulary
from .trail import Lost, numbers

# A count in a frame is exact below BELOW; BELOW + d is base + d with the lower bound out of a token's reach; WITHIN + d
# is base + d with the lower bound met and the upper one out of reach.
BELOW, WITHIN = 1 << 40, 1 << 41

# What stands among items while a step is put together: that some item read the byte, that the text is complete.
READ, COMPLETE = -1, -2

# Bounds of one network. Past them it adds nothing more; the owner may begin another over the same automaton.
MAX_STATES, MAX_STACKS, MAX_CLOSURE, MAX_REMEMBERED = 1 << 16, 1 << 16, 4096, 1 << 16
# Items that one byte may lead to, those reached on several ways counted as often: uniting these takes 2 ms. And counts
# within one stack: each stack lists its own, so nested repetitions would take memory with the square of their depth.
MAX_WIDTH, MAX_COUNTS = 1 << 14, 64
# Seconds after which a walk that makes new transitions stops, within a token too. What it made is kept.
LONGEST_WALK = 0.002

# Repetitions up to this bound are counted out: what that costs is less than finding the longest token.
FEW = 128


class Full(Unnumbered):
    """The network has met its bounds: a new one over the same automaton would serve."""


class State:
    """One closed set of items. `number` is the state id, unique in this process; `cost` is the owner's to use.

    `counters` names the repetitions whose counts the items hold relative to a base, and `limits` the highest base, for
    each, with which the counts are still far.
    """

    __slots__ = ("complete", "cost", "counters", "items", "limits", "near", "next", "number", "steps")

    def __init__(self, items: tuple, complete: bool, counters: tuple, limits: tuple):
        self.items = items
        self.complete = complete
        self.counters = counters
        self.limits = limits
        self.number = next(numbers)
        self.cost = 0.0
        self.steps: dict = {}  # byte class -> (state, plan), or None if no item reads it
        self.next: dict = {}  # token id -> state, or (state, plan) where that has counters
        self.near: dict = {}  # bases -> place, where these bases are no longer far


class _After(dict):
    """item -> what a byte of one class makes of it: READ, COMPLETE if the text then is, the items of the closure."""

    __slots__ = ("_byte_class", "_network")

    def __init__(self, network: Network, byte_class: int):
        super().__init__()
        self._network = network
        self._byte_class = byte_class

    def __missing__(self, item: int) -> tuple:
        network = self._network
        stack, at = divmod(item, network._size)
        found: set = set()
        for target in network._targets(at, self._byte_class):
            items, complete = network._closures.get(item - at + target) or network._close(target, stack)
            found.update(items)
            found.add(READ)
            if complete:
                found.add(COMPLETE)
        self[item] = after = tuple(found)
        network._held += 200 + 8 * len(after)
        if time.perf_counter() > network._until:
            # Not before one was found: every attempt gets further than the one before.
            raise Later
        return after


class Network:
    """The states of one compiled grammar, made as they are first visited. Any number of threads may walk one network.

    A *place* is what a request keeps: a state, or (state, bases) where the state has counters. A *plan* says how bases
    change: for each counter of the new state, (index among the old state's counters or -1, what is added).
    """

    def __init__(
        self,
        automaton: Automaton,
        vocabulary: Vocabulary | Sequence[bytes],
        horizon: int | None = None,
        pace: Pace | None = None,
        budget: float = math.inf,
    ):
        """`vocabulary`: the bytes of each token id. `horizon`: at least the most bytes that any of them has.

        Without a horizon the vocabulary's `longest` is asked for where a repetition is long enough to care: a horizon
        beyond every bound only means that all counts are told apart. `pace`: when new transitions may be made.
        `budget`: bytes that states, stacks and transitions may take.

        Raises:
            Unnumbered: the grammar is left-recursive at its start.
        """
        self.automaton = automaton
        self.vocabulary = vocabulary
        self.pace = pace
        self.budget = budget
        if horizon is None:
            widest = max((upper for _, _, upper, _ in automaton.repeats.values()), default=0)
            horizon = vocabulary.longest if widest > FEW else widest  # type: ignore[union-attr]
        self.horizon = horizon
        self.walk_s = 0.0  # seconds spent on transitions that were not remembered, since the owner last set it back
        self.closed: str | None = None
        self._size = len(automaton.final)
        self._after = [_After(self, byte_class) for byte_class in range(max(automaton.classes) + 1)]
        self._parent, self._frames, self._depth = [0], [(0, 0)], [0]
        self._counts: list = [()]
        self._counted: set = set()  # the stacks that hold counts
        self._stacks: dict = {}
        self._closures: dict = {}
        self._known: dict = {}
        self._remembered = 0
        self._held = 0  # bytes in lists of items, transitions and counts
        self._until = math.inf  # when the walk at hand has to stop
        self._lock = threading.Lock()
        items, complete = self._close(automaton.root, 0)
        state, plan = self._state(set(items), complete, None)
        bases = tuple(added for _, added in plan)
        self.initial = (state, bases) if bases else state

    def __len__(self) -> int:
        return len(self._known)

    @property
    def nbytes(self) -> int:
        """Bytes held, roughly, without the vocabulary."""
        return self.automaton.nbytes + self._grown

    @property
    def _grown(self) -> int:
        stacks, closures, known = len(self._stacks), len(self._closures), len(self._known)
        return 400 * stacks + 250 * closures + 600 * known + self._held + 120 * self._remembered

    def follow(self, place, token: int):
        """The place after one more token, which xgrammar accepted at `place`.

        Raises:
            Lost: no item reads that token, so xgrammar and this network disagree.
            Unnumbered: the walk met left recursion; `Full`: it met the bounds of the network.
            Later: a transition would have to be made, and there is no time for it now.
        """
        state, bases = (place, ()) if place.__class__ is State else place
        there = state.next.get(token)
        if there.__class__ is State:
            return there
        if there is None:
            there = self._walk(state, token)
            if there.__class__ is State:
                return there
        state, plan = there
        bases = tuple([(bases[source] + added if source >= 0 else added) for source, added in plan])
        for base, limit in zip(bases, state.limits):
            if base > limit:
                return self._come_near(state, bases)
        return state, bases

    def _walk(self, state: State, token: int):
        """Byte by byte, remembered under the token id: a state, or (state, plan)."""
        start = time.perf_counter()
        if not 0 <= token < len(self.vocabulary):
            raise Lost(f"token {token} is not in the vocabulary")
        here, plan, made, until = state, tuple((index, 0) for index in range(len(state.counters))), False, math.inf
        try:
            for byte_class in self.vocabulary[token].translate(self.automaton.classes):
                step = here.steps.get(byte_class, state)
                if step is state:
                    if made:
                        if time.perf_counter() > until:
                            raise Later
                    elif self.pace:
                        if not self.pace.allows(start):
                            raise Later
                        until = start + LONGEST_WALK
                    made = True
                    step = self._step(here, byte_class, until)
                if step is None:
                    raise Lost(f"no rule reads token {token}")
                here, change = step
                if change or plan:
                    plan = tuple(
                        [
                            (plan[source][0], plan[source][1] + added) if source >= 0 else (-1, added)
                            for source, added in change
                        ]
                    )
            there = (here, plan) if here.counters else here
            if self._remembered < MAX_REMEMBERED:
                self._remembered += 1
                state.next[token] = there
            return there
        finally:
            seconds = time.perf_counter() - start
            self.walk_s += seconds
            if made and self.pace:
                self.pace.spend(seconds)

    def _step(self, state: State, byte_class: int, until: float):
        """(state, plan) after a byte of a class, or None where no item reads it. Remembered."""
        with self._lock:
            if byte_class in state.steps:
                return state.steps[byte_class]
            self._until = until
            # One look-up an item, and no Python code in the loop: states of long counted strings have over 100 items.
            # What was found before time is up is found again at once.
            after = list(map(self._after[byte_class].__getitem__, state.items))
            if sum(map(len, after)) > MAX_WIDTH:
                raise self._close_down("it is too ambiguous")
            items = set().union(*after)
            if not items:
                step = None
            else:
                complete = COMPLETE in items
                items.discard(COMPLETE)
                items.discard(READ)
                step = self._state(items, complete, state)
            state.steps[byte_class] = step
            self._held += 150
            return step

    def _targets(self, at: int, byte_class: int) -> list:
        classes = self.automaton.classes
        return [
            target for first, last, target in self.automaton.reads[at] if classes[first] <= byte_class <= classes[last]
        ]

    def _close(self, at: int, stack: int) -> tuple:
        """(items that read a byte, is the text complete) from one item, through calls, returns and epsilon edges."""
        automaton, size = self.automaton, self._size
        final, repeats, reads = automaton.final, automaton.repeats, automaton.reads
        # Calls nest at most once a rule at one position, unless a rule calls itself before anything is read.
        deepest = self._depth[stack] + len(automaton.starts)
        work, seen, items, complete = [(at, 0, stack)], set(), [], False
        while work:
            item = work.pop()
            if item in seen:
                continue
            seen.add(item)
            state, count, stack_ = item
            if len(seen) > MAX_CLOSURE or self._depth[stack_] > deepest:
                raise self._close_down("it is left-recursive, or too ambiguous")
            if final[state] and not count:
                if stack_:
                    work.append((*self._frames[stack_], self._parent[stack_]))
                else:
                    complete = True
            if state in repeats:
                rule, lower, upper, target = repeats[state]
                if count < BELOW:
                    leave, again = count >= lower, count < upper
                else:
                    leave, again = count >= WITHIN, True
                if leave:
                    work.append((target, 0, stack_))
                if again:
                    work.append((automaton.starts[rule], 0, self._push(state, count + 1, stack_)))
                continue
            if reads[state]:
                items.append(stack_ * size + state)
            for target in automaton.epsilons[state]:
                work.append((target, 0, stack_))
            for rule, target in automaton.calls[state]:
                work.append(
                    (automaton.starts[rule], 0, stack_ if self._is_end(target) else self._push(target, 0, stack_))
                )
        closure = self._closures[stack * size + at] = (tuple(items), complete)
        self._held += 8 * len(items)
        return closure

    def _is_end(self, state: int) -> bool:
        """Whether nothing can follow in the rule, so that a call that returns here is in tail position."""
        automaton = self.automaton
        return bool(
            automaton.final[state]
            and not automaton.reads[state]
            and not automaton.epsilons[state]
            and not automaton.calls[state]
            and state not in automaton.repeats
        )

    def _push(self, state: int, count: int, stack: int) -> int:
        """The stack with one more frame: where to return to and, if that is a repetition, how often it will be done."""
        key = (state, count, stack)
        known = self._stacks.get(key)
        if known is None:
            known = len(self._parent)
            counts = self._counts[stack]
            if known >= MAX_STACKS or len(counts) >= MAX_COUNTS:
                raise self._close_down("it has too many stacks", Full)
            self._stacks[key] = known
            self._parent.append(stack)
            self._frames.append((state, count))
            self._depth.append(self._depth[stack] + 1)
            self._held += 8 * len(counts)
            self._counts.append((*counts, (state, count)) if state in self.automaton.repeats else counts)
            if self._counts[known]:
                self._counted.add(known)
        return known

    def _state(self, items: set, complete: bool, source: State | None) -> tuple:
        """(state, plan) of a closed set of items that was reached from `source`."""
        plan: tuple = ()
        counters: tuple = ()
        limits: tuple = ()
        stacks = self._counted.intersection(map(self._size.__rfloordiv__, items)) if self._counted else ()
        if stacks:
            items, stacks, changes = self._factor(items, stacks, self._far)
            if changes:
                counters = tuple(sorted(changes))
                before = source.counters if source else ()
                plan = tuple(
                    [(before.index(at) if relative else -1, added) for at, (relative, added) in sorted(changes.items())]
                )
                limits = tuple([self._limit(stacks, at) for at in counters])
        key = tuple(sorted(items)), complete
        state = self._known.get(key)
        if state is None:
            if len(self._known) >= MAX_STATES or self._grown > self.budget:
                raise self._close_down("it has too many states", Full)
            self._known[key] = state = State(key[0], complete, counters, limits)
            self._held += 16 * len(items)
        return state, plan

    def _far(self, at: int, counts: set) -> tuple:
        """How to write the counts of the repetition at `at`: (function of a count, relative, added), or None."""
        _, lower, upper, _ = self.automaton.repeats[at]
        far = [count for count in counts if count >= BELOW]
        if far:
            least = min((count - WITHIN if count >= WITHIN else count - BELOW) for count in far)
            return (lambda count: count - least if count >= BELOW else count), True, least
        horizon, base = self.horizon, min(counts)
        if all(count + horizon < lower or lower <= count < upper - horizon for count in counts):
            return (lambda count: count - base + (WITHIN if count >= lower else BELOW)), False, base
        return None

    def _factor(self, items: set, stacks: set, rewrite) -> tuple:
        """Items with their counts rewritten, their stacks that hold counts, and {repetition: (relative, added)}."""
        size, counts_of = self._size, self._counts
        counts: dict = {}
        for stack in stacks:
            for at, count in counts_of[stack]:
                counts.setdefault(at, set()).add(count)
        changes, functions = {}, {}
        for at, values in counts.items():
            found = rewrite(at, values)
            if found:
                functions[at], relative, added = found
                changes[at] = relative, added
        if any(not relative or added for relative, added in changes.values()):
            moved: dict = {}
            for stack in stacks:
                self._restack(stack, functions, moved)
            items = {moved.get(item // size, item // size) * size + item % size for item in items}
            stacks = {moved[stack] for stack in stacks}
        return items, stacks, changes

    def _restack(self, stack: int, functions: dict, moved: dict) -> int:
        chain = []
        while stack not in moved and stack in self._counted:
            chain.append(stack)
            stack = self._parent[stack]
        after = moved.get(stack, stack)
        for stack in reversed(chain):
            state, count = self._frames[stack]
            if state in functions and state in self.automaton.repeats:
                count = functions[state](count)
            after = moved[stack] = self._push(state, count, after)
        return after

    def _limit(self, stacks: set, at: int) -> int:
        """The highest base with which every far count of a repetition is still far."""
        _, lower, upper, _ = self.automaton.repeats[at]
        limit = upper
        for stack in stacks:
            for repeat, count in self._counts[stack]:
                if repeat == at and count >= BELOW:
                    ahead = upper - (count - WITHIN) if count >= WITHIN else lower - (count - BELOW)
                    limit = min(limit, ahead - self.horizon - 1)
        return limit

    def _come_near(self, state: State, bases: tuple):
        """The same place with counts written out where a bound has come within a token's reach. Remembered."""
        place = state.near.get(bases)
        if place is not None:
            return place
        with self._lock:
            written = {at: base for at, base, limit in zip(state.counters, bases, state.limits) if base > limit}

            def exact(at, counts):
                if at in written:
                    base = written[at] - BELOW
                    return (
                        (lambda count: count + base - (BELOW if count >= WITHIN else 0) if count >= BELOW else count),
                        False,
                        0,
                    )
                return None

            stacks = self._counted.intersection(map(self._size.__rfloordiv__, state.items))
            items, _, _ = self._factor(set(state.items), stacks, exact)
            after, plan = self._state(items, state.complete, state)
        after_bases = tuple([(bases[source] + added if source >= 0 else added) for source, added in plan])
        place = (after, after_bases) if after_bases else after
        if self._remembered < MAX_REMEMBERED:
            self._remembered += 1
            state.near[bases] = place
        return place

    def _close_down(self, reason: str, error=Unnumbered) -> Unnumbered:
        self.closed = reason
        return error(reason)
