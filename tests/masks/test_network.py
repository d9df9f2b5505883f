"""State ids for xgrammar: equal ids have equal rows, "complete" is what xgrammar says, the rest is declined."""

from __future__ import annotations

import contextlib
import json
import random
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("xgrammar")
import grammars
import walking
import xgrammar as xgr

from vllm_speedups.masks import network as network_module
from vllm_speedups.masks.network import Full, Network
from vllm_speedups.masks.pace import Later
from vllm_speedups.masks.printed import agrees
from vllm_speedups.masks.serialized import (
    CALL,
    EPSILON,
    REPEAT,
    Unsupported,
    Vocabulary,
    _nullable,
    longest_token,
    parse,
)
from vllm_speedups.masks.trail import Lost, Trail
from vllm_speedups.patches.xgrammar_states import automaton_of, vocabulary_of

RELAXED = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def network_of(kind, source):
    tongue = walking.small()
    compiled = tongue.compile(kind, source)
    return compiled, Network(parse(compiled.grammar.serialize_json()), tongue.vocabulary, tongue.longest)


@pytest.mark.parametrize("name", grammars.HAND_MADE)
def test_rows_and_completion_are_xgrammars(name):
    tongue = walking.small()
    compiled = tongue.compile(*grammars.HAND_MADE[name])
    try:
        counts = walking.walk(
            tongue, compiled, outputs=8, length=60, seed=1, spell_out=name not in ("a count that recurs",)
        )
    except Unsupported:
        assert name == "a count that recurs"
        return
    assert counts["hits"], counts


@pytest.mark.parametrize("name", grammars.DECLINED)
def test_left_recursion_is_declined(name):
    with pytest.raises(Unsupported):
        network_of(*grammars.DECLINED[name])


def _random_walk(kind, source, seed):
    tongue = walking.small()
    try:
        compiled = tongue.compile(kind, source)
    except Exception:
        return
    with contextlib.suppress(Unsupported):
        walking.walk(tongue, compiled, outputs=3, length=30, seed=seed)


@RELAXED
@given(st.integers(0, 2**32))
def test_rows_of_random_schemas(seed):
    _random_walk("schema", grammars.random_schema(random.Random(seed)), seed)


@RELAXED
@given(st.integers(0, 2**32))
def test_rows_of_random_regexes(seed):
    _random_walk("regex", grammars.random_regex(random.Random(seed)), seed)


@RELAXED
@given(st.integers(0, 2**32))
def test_rows_of_random_rules(seed):
    _random_walk("ebnf", grammars.random_ebnf(random.Random(seed)), seed)


@pytest.mark.parametrize("name", ["bounded strings", "maxLength 100000", "recursion", "unicode classes"])
def test_rows_over_a_vocabulary_of_real_size(name):
    tongue = walking.tekken()
    counts = walking.walk(tongue, tongue.compile(*grammars.HAND_MADE[name]), outputs=4, length=40, seed=3)
    assert counts["hits"]


def test_a_long_count_has_few_states():
    tongue = walking.small()
    _, network = network_of("ebnf", "root ::= [a-c]{0,100000}")
    trail, token = Trail(network.initial, network.follow), tongue.vocabulary.index(b"aaa")
    for _ in range(3000):
        trail.accept([token])
    trail.place()
    assert len(network) < 700


def test_an_exact_count_ends_exactly_where_it_must():
    tongue = walking.small()
    _, network = network_of("ebnf", "root ::= [a-c]{5000}")
    place, token = network.initial, tongue.vocabulary.index(b"a")
    for step in range(5000):
        assert not walking.state_of(place).complete, step
        place = network.follow(place, token)
    assert walking.state_of(place).complete
    with pytest.raises(Lost):
        network.follow(place, token)


def test_a_token_that_no_rule_reads_is_lost():
    tongue = walking.small()
    _, network = network_of("regex", "ab")
    for token in (tongue.vocabulary.index(b"b"), -1, len(tongue.vocabulary)):
        with pytest.raises(Lost):
            network.follow(network.initial, token)


def test_threads_walk_one_network_to_the_same_states():
    tongue = walking.small()
    compiled, network = network_of("schema", grammars.TREE)
    paths, bitmask = [], xgr.allocate_token_bitmask(1, tongue.info.vocab_size)
    for seed in range(16):
        matcher, path, random_ = xgr.GrammarMatcher(compiled), [], random.Random(seed)
        for _ in range(60):
            matcher.fill_next_token_bitmask(bitmask, 0)
            choices = walking.bits(bitmask[0].numpy(), tongue.info.vocab_size).nonzero()[0]
            path.append(int(choices[random_.randrange(len(choices))]))
            if not matcher.accept_token(path[-1]) or matcher.is_terminated():
                path.pop()
                break
        paths.append(path)
    found = [[None] * len(paths) for _ in range(6)]
    barrier = threading.Barrier(6)

    def work(mine):
        barrier.wait()
        for index, path in enumerate(paths):
            trail = Trail(network.initial, network.follow, path)
            trail.place()
            mine[index] = [walking.state_of(place).number for place in trail.places]

    threads = [threading.Thread(target=work, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine == found[0] for mine in found)


def test_a_full_network_says_so_and_still_walks_what_it_knows(monkeypatch):
    tongue = walking.small()
    _, network = network_of("ebnf", grammars.HAND_MADE["palindromes"][1])
    monkeypatch.setattr(network_module, "MAX_STATES", 20)
    token = tongue.vocabulary.index(b"a")
    trail = Trail(network.initial, network.follow, [token] * 50)
    with pytest.raises(Full):
        trail.place()
    assert network.closed and len(network) == 20
    again = Trail(network.initial, network.follow, [token] * 3)
    assert again.place() is trail.places[3]


AMBIGUOUS = 'root ::= ({}){} "."\n{}'.format(
    " | ".join(f"r{i}" for i in range(60)),
    "*",
    "\n".join(f'r{i} ::= [xX] | [xX] r{i} "{chr(97 + i % 20)}{i}"' for i in range(60)),
)


class _Always:
    """A pace that allows everything, and hears of every walk."""

    def __init__(self):
        self.spent = []

    def allows(self, now):
        return True

    def spend(self, seconds):
        self.spent.append(seconds)


def test_a_walk_that_takes_long_stops_within_the_token_and_gets_further_each_time(monkeypatch):
    monkeypatch.setattr(network_module, "LONGEST_WALK", -1.0)
    tongue = walking.small()
    compiled, whole = network_of("ebnf", AMBIGUOUS)
    pace = _Always()
    network = Network(parse(compiled.grammar.serialize_json()), tongue.vocabulary, tongue.longest, pace)
    tokens = [tongue.vocabulary.index(b"x")] * 3
    trail, attempts = Trail(network.initial, network.follow, tokens), 0
    while len(trail.places) <= len(tokens):
        with contextlib.suppress(Later):
            trail.place()
        attempts += 1
        assert attempts < 100_000
    assert attempts > 20 and len(pace.spent) >= attempts - 1
    expected = Trail(whole.initial, whole.follow, tokens)
    expected.place()
    # Stacks are numbered as they are met, by both in the same order.
    assert [place.items for place in trail.places] == [place.items for place in expected.places]
    assert [place.complete for place in trail.places] == [place.complete for place in expected.places]


def test_grammars_that_lead_to_too_many_items_are_declined(monkeypatch):
    monkeypatch.setattr(network_module, "MAX_WIDTH", 1000)
    _, network = network_of("ebnf", AMBIGUOUS)
    token = walking.small().vocabulary.index(b"x")
    with pytest.raises(Unsupported, match="ambiguous") as raised:
        Trail(network.initial, network.follow, [token] * 3).place()
    assert not isinstance(raised.value, Full) and network.closed


def test_counts_that_nest_without_end_fill_the_network():
    _, network = network_of("ebnf", 'root ::= "(" (root){150} ")" | "a"')
    token = walking.small().vocabulary.index(b"(")
    trail = Trail(network.initial, network.follow, [token] * 10_000)
    with pytest.raises(Full):
        trail.place()
    assert len(trail.places) > 50 and network.nbytes < 10e6


def test_a_network_past_its_budget_is_full():
    tongue = walking.small()
    compiled, _ = network_of("ebnf", grammars.HAND_MADE["palindromes"][1])
    network = Network(parse(compiled.grammar.serialize_json()), tongue.vocabulary, tongue.longest, budget=200_000)
    token = tongue.vocabulary.index(b"a")
    with pytest.raises(Full):
        Trail(network.initial, network.follow, [token] * 10_000).place()
    assert network._grown < 210_000


@RELAXED
@given(st.integers(0, 2**32))
def test_the_rules_that_may_be_empty_are_the_least_fixpoint(seed):
    random_ = random.Random(seed)
    count = random_.randrange(1, 9)
    states = 4 * count
    edges, auxiliary = [], []
    for _ in range(states):
        leaving = []
        for _ in range(random_.randrange(3)):
            kind, target = random_.choice([65, EPSILON, CALL, CALL, REPEAT]), random_.randrange(states)
            value = 65 if kind == 65 else random_.randrange(count)
            if kind == REPEAT:
                auxiliary += [value, random_.randrange(2), 9]
                value = len(auxiliary) - 3
            leaving.append((kind, value, target))
        edges.append(leaving)
    rules = [(random_.randrange(states), random_.sample(range(states), random_.randrange(2))) for _ in range(count)]
    assert _nullable(edges, auxiliary, rules) == _plainly_nullable(edges, auxiliary, rules)


def _plainly_nullable(edges, auxiliary, rules):
    """By the definition: over and over, until nothing is added."""
    found = set()
    for _ in range(len(rules) + 1):
        for rule, (start, ends) in enumerate(rules):
            reached = {start}
            for _ in range(len(edges)):
                for state in list(reached):
                    for kind, value, target in edges[state]:
                        if (
                            kind == EPSILON
                            or (kind == CALL and value in found)
                            or (kind == REPEAT and (auxiliary[value] in found or not auxiliary[value + 1]))
                        ):
                            reached.add(target)
            if reached & set(ends):
                found.add(rule)
    return found


def test_a_long_chain_of_rules_that_may_be_empty_takes_one_pass():
    count = 50_000
    edges = [[(CALL, rule + 1, count + rule)] for rule in range(count - 1)] + [[]] + [[] for _ in range(count)]
    rules = [(rule, [count + rule]) for rule in range(count - 1)] + [(count - 1, [count - 1])]
    assert len(_nullable(edges, [], rules)) == count


def test_what_a_network_holds_is_accounted_for():
    tongue = walking.small()
    compiled, network = network_of("schema", grammars.PERSON)
    before = network.nbytes
    walking.walk(tongue, compiled, network, outputs=4)
    assert network.nbytes > before > 0


def _changed(change):
    compiled = walking.small().compile("ebnf", 'root ::= "a" x{200,300}\nx ::= "b" | "c" root')
    content = json.loads(compiled.grammar.serialize_json())
    change(content)
    return json.dumps(content, separators=(",", ":"))


def _rule(field, value):
    def change(content):
        content["rules"][1][field] = value

    return change


CHANGES = {
    "unknown version": lambda content: content.update(__VERSION__="v999"),
    "budget": _rule(4, 12),
    "suffix": lambda content: content.update(suffix_stop_infos=[[1]]),
    "lazy": _rule(7, True),
    "not optimised": lambda content: content.update(optimized=False),
    "another than the grammar's": lambda content: content["per_rule_fsms"][0][0][0]["edges"]["data_"].pop(),
    "may be empty": lambda content: content.update(allow_empty_rule_ids=list(range(len(content["rules"])))),
    "otherwise than expected": lambda content: content.pop("root_rule_id"),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_is_not_known_for_certain_is_declined(reason):
    with pytest.raises(Unsupported, match=reason):
        parse(_changed(CHANGES[reason]))
    parse(_changed(lambda content: None))


def test_every_truncation_of_the_text_is_declined():
    text = walking.small().compile("regex", "ab{2,300}c").grammar.serialize_json()
    for end in range(0, len(text), 97):
        with pytest.raises(Unsupported):
            parse(text[:end])


PRINTED = sorted(set(grammars.HAND_MADE) - {"tags in text"})


@pytest.mark.parametrize("name", PRINTED)
def test_the_printed_form_holds_the_same_automaton(name):
    assert _agree(walking.small().compile(*grammars.HAND_MADE[name]))


@RELAXED
@given(st.integers(0, 2**32), st.booleans())
def test_the_printed_form_of_random_grammars_agrees(seed, regular):
    random_ = random.Random(seed)
    kind, source = ("regex", grammars.random_regex(random_)) if regular else ("ebnf", grammars.random_ebnf(random_))
    try:
        compiled = walking.small().compile(kind, source)
        parse(compiled.grammar.serialize_json())
    except Exception:
        return
    assert _agree(compiled)


def _agree(compiled):
    automata, nullable = (
        xgr.testing._print_grammar_fsms(compiled.grammar),
        xgr.testing._get_allow_empty_rule_ids(compiled),
    )
    return agrees(compiled.grammar.serialize_json(), str(compiled.grammar), automata, nullable)


def test_rules_with_attributes_are_not_read_in_printed_form():
    compiled = walking.small().compile(*grammars.HAND_MADE["tags in text"])
    with pytest.raises(Unsupported, match="attributes"):
        _agree(compiled)


def test_the_vocabulary_is_the_decoded_one_and_knows_its_longest_token():
    info = walking.small().info
    vocabulary = vocabulary_of(info)
    assert [vocabulary[i] for i in range(len(vocabulary))] == info.decoded_vocab
    assert vocabulary.longest == max(map(len, info.decoded_vocab))
    with pytest.raises(Unsupported):
        longest_token("{}")


@pytest.mark.parametrize(("limit", "asked"), [(100, False), (300, True)])
def test_only_long_repetitions_ask_for_the_longest_token(limit, asked):
    info, calls = walking.small().info, []
    vocabulary = Vocabulary(info.decoded_vocab, lambda: calls.append(1) or info.serialize_json())
    compiled = walking.small().compile("schema", {"type": "string", "maxLength": limit})
    assert walking.walk(walking.small(), compiled, Network(automaton_of(compiled), vocabulary))["hits"] > 0
    assert bool(calls) is asked
