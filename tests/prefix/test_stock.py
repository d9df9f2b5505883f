"""On vLLM's own code, of the installed release and of others unpacked: our block hashes are stock's, byte for byte."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from vllm_speedups import telemetry  # noqa: E402
from vllm_speedups.patching import Context  # noqa: E402

from . import releases  # noqa: E402
from .reference import in_two_threads  # noqa: E402
from .strategies import token_ids  # noqa: E402

RELEASES = [release for release in (releases.installed(), *releases.unpacked()) if release is not None]


@pytest.fixture(params=RELEASES, ids=repr)
def release(request, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    return request.param


class Session:
    """A request as the hasher sees it, with the growth and the cut-backs that the scheduler subjects it to."""

    def __init__(self, constant_list, tokens, features=(), lora=None, salt=None, embeds=None):
        self._all_token_ids = list(tokens)
        self.all_token_ids = constant_list(self._all_token_ids)
        self.mm_features = [feature(*each) for each in features]
        self.lora_request = lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1], lora_int_id=len(lora[0]))
        self.cache_salt = salt
        self.prompt_embeds = embeds
        self._prompt_embeds_per_block_hashes = {}
        self.block_hashes = []

    @property
    def num_tokens(self):
        return len(self._all_token_ids)

    def hash(self, hasher):
        self.block_hashes.extend(hasher(self))


def feature(identifier, offset, length):
    position = SimpleNamespace(offset=offset, length=length, is_embed=None)
    return SimpleNamespace(identifier=identifier, mm_position=position)


names = st.sampled_from(["a", "b", "adapter", "image-0"])


@st.composite
def media(draw, length):
    """Items in order, not overlapping, some of them adjacent, some reaching past the end."""
    items, offset = [], 0
    for _ in range(draw(st.integers(0, 3))):
        offset += draw(st.integers(0, 60))
        size = draw(st.integers(1, 50))
        if offset < length:
            items.append((draw(names), offset, size))
        offset += size
    return items


@st.composite
def histories(draw):
    """A request, and what happens to it: tokens appended, in ones or many, with or without media, or cut back."""
    cycle = draw(st.lists(token_ids, min_size=1, max_size=4))
    length = draw(st.integers(0, 400))
    tokens = (cycle * (length // len(cycle) + 1))[:length]
    kind = {
        "features": draw(media(length)),
        "lora": draw(st.none() | st.tuples(names, names)),
        "salt": draw(st.none() | names),
        "embeds": draw(st.none() | st.none() | st.none() | st.just("embeds")),
    }
    growth = draw(
        st.lists(
            st.tuples(st.lists(token_ids, max_size=40), st.integers(1, 8), st.integers(0, 50), st.booleans()),
            max_size=4,
        )
    )
    return tokens, kind, growth


def run(constant_list, hasher, history) -> list:
    """The block hashes of a request after each step of its history."""
    tokens, kind, growth = history
    if kind["embeds"]:
        rows = torch.arange(2 * (len(tokens) + 2000), dtype=torch.float32).reshape(-1, 2)
        kind = {**kind, "embeds": rows}
    session = Session(constant_list, tokens, **kind)
    session.hash(hasher)
    steps = [list(session.block_hashes)]
    for cycle, times, cut, illustrated in growth:
        if cut and len(session._all_token_ids) > cut and hasher.block_size:
            del session._all_token_ids[len(session._all_token_ids) - cut :]
            del session.block_hashes[len(session._all_token_ids) // hasher.block_size :]
        if illustrated and cycle:
            session.mm_features.append(feature("image-1", len(session._all_token_ids), len(cycle)))
        session._all_token_ids.extend(cycle * times)
        session.hash(hasher)
        steps.append(list(session.block_hashes))
        for token in cycle:
            session._all_token_ids.append(token)
            session.hash(hasher)
        steps.append(list(session.block_hashes))
    return steps


class Hasher:
    def __init__(self, hasher, block_size):
        self.hasher, self.block_size = hasher, block_size

    def __call__(self, request):
        return self.hasher(request)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=st.lists(histories(), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 4, 8, 16]),
    name=st.sampled_from(releases.HASHES),
    memo_mb=st.sampled_from([0, 0.005, 0.05, 64]),
)
def test_histories_of_requests_have_stocks_hashes(release, drawn, block_size, name, memo_mb):
    function = release.hashes.get(name, release.hashes["sha256"])
    release.module.init_none_hash(function)
    stock = Hasher(release.factory(block_size, function), block_size)
    with release.patch(memo_mb) as factory:
        ours = Hasher(factory(block_size, function), block_size)
        for history in [*drawn, *drawn]:
            assert run(release.constant_list, ours, history) == run(release.constant_list, stock, history)


def test_a_conversation_of_many_turns_has_stocks_hashes(release):
    rng = random.Random(5)
    for function in release.hashes.values():
        release.module.init_none_hash(function)
        stock = release.factory(16, function)
        with release.patch() as factory:
            ours = factory(16, function)
            before = telemetry.snapshot()["block-hashes"].get("hits", 0)
            tokens = []
            for _ in range(6):
                tokens += [rng.randrange(140_000) for _ in range(rng.randrange(500, 6000))]
                for salt in (None, "s"):
                    request = Session(release.constant_list, tokens, salt=salt)
                    assert ours(request) == stock(request)
            assert telemetry.snapshot()["block-hashes"]["hits"] - before > 1000


def test_what_is_not_covered_is_left_to_stock_and_counted(release):
    function = release.hashes["sha256"]
    release.module.init_none_hash(function)
    with release.patch() as factory:
        count = telemetry.counters("block-hashes")
        before = count["requests left to stock"]
        request = Session(release.constant_list, range(64), embeds=torch.ones(64, 2))
        assert factory(16, function)(request) == release.factory(16, function)(request)
        assert count["requests left to stock"] == before + 1
        before = count["hashers left to stock"]
        assert factory(16, lambda value: function(value))(request) == release.factory(16, function)(request)
        assert count["hashers left to stock"] == before + 1


LOOKING_AHEAD = [release for release in RELEASES if len(inspect.signature(release.factory).parameters) > 2]


@pytest.mark.parametrize("release", LOOKING_AHEAD, ids=repr)
def test_hashers_that_look_ahead_are_left_to_stock(release):
    function = release.hashes["sha256"]
    release.module.init_none_hash(function)
    stock = release.factory(16, function, 2)
    with release.patch() as factory:
        request = Session(release.constant_list, range(100), salt="s")
        assert factory(16, function, 2)(request) == stock(request)
        assert factory(16, function, num_hash_lookahead_tokens=0)(request) == release.factory(16, function)(request)


def test_the_seed_may_change(release, monkeypatch):
    function = release.hashes["sha256_cbor"]
    with release.patch() as factory:
        ours, stock = factory(16, function), release.factory(16, function)
        seen = []
        for seed in ("1", "2", "1"):
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            release.module.init_none_hash(function)
            request = Session(release.constant_list, range(800))
            assert ours(request) == stock(request)
            seen.append(ours(request))
        assert seen[0] == seen[2] != seen[1]


def test_input_thread_and_engine_thread_hash_at_once(release):
    function = release.hashes["sha256"]
    release.module.init_none_hash(function)
    stock, wrong = release.factory(4, function), []
    with release.patch(memo_mb=0.1) as factory:
        ours = factory(4, function)

        def work(seed):
            rng = random.Random(seed)
            for _ in range(60):
                tokens = [rng.randrange(2)] * rng.randrange(100, 1500) + [rng.randrange(9)] * 400
                request = Session(release.constant_list, tokens, salt=rng.choice([None, "s"]))
                if ours(request) != stock(request):
                    wrong.append(tokens)

        in_two_threads(work)
    assert not wrong


def test_our_own_errors_end_at_stocks_answer(release, monkeypatch):
    from vllm_speedups.patches import block_hashes

    function = release.hashes["sha256"]
    release.module.init_none_hash(function)
    errors = []
    # Reverted after three, as the patch engine does.
    context = Context("", release.stock, errors.append, live=lambda: len(errors) < 3)
    with release.patch():
        ours = block_hashes.build(context)[block_hashes.TARGET](16, function)
        monkeypatch.setattr(block_hashes.PrefixHasher, "extend", lambda *_: 1 / 0)
        request = Session(release.constant_list, range(640))
        for _ in range(5):
            assert ours(request) == release.factory(16, function)(request)
    assert [type(error) for error in errors] == [ZeroDivisionError] * 3


def test_what_stock_refuses_too_is_no_failure_of_ours(release):
    function = release.hashes["sha256_cbor"]
    release.module.init_none_hash(function)
    # `release.patch` would raise what the patch counts as its own failure.
    with release.patch() as factory:
        for hasher in (release.factory(16, function), factory(16, function)):
            with pytest.raises(UnicodeEncodeError):
                hasher(Session(release.constant_list, range(640), salt="\ud800"))


@pytest.mark.parametrize("kind", [int, np.int64, np.uint32, np.uint16])
def test_media_offsets_of_any_integer_type(release, kind):
    function = release.hashes["sha256"]
    release.module.init_none_hash(function)
    places = [("a", kind(20), kind(40)), ("b", kind(600), kind(30)), ("c", kind(900), kind(500))]
    with release.patch() as factory:
        ours, stock, seen = factory(16, function), release.factory(16, function), []
        for features in (places, places[:2], [*places[:2], ("d", kind(900), kind(500))]):
            request = Session(release.constant_list, range(2000), features=features)
            assert ours(request) == stock(request)
            seen.append(stock(request)[-1])
        assert len(set(seen)) == 3
