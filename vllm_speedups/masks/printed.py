"""Reads the same automaton from what xgrammar prints for debugging, where its serialised form would be too long.

The serialised form repeats the automaton for every rule. A schema with some strings of different `maxLength` takes
150 MB and half a minute to serialise; printed it is 0.4 MB and takes 50 ms. The printed form belongs to xgrammar's
testing interface, so it is used only after it was seen to agree with the serialised form (`agrees`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .pace import rest
from .serialized import CALL, EPSILON, REPEAT, Automaton, Unsupported, assemble, parse

_RULE_LINE = re.compile(r"[\w.\-]+ ::= ")
_HEADER = re.compile(r"Rule (\d+): \S+, FSM: CompactFSM\(num_states=(\d+), start=(\d+), end=\[([\d, ]*)\], edges=\[\n")
_STATE = re.compile(r"(\d+): \[")
_CHARACTER = r"(\\x[0-9a-fA-F]{2}|\\[^x]|[^\\\n])"
_EDGE = re.compile(
    rf"(?:\[{_CHARACTER}-{_CHARACTER}\]|'{_CHARACTER}'|Rule\((\d+)\)|(Eps)|"
    r"Repeat\(rule=(\d+), min=(\d+), max=(\d+)\))->(\d+)"
)
_ESCAPED = {
    "'": 39,
    '"': 34,
    "?": 63,
    "\\": 92,
    "a": 7,
    "b": 8,
    "f": 12,
    "n": 10,
    "r": 13,
    "t": 9,
    "v": 11,
    "0": 0,
    "e": 27,
}


def parse_printed(rules: str, automata: str, nullable: Iterable[int], root: str = "root") -> Automaton:
    """The automaton from `str(compiled.grammar)` and, of xgrammar.testing, `_print_grammar_fsms(compiled.grammar)` and
    `_get_allow_empty_rule_ids(compiled)`.

    Raises:
        Unsupported: a rule has attributes, the root is not called `root`, or something reads otherwise than expected.
    """
    lines = rules.strip("\n").split("\n")
    if not all(_RULE_LINE.match(line) for line in lines):
        # Budgets, captures, edges over token ids: the printed form does not show all of them.
        raise Unsupported("it is too long to serialise, and a rule has attributes")
    names = [line.split(" ::= ", 1)[0] for line in lines]
    if names.count(root) != 1:
        raise Unsupported("it has no single root rule")
    try:
        edges, auxiliary, found = _read(automata)
    except (ValueError, LookupError, AttributeError) as error:
        raise Unsupported(f"its printed form reads otherwise than expected ({error})") from None
    if len(found) != len(lines):
        raise Unsupported("its printed form has other rules than its grammar")
    return assemble(edges, auxiliary, found, names.index(root), frozenset(nullable))


def agrees(serialised: str, rules: str, automata: str, nullable: Iterable[int]) -> bool:
    """Whether both forms of one grammar hold the same automaton."""
    return parse(serialised) == parse_printed(rules, automata, nullable)


def _read(text: str) -> tuple:
    edges, auxiliary, rules, position = [], [], [], 0
    while position < len(text):
        header = _HEADER.match(text, position)
        if int(header[1]) != len(rules):
            raise ValueError("the rules are not in order")
        edges = edges or [None] * int(header[2])
        rules.append((int(header[3]), [int(state) for state in header[4].split(",") if state.strip()]))
        position = header.end()
        while text[position] != "]":
            rest()
            state = _STATE.match(text, position)
            leaving, position = _edges(text, state.end(), auxiliary)
            if edges[int(state[1])] not in (None, leaving):
                raise ValueError("a state is printed twice, and differs")
            edges[int(state[1])] = leaving
        if not text.startswith("])", position):
            raise ValueError(f"at {position}")
        position += 2
        while position < len(text) and text[position] == "\n":
            position += 1
    return [leaving or [] for leaving in edges], auxiliary, rules


def _edges(text: str, position: int, auxiliary: list) -> tuple:
    leaving: list = []
    while text[position] != "]":
        edge = _EDGE.match(text, position)
        first, last, one, rule, epsilon, repeated, lower, upper, target = edge.groups()
        if one is not None:
            leaving.append([_byte(one), _byte(one), int(target)])
        elif first is not None:
            leaving.append([_byte(first), _byte(last), int(target)])
        elif rule is not None:
            leaving.append([CALL, int(rule), int(target)])
        elif epsilon is not None:
            leaving.append([EPSILON, 0, int(target)])
        else:
            leaving.append([REPEAT, len(auxiliary), int(target)])
            auxiliary += [int(repeated), int(lower), int(upper)]
        position = edge.end()
        if text.startswith(", ", position):
            position += 2
    return leaving, position + 2


def _byte(text: str) -> int:
    if text[0] != "\\":
        return ord(text)
    return int(text[2:], 16) if text[1] == "x" else _ESCAPED[text[1]]
