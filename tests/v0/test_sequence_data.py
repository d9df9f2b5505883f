"""`sequence-data` beside the class and the method that it replaces, through the same calls."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from array import array

import pytest
import vllm.sequence
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sequences import grow, sequence

from vllm_speedups.telemetry import counters

STOCK = vllm.sequence.SequenceData
HASH = vllm.sequence.Sequence.hash_of_block
STRUCT = hasattr(STOCK, "__struct_fields__")
tokens = st.lists(st.integers(0, 200_000), max_size=60)
CALLS = (
    "get_len", "get_prompt_len", "get_output_len", "get_token_ids", "get_num_computed_tokens", "get_last_token_id",
    "get_num_uncomputed_tokens", "get_prompt_token_ids", "get_output_token_ids", "reset_state_for_recompute",
    "get_delta_and_reset", "get_num_cached_tokens", "get_token_embeddings",
)  # fmt: skip
READ = (
    "prompt_token_ids", "output_token_ids", "prompt_token_ids_array", "output_token_ids_array", "cumulative_logprob",
    "stage", "prompt_embeds", "mrope_position_delta",
)  # fmt: skip
calls = st.one_of(
    st.tuples(st.sampled_from(CALLS)),
    st.tuples(st.just("append_token_id"), st.integers(0, 200_000), st.just(-0.5)),
    st.tuples(st.just("update_num_computed_tokens"), st.integers(0, 30)),
    st.tuples(st.just("get_prefix_token_ids"), st.integers(0, 140)),
    st.tuples(st.just("set"), tokens),
    st.tuples(st.just("set prompt"), tokens),
    st.tuples(st.just("write into the outputs"), st.integers(0, 200_000)),
    st.tuples(st.just("delta"), st.lists(st.integers(0, 9), max_size=4)),
    st.tuples(st.sampled_from(("copy", "deepcopy", "pickle", "encode"))),
)


def made(kind, prompt: list, output: list | None = None):
    """An object of either class, as this release makes one."""
    if STRUCT:
        return kind(array("l", prompt), **({} if output is None else {"_output_token_ids": array("l", output)}))
    return kind(list(prompt), *([] if output is None else [list(output)]))


def told(what) -> object:
    """A result that can be compared: deltas are compared by what they hold."""
    return ("delta", repr(what)) if type(what).__name__ == "SequenceDataDelta" else (type(what).__name__, what)


def call(side, name: str, *arguments):
    """Do one thing to an object. Returns the object to go on with, and what was seen."""
    if name == "set":
        side.output_token_ids = list(arguments[0])
    elif name == "set prompt":
        side.prompt_token_ids = list(arguments[0])
    elif name == "write into the outputs":
        held = getattr(side, "_output_token_ids", None)
        held = side.output_token_ids if held is None else held
        held[-1] = arguments[0]
    elif name == "delta":
        delta = vllm.sequence.SequenceDataDelta(list(arguments[0]), -1.5, side.get_num_computed_tokens(), side.stage)
        side.apply_delta(delta)
    elif name in ("copy", "deepcopy"):
        return getattr(copy, name)(side), None
    elif name == "pickle":
        return pickle.loads(pickle.dumps(side)), None
    elif name == "encode":
        return side, encoded(side)
    else:
        return side, told(getattr(side, name)(*arguments))
    return side, None


def encoded(side) -> bytes:
    import msgspec

    return msgspec.msgpack.encode(side, enc_hook=lambda value: value.tobytes())


def outcome(side, what: tuple) -> tuple:
    try:
        side, seen = call(side, *what)
        return side, ("returned", seen)
    except Exception as error:
        return side, ("raised", type(error), str(error).replace(STOCK.__name__, ""))


def everything(side) -> list:
    return [told(getattr(side, name, None)) for name in READ] + [repr(side), told(side.get_token_ids())]


@hypothesis_settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(prompt=tokens, output=st.none() | tokens, steps=st.lists(calls, max_size=25))
def test_both_classes_answer_alike_whatever_is_done_to_them(sequence_data, prompt, output, steps):
    ours_class = vllm.sequence.SequenceData
    stock, ours = made(STOCK, prompt, output), made(ours_class, prompt, output)
    if "get_prefix_token_ids" not in vars(STOCK):
        steps = [step for step in steps if step[0] != "get_prefix_token_ids"]
    for step in steps:
        # Stock's class can be pickled only where it is bound.
        vllm.sequence.SequenceData = STOCK
        stock, expected = outcome(stock, step)
        vllm.sequence.SequenceData = ours_class
        ours, seen = outcome(ours, step)
        assert seen == expected, step
        assert everything(ours) == everything(stock), step
    assert type(ours) is ours_class


@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    length=st.integers(1, 1500), output=st.integers(0, 70), block_size=st.sampled_from((1, 8, 16, 32)),
    lora=st.none() | st.integers(1, 9), seed=st.integers(0, 3), order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_every_block_has_the_hash_that_stock_gives_it(sequence_data, length, output, block_size, lora, seed, order):
    from vllm.lora.request import LoRARequest

    request = LoRARequest("adapter", lora, "/nowhere") if lora else None
    prompt = [(position * position * 7919 + seed) % 150_000 for position in range(length)]
    seq = sequence(1, prompt, block_size, request)
    assert type(seq.data) is vllm.sequence.SequenceData is not STOCK
    for round in range(2):
        blocks = list(range(-1, seq.get_len() // block_size + 3))
        order.shuffle(blocks)
        for block in blocks:
            assert seq.hash_of_block(block) == HASH(seq, block), block
        for number in range(output):
            grow(seq, number)
        seq = seq.fork(2) if round == 0 else seq
    assert seq.hash_of_block(0) == HASH(seq, 0)


def test_a_prompt_that_is_replaced_is_hashed_anew(sequence_data):
    seq = sequence(1, list(range(640)))
    seq.hash_of_block(3)
    if STRUCT:
        seq.data = type(seq.data)(array("l", range(7, 647)))
    else:
        seq.data.prompt_token_ids = list(range(7, 647))
    assert seq.hash_of_block(3) == HASH(seq, 3)


def test_a_prompt_is_hashed_once_for_all_of_its_blocks_and_forks(sequence_data):
    counts = counters("sequence-data")
    before = counts["prompts hashed"]
    seq = sequence(1, list(range(2000)))
    hashes = [seq.hash_of_block(block) for block in range(125)]
    fork = seq.fork(2)
    assert [fork.hash_of_block(block) for block in range(125)] == hashes == [HASH(seq, block) for block in range(125)]
    assert counts["prompts hashed"] == before + 1


def test_forks_grow_apart(sequence_data):
    seq = sequence(1, list(range(100)))
    grow(seq, 5)
    fork = seq.fork(2)
    grow(seq, 6)
    grow(fork, 7)
    assert (list(seq.get_output_token_ids()), list(fork.get_output_token_ids())) == ([5, 6], [5, 7])
    assert list(seq.get_token_ids()) == [*range(100), 5, 6]
    assert fork.hash_of_block(6) == HASH(fork, 6) != seq.hash_of_block(6)


def test_prefixes_are_directly_hashable(sequence_data):
    held = made(vllm.sequence.SequenceData, [1, 2, 3], [4, 5])
    assert held.get_prefix_token_ids(2) == ((1, 2), None)
    assert held.get_prefix_token_ids(3) == ((1, 2, 3), None)
    assert held.get_prefix_token_ids(4) == ((1, 2, 3), (4,))
    assert held.get_prefix_token_ids(9) == ((1, 2, 3), (4, 5))
    hash(held.get_prefix_token_ids(5))


def test_the_class_is_bound_wherever_stocks_is(sequence_data):
    import vllm.core.scheduler
    import vllm.model_executor.sampling_metadata

    ours = sequence_data.replacements["vllm.sequence:SequenceData"]
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] == "vllm":
            assert STOCK not in [value for value in vars(module).values() if isinstance(value, type)], module
    assert vllm.core.scheduler.SequenceData is ours
    assert issubclass(ours, STOCK) and ours.__qualname__ == "SequenceData" and ours.__module__ == "vllm.sequence"


def test_stocks_objects_and_ours_outlive_a_revert(sequence_data):
    before = sequence(1, list(range(300)))
    hashes = [before.hash_of_block(block) for block in range(18)]
    sequence_data.revert()
    assert vllm.sequence.SequenceData is STOCK
    assert type(pickle.loads(pickle.dumps(before.data))) is STOCK
    assert [before.hash_of_block(block) for block in range(18)] == hashes
    assert before.fork(2).get_token_ids() == before.get_token_ids()
    assert type(sequence(3, [1]).data) is STOCK


def test_objects_made_before_are_left_to_stock(request):
    seq = sequence(1, list(range(300)))
    expected = [seq.hash_of_block(block) for block in range(20)]
    request.getfixturevalue("sequence_data")
    assert [seq.hash_of_block(block) for block in range(20)] == expected
    # Pickles hold the class by its name, which is ours now.
    again = pickle.loads(pickle.dumps(seq.data))
    assert list(again.get_token_ids()) == list(copy.deepcopy(seq.data).get_token_ids()) == list(range(300))


def test_what_our_code_fails_at_stock_answers(sequence_data, monkeypatch):
    from vllm_speedups.patches import sequence_data as glue

    def broken(*_):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(glue, "PromptHashes", broken)
    seq = sequence(1, list(range(300)))
    assert [seq.hash_of_block(block) for block in range(20)] == [HASH(seq, block) for block in range(20)]
    assert not sequence_data.active and vllm.sequence.SequenceData is STOCK


def test_a_wrong_hash_is_noticed_when_it_is_verified_and_stocks_comes_out(sequence_data, monkeypatch):
    from vllm_speedups.patches import sequence_data as glue
    from vllm_speedups.patching import Context

    differences: list = []
    context = Context(
        sequence_data.form.name,
        sequence_data.stock,
        failed=lambda error: pytest.fail(repr(error)),
        verifies=lambda: True,
        differed=lambda facts, private: differences.append((facts, private)),
    )
    ours = glue._hash_of_block(context, context.form)
    seq = sequence(1, list(range(300)))
    assert [ours(seq, block) for block in range(20)] == [HASH(seq, block) for block in range(20)] and not differences
    seq.data._block_hashes.values[3] ^= 1
    assert [ours(seq, block) for block in range(5)] == [HASH(seq, block) for block in range(5)]
    ((facts, private),) = differences
    assert facts["block"] == 3 and private["tokens"] == list(range(300))


def test_a_process_without_the_patch_reads_what_ours_pickles(sequence_data):
    held = made(vllm.sequence.SequenceData, [1, 2, 3], [4])
    held.get_prefix_token_ids(2)
    program = (
        "import pickle, sys, vllm.sequence; held = pickle.load(sys.stdin.buffer); print(type(held) is "
        "vllm.sequence.SequenceData, list(held.get_token_ids()), 'vllm_speedups' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(held), capture_output=True, timeout=120)
    assert done.stderr.decode().splitlines()[-1].split() == ["True", "[1,", "2,", "3,", "4]", "False"]


@pytest.mark.skipif(not STRUCT, reason="no msgspec in this release")
class TestOnTheWire:
    """The struct crosses to workers as msgpack."""

    def test_both_classes_write_the_same_bytes_and_read_each_others(self, sequence_data):
        import msgspec
        from vllm.sequence import VLLM_TOKEN_ID_ARRAY_TYPE as kind

        def read(type_, value):
            return array(kind, value) if type_ is array else value

        ours_class = vllm.sequence.SequenceData
        for output in ([], [5], list(range(40))):
            ours, stock = made(ours_class, [1, 2, 3], output), made(STOCK, [1, 2, 3], output)
            ours._block_hashes, _ = "ours alone", ours.output_token_ids
            data = msgspec.msgpack.encode(ours, enc_hook=list)
            assert data == msgspec.msgpack.encode(stock, enc_hook=list)
            for kind_ in (ours_class, STOCK):
                decoded = msgspec.msgpack.Decoder(kind_, dec_hook=read).decode(data)
                assert type(decoded) is kind_ and everything(decoded) == everything(stock)

    def test_equality_is_that_of_the_fields(self, sequence_data):
        ours = vllm.sequence.SequenceData
        one, other = made(ours, [1, 2], [3]), made(ours, [1, 2], [3])
        one.output_token_ids, one._block_hashes = [3], "not a field"
        assert one == other and one != made(ours, [1, 2], [4])

    def test_the_outputs_read_are_those_in_the_array(self, sequence_data):
        ours = made(vllm.sequence.SequenceData, [1], [2, 3])
        first = ours.output_token_ids
        assert ours.output_token_ids is first == (2, 3)
        ours.append_token_id(4, -0.1)
        assert ours.output_token_ids == (2, 3, 4) and first == (2, 3)
        ours.output_token_ids_array[0] = 9
        assert ours.output_token_ids == (9, 3, 4)

    def test_from_seqs_makes_ours(self, sequence_data):
        if not hasattr(STOCK, "from_seqs"):
            pytest.skip("not in this release")
        made_ = vllm.sequence.SequenceData.from_seqs([1, 2], (3,))
        assert type(made_) is vllm.sequence.SequenceData and made_.get_token_ids() == [1, 2, 3]
        kind = vllm.sequence.SequenceData
        # Called from_token_counts in 0.6.2 and 0.6.3.
        counted = (getattr(kind, "from_prompt_token_counts", None) or kind.from_token_counts)((7, 2), (8, 1))
        assert type(counted) is vllm.sequence.SequenceData and list(counted.prompt_token_ids) == [7, 7, 8]

    def test_prompt_embeddings_are_stocks(self, sequence_data):
        if "_prompt_embeds" not in STOCK.__struct_fields__:
            pytest.skip("not in this release")
        import torch

        embeds = torch.rand(3, 4)
        sides = [kind.from_seqs([0, 0, 0], prompt_embeds=embeds) for kind in (STOCK, vllm.sequence.SequenceData)]
        for side in sides:
            side.append_token_id(5, -0.5, torch.ones(4))
        copies = [copy.deepcopy(side) for side in sides]
        for stock, ours in (sides, copies):
            assert torch.equal(stock.get_token_embeddings(), ours.get_token_embeddings())
            assert stock.get_token_ids() == ours.get_token_ids() and repr(stock) == repr(ours)
        assert copies[1].prompt_embeds is not embeds
