"""The first promise, on real engines: with the plugin on, every request yields the ids that stock vLLM yields."""

from __future__ import annotations

import pytest

from vllm_speedups.bench.schemas import SCHEMAS

pytestmark = pytest.mark.engine

JSON = {"json": SCHEMAS["bounded"]}
REGEX = {"regex": r"(red|green|blue)( [a-z]{2,9}){1,4}\."}
CHOICE = {"choice": ["alpha", "alphabet", "beta", "a longer choice, with a comma"]}
EBNF = {"grammar": 'root ::= item (", " item)*\nitem ::= [a-z]+ "=" [0-9]+'}
LARK = {"grammar": 'start: item (", " item)*\nitem: /[a-z]+/ "=" /[0-9]+/'}
PROMPTS = [[1, 1000 + index] for index in range(12)]

# Every guide that the backend has, and none, in one batch.
GUIDES = {
    "outlines": [JSON, REGEX, CHOICE, None],
    "xgrammar": [JSON, REGEX, CHOICE, EBNF, None],
    "guidance": [JSON, REGEX, CHOICE, LARK, None],
}
KINDS = [pytest.param({"backend": backend, "max_num_seqs": 256}, id=backend) for backend in GUIDES]


@pytest.mark.parametrize("pair", KINDS, indirect=True)
class TestEachBackend:
    """One engine pair a backend; cold at first, then with all that it remembers."""

    def guides(self, pair) -> list:
        return GUIDES[pair[1].backend]

    @pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("visit", ["cold", "warm"])
    def test_guided_and_unguided_requests_in_one_batch(self, pair, same_ids, visit, temperature):
        same_ids(PROMPTS, 40, guide=self.guides(pair), temperature=temperature)

    def test_several_samples_of_a_request(self, pair, same_ids):
        ids = same_ids(PROMPTS[:6], 24, guide=self.guides(pair), seed=77, n=3)
        assert all(len(request) == 3 for request in ids)

    def test_more_requests_than_vllm_fills_serially(self, pair, same_ids):
        same_ids([[1, 500 + index] for index in range(140)], 6, guide=[JSON, REGEX])

    def test_requests_aborted_midway(self, pair, same_ids):
        ids = same_ids(PROMPTS, 24, guide=self.guides(pair), abort_at_step=7)
        assert ids[0] == [] and ids[1] != []

    def test_the_patches_did_the_work(self, pair):
        answer = pair[1].generate(PROMPTS, 8, guide=JSON)
        assert pair[1].about["patches"]["grammar-masks"] == "applied"
        assert answer["counters"]["grammar-masks"]["hits"] > 0
        assert pair[0].about["patches"] == {}


SPECULATING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param({"backend": backend, "speculative_config": SPECULATING}, id=backend)
        for backend in ("outlines", "xgrammar")
    ],
    indirect=True,
)
def test_speculative_decoding_with_rejected_drafts(pair, same_ids):
    # Prompts that repeat themselves, so that n-grams are found and most drafts are wrong.
    prompts = [[1, *([1034 + index, 1005, 1097] * 6)] for index in range(8)]
    # Greedy only: sampled, stock differs from itself, depending on when a grammar is ready.
    for _ in range(2):
        same_ids(prompts, 48, guide=[JSON, None, REGEX, CHOICE], temperature=0.0)
    answer = pair[1].generate(prompts[:2], 4, guide=JSON, temperature=0.0)
    assert answer["counters"]["grammar-masks"]["hits"] > 0


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            {
                "backend": "xgrammar",
                "num_gpu_blocks_override": 9,
                "block_size": 32,
                "max_model_len": 128,
                "disable_log_stats": False,
            },
            id="nine blocks",
        )
    ],
    indirect=True,
)
def test_preempted_requests(pair, same_ids):
    same_ids([[1, *range(1000 + index, 1012 + index)] for index in range(6)], 60, guide=[{"regex": "[a-z ]+"}, None])
    assert pair[1].generate(PROMPTS[:1], 1)["vllm"]["vllm:num_preemptions"] > 0


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            {"enable_prefix_caching": True, "max_model_len": 2048, "disable_log_stats": False, "block_size": 32},
            id="prefix caching",
        )
    ],
    indirect=True,
)
def test_turns_of_a_conversation_find_the_blocks_that_stock_finds(pair, same_ids):
    system = [1, *range(3000, 3800)]
    talks = [[*system, 1000 + number] for number in range(4)]
    for turn in range(4):
        answers = same_ids(talks, 40, temperature=0.0)
        talks = [[*talk, *answer[0], *range(500 + turn, 530)] for talk, answer in zip(talks, answers)]
    stock, patched = (engine.generate(PROMPTS[:1], 1) for engine in pair)
    for name in ("vllm:prefix_cache_hits", "vllm:prefix_cache_queries"):
        assert patched["vllm"][name] == stock["vllm"][name] > 0
    assert patched["counters"]["block-hashes"]["hits"] > 4 * (len(system) // 32)
