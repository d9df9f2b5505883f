"""Reads the automaton out of xgrammar's serialised grammar, and says no to whatever it does not know for certain."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Callable

from .pace import rest

# The versions of the serialised form that this reader was proven against (xgrammar 0.2.8 writes v16).
VERSIONS = ("v16",)

# What the first number of an edge means when it is no byte (0 to 255): xgrammar's cpp/fsm.h, `FSMEdge::EdgeType`.
EPSILON, CALL, REPEAT = -1, -2, -4
_NAMES = {-3: "end-of-sequence", -5: "token-set", -6: "excluded-token"}

_DECODER = json.JSONDecoder()
_NUMBERS = re.compile(r"\[[-\d,]*\]")
# start, final states, is it deterministic, edges], edges, states]
_RULE_REST = re.compile(r",(\d+),\[((?:\d+(?:,\d+)*)?)\],(?:true|false),\d+\],\d+,\d+\]")


class Unsupported(Exception):
    """This grammar cannot be given state ids; `str()` of it says why. Nothing is wrong with any other grammar.

    Its rows must be filled every time: with a budget, filling one changes what the matcher does next.
    """


class Unnumbered(Unsupported):
    """Its automaton reads bytes and calls rules, nothing else, and yet cannot be given state ids.

    So equal tokens lead to equal rows, and filling a row changes nothing.
    """


@dataclass
class Automaton:
    """The rules of a compiled grammar as one recursive transition network over bytes.

    Automaton states are numbered from 0 across all rules; each belongs to exactly one rule. Bytes that no edge tells
    apart share a byte class: `classes` is a table for `bytes.translate`.
    """

    root: int
    starts: list  # per rule: its start state
    final: bytearray  # per state: 1 where its rule may end
    reads: list  # per state: [(first byte, last byte, target state)]
    epsilons: list  # per state: (target state, ...)
    calls: list  # per state: ((rule, state to return to), ...)
    repeats: dict  # state -> (rule, lower, upper, target state), in place of any other edge
    nullable: frozenset = frozenset()  # rules that xgrammar takes to match the empty text
    classes: bytes = field(default=b"")

    @property
    def nbytes(self) -> int:
        """Bytes held, roughly."""
        return 300 * len(self.reads) + 80 * sum(map(len, self.reads))


def parse(text: str) -> Automaton:
    """The automaton in `CompiledGrammar.grammar.serialize_json()`.

    Every rule carries a copy of the whole automaton, so the text grows with the square of the grammar (10 MB for one
    `maxLength` of 300). The copies are compared with the first as text, not parsed: it is faster by two orders of
    magnitude, and it proves that the rules share one automaton.

    Raises:
        Unsupported: an unknown version or form, or something that state ids cannot express.
    """
    try:
        fields, complete = _split(text)
        return _automaton(fields, complete)
    except Unsupported:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Unsupported(
            f"its serialised form reads otherwise than expected ({type(error).__name__}: {error})"
        ) from None


class Vocabulary:
    """The bytes of each token id, taken one at a time when they are first met.

    xgrammar's own array of decoded tokens converts a token to Python in 4 us, all 131,072 of them in a quarter of a second,
    and in seconds beside a busy thread. `longest`, the most bytes that any token has, is read from
    `TokenizerInfo.serialize_json()` when somebody asks: as long, but outside the interpreter lock.
    """

    def __init__(self, tokens: Sequence[bytes], serialize: Callable[[], str]):
        self._tokens = tokens
        self._serialize = serialize
        self._lock = threading.Lock()
        self._longest: int | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, token: int) -> bytes:
        return self._tokens[token]

    @property
    def longest(self) -> int:
        """Raises Unsupported if the serialised vocabulary is not of the known form."""
        with self._lock:
            if self._longest is None:
                self._longest = longest_token(self._serialize())
            return self._longest


def longest_token(text: str) -> int:
    """The most bytes of any token in `TokenizerInfo.serialize_json()`, where each character stands for one byte."""
    _require_version(text)
    try:
        name = '"decoded_vocab":'
        tokens, _ = _DECODER.raw_decode(text, text.index(name) + len(name))
        return max(map(len, tokens), default=0)
    except (ValueError, TypeError) as error:
        raise Unsupported(f"the serialised vocabulary reads otherwise than expected ({error})") from None


def _require_version(text: str) -> None:
    if not re.search(r'"__VERSION__":"(?:{})"\}}\s*$'.format("|".join(VERSIONS)), text[-40:]):
        raise Unsupported("its serialised form has an unknown version")


def _split(text: str) -> tuple:
    """The top-level fields that matter, without parsing the long ones that do not."""
    _require_version(text)
    fields, complete, position = {}, "", 1
    while text[position - 1] != "}":
        name, position = _DECODER.raw_decode(text, position)
        _expect(text, position, ":")
        position += 1
        if name in ("grammar_expr_data", "grammar_expr_indptr"):
            position = _NUMBERS.match(text, position).end()
        elif name == "per_rule_fsms":
            fields[name], position = _rules(text, position, complete)
        else:
            begin = position
            fields[name], position = _DECODER.raw_decode(text, position)
            if name == "complete_fsm":
                complete = text[begin:position]
        position += 1
    return fields, complete


def _rules(text: str, position: int, complete: str) -> tuple:
    """[(start, final states)] of all rules, after proof that each copy of the automaton is `complete`."""
    rules, opening = [], "[[" + complete
    _expect(text, position, "[")
    position += 1
    if not complete or text[position] == "]":
        raise Unsupported("its rules come without an automaton")
    while True:
        if not text.startswith(opening, position):
            raise Unsupported("a rule has no automaton, or another than the grammar's")
        rest()
        behind = _RULE_REST.match(text, position + len(opening))
        rules.append((int(behind[1]), [int(state) for state in behind[2].split(",") if state]))
        position = behind.end() + 1
        if text[position - 1] != ",":
            _expect(text, position - 1, "]")
            return rules, position


def _expect(text: str, position: int, character: str) -> None:
    if text[position] != character:
        raise ValueError(f"{text[position]!r} at {position}")


def _automaton(fields: dict, complete: str) -> Automaton:
    if fields["optimized"] is not True:
        raise Unsupported("it was not optimised")
    for rule in fields["rules"]:
        # name, body, lookahead, is that exact, token budget, character budget, capture, lazy, temperature
        _, _, _, _, tokens, characters, capture, lazy, temperature = rule
        if (tokens, characters) != (-1, -1):
            raise Unsupported("a rule has a budget")
        if capture or lazy or temperature is not None:
            raise Unsupported("a rule has a capture, a temperature or is lazy")
    if fields["suffix_stop_infos"]:
        raise Unsupported("a rule has a suffix or a stop")
    rules = fields["per_rule_fsms"]
    if len(rules) != len(fields["rules"]):
        raise ValueError("as many rules as automata expected")
    edges = fields["complete_fsm"]["edges"]
    data, offsets = edges["data_"], edges["indptr_"]
    return assemble(
        [data[begin:end] for begin, end in zip(offsets, offsets[1:])],
        fields["complete_fsm"]["edge_aux_data"],
        rules,
        fields["root_rule_id"],
        frozenset(fields["allow_empty_rule_ids"]),
    )


def assemble(edges: list, auxiliary: list, rules: list, root: int, nullable: frozenset) -> Automaton:
    """The automaton with these edges, [(kind, value, target)] per state, and rules, (start, final states) each.

    Raises Unsupported for what state ids cannot express.
    """
    states = len(edges)
    automaton = Automaton(
        root=rules[root][0],
        starts=[start for start, _ in rules],
        final=bytearray(states),
        reads=[[] for _ in range(states)],
        epsilons=[()] * states,
        calls=[()] * states,
        repeats={},
        nullable=nullable,
    )
    cuts, problem = {0}, ""
    for state, leaving in enumerate(edges):
        rest()
        for kind, value, target in leaving:
            if kind >= 0:
                automaton.reads[state].append((kind, value, target))
                cuts.add(kind)
                cuts.add(value + 1)
            elif kind == EPSILON:
                automaton.epsilons[state] += (target,)
            elif kind == CALL:
                automaton.calls[state] += ((value, target),)
            elif kind == REPEAT:
                rule, lower, upper = auxiliary[value : value + 3]
                if len(leaving) > 1:
                    problem = "a repeat edge beside others"
                if rule in nullable:
                    problem = "a counted repetition of a rule that may be empty"
                if not 0 <= lower <= upper:
                    problem = "a repetition without an upper bound"
                automaton.repeats[state] = (rule, lower, upper, target)
            else:
                raise Unsupported(f"it has {_NAMES.get(kind, 'unknown')} edges")
    # Not before every edge was seen: one of another kind says more.
    if problem:
        raise Unnumbered(problem)
    _give_owners(automaton, edges, rules)
    _check_nullable(automaton, edges, auxiliary, rules)
    if not max(cuts) <= 256:
        raise ValueError("an edge reads more than a byte")
    bounds = [*sorted(cuts - {256}), 256]
    automaton.classes = b"".join(bytes([i]) * (high - low) for i, (low, high) in enumerate(zip(bounds, bounds[1:])))
    return automaton


def _give_owners(automaton: Automaton, edges: list, rules: list) -> None:
    """Mark the final states, after proof that no state belongs to two rules.

    xgrammar looks its masks up under (rule, state), and asks each rule for its own final states. A state alone says
    both only where it has one owner.
    """
    owner = [-1] * len(automaton.final)
    for rule, (start, ends) in enumerate(rules):
        if owner[start] not in (-1, rule):
            raise Unnumbered("two rules share a state")
        owner[start], work = rule, [start]
        while work:
            rest()
            state = work.pop()
            for _, _, target in edges[state]:
                if owner[target] == -1:
                    owner[target] = rule
                    work.append(target)
                elif owner[target] != rule:
                    raise Unnumbered("two rules share a state")
        for state in ends:
            if owner[state] == rule:
                automaton.final[state] = 1


def _check_nullable(automaton: Automaton, edges: list, auxiliary: list, rules: list) -> None:
    """Prove that xgrammar's parser gets through rules that match the empty text, in whatever order it meets them.

    It relies on a list of such rules, which lacks those that may do without their counted repetition. They complete in
    the very step that predicts them, and a second caller that comes later in that step would be missed. So such a rule
    may be called from one place only, and that has to be where its own rule begins.
    """
    nullable = _nullable(edges, auxiliary, rules)
    if automaton.nullable - nullable:
        raise Unsupported("xgrammar takes a rule to match the empty text that does not")
    unlisted = nullable - automaton.nullable
    if not unlisted:
        return
    entered = {target for leaving in edges for _, _, target in leaving}
    starts, callers = {start for start, _ in rules}, []
    for state, calls in enumerate(automaton.calls):
        for rule, _ in calls:
            if rule in unlisted:
                callers.append(rule)
                if state in entered or state not in starts:
                    raise Unnumbered("a rule may be empty, and xgrammar does not list it")
    if len(callers) > len(set(callers)) or any(rule in unlisted for rule, *_ in automaton.repeats.values()):
        raise Unnumbered("a rule may be empty, and xgrammar does not list it")


def _nullable(edges: list, auxiliary: list, rules: list) -> frozenset:
    """The rules that may match the empty text.

    Each search goes on where it was held up, once the rule that it waited for turns out to be one: in rounds over all
    rules, a chain of some thousand rules would take minutes.
    """
    nullable: set = set()
    seen: list = [{start} for start, _ in rules]
    waiting: dict = {}  # rule -> the searches that wait for it: (rule, the state behind the call)
    work = [(rule, start) for rule, (start, _) in enumerate(rules)]
    ends = [frozenset(final) for _, final in rules]
    while work:
        rest()
        rule, state = work.pop()
        if state in ends[rule] and rule not in nullable:
            nullable.add(rule)
            for caller, target in waiting.pop(rule, ()):
                if target not in seen[caller]:
                    seen[caller].add(target)
                    work.append((caller, target))
        for kind, value, target in edges[state]:
            if kind == EPSILON:
                called = None
            elif kind == CALL:
                called = value
            elif kind == REPEAT:
                called = auxiliary[value] if auxiliary[value + 1] else None
            else:
                continue
            if called is not None and called not in nullable:
                waiting.setdefault(called, []).append((rule, target))
            elif target not in seen[rule]:
                seen[rule].add(target)
                work.append((rule, target))
    return frozenset(nullable)
