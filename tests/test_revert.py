"""`vllm_speedups.revert()` on real vLLM: its whole namespace is as before, and what was made while patched goes on as stock."""

from __future__ import annotations

import pytest
from test_plugin import run, zygote  # noqa: F401

pytest.importorskip("vllm")

# Everything that is patched, used once: three backends without an engine, a step of masks, a hasher.
USE = """
import json, time, types
import llguidance, numpy as np, outlines_core, torch, xgrammar as xgr
from types import SimpleNamespace as N
from vllm.v1.core import kv_cache_utils as cache
from vllm.v1.structured_output import backend_guidance, backend_outlines, backend_xgrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind
from vllm.utils.hashing import sha256
cache.init_none_hash(sha256)

REGEX, TEXT = "a(b|c){0,9}d", [b"abcb", b"acc", b"abbbcb"]
def guidance():
    made = backend_guidance.GuidanceBackend.__new__(backend_guidance.GuidanceBackend)
    made.ll_tokenizer = llguidance.LLTokenizer("byte")
    made.vocab_size = made.ll_tokenizer.vocab_size
    made.disable_any_whitespace = made.disable_additional_properties = False
    return made
def xgrammar():
    made = backend_xgrammar.XgrammarBackend.__new__(backend_xgrammar.XgrammarBackend)
    info = xgr.TokenizerInfo([*(bytes([i]) for i in range(256)), b"</s>"], vocab_type=xgr.VocabType.RAW, stop_token_ids=[256])
    made.compiler = made.full_vocab_compiler = xgr.GrammarCompiler(info, max_threads=1)
    made.vocab_size, made.num_speculative_tokens, made.disable_any_whitespace = 257, 4, False
    return made
def outlines():
    made = backend_outlines.OutlinesBackend.__new__(backend_outlines.OutlinesBackend)
    made.vocabulary = N(inner=outlines_core.Vocabulary(256, {chr(i): [i] for i in range(1, 127)}), _hash="x")
    made.cache, made.vocab_size, made.vllm_config = {}, 257, N(speculative_config=None)
    return made
def row(grammar, size):
    bitmask = torch.full((2, (size + 31) // 32), 7, dtype=torch.int32)
    grammar.fill_bitmask(bitmask, 1)
    return bitmask.tolist()
class Requests:
    "A backend, and a request a text, walked half way."
    def __init__(self, backend):
        self.backend = backend
        self.grammars = [backend.compile_grammar(Kind.REGEX, REGEX) for _ in TEXT]
        self.rows = self.walk(0, 2)
    def walk(self, first, last):
        rows = []
        for grammar, text in zip(self.grammars, TEXT):
            for token in text[first:last]:
                rows.append(row(grammar, self.backend.vocab_size))
                assert grammar.accept_tokens("r", [token])
            rows.append(row(grammar, self.backend.vocab_size))
        return rows
def request(length):
    tokens = [(7 * i * i) % 50_000 for i in range(length)]
    return N(all_token_ids=tokens, num_tokens=length, block_hashes=[], lora_request=None, cache_salt=None,
             mm_features=[], prompt_embeds=None)
def grow(one, hasher):
    one.block_hashes += hasher(one)
    one.all_token_ids += range(5000)
    one.num_tokens += 5000
    return one
def step():
    logits = torch.arange(128, dtype=torch.float32).reshape(2, 64)
    utils.apply_grammar_bitmask(
        N(scheduled_spec_decode_tokens={}),
        N(grammar_bitmask=np.array([[6, -2], [1, 0]], dtype=np.int32), structured_output_request_ids=["b", "a"]),
        N(req_ids=["a", "b"]), logits)
    return logits.tolist()
def use():
    "(what lives on, what was answered)"
    requests = [Requests(make()) for make in (guidance, xgrammar, outlines)]
    hasher = cache.get_request_block_hasher(16, sha256)
    one = grow(request(9000), hasher)
    bound = [grammar.fill_bitmask for each in requests for grammar in each.grammars]
    answers = [[each.rows for each in requests], step(), [digest.hex() for digest in one.block_hashes]]
    return (requests, hasher, one, bound), answers
def go_on(lives):
    requests, hasher, one, bound = lives
    rows = [each.walk(2, 9) for each in requests]
    anew = [Requests(each.backend).rows for each in requests]
    kept = []
    for fill in bound:
        bitmask = torch.full((1, 9), 7, dtype=torch.int32)
        fill(bitmask, 0)
        kept.append(bitmask.tolist())
    return [rows, anew, kept, [digest.hex() for digest in hasher(one)], step()]

def snapshot():
    "All names of vLLM's modules, and of the classes in them, with what is bound to each."
    seen = {}
    def of(kind):
        for name, value in list(vars(kind).items()):
            seen[kind.__module__, kind.__qualname__, name] = value
            if isinstance(value, type) and value.__qualname__ == f"{kind.__qualname__}.{name}":
                of(value)
    for full_name, module in list(sys.modules.items()):
        if full_name.partition(".")[0] == "vllm" and isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                seen[full_name, name] = value
                if isinstance(value, type) and value.__module__ == full_name:
                    of(value)
    return seen
def differing(one, other):
    return sorted(".".join(key) for key in one.keys() | other.keys() if one.get(key, one) is not other.get(key, one))
import sys
from vllm_speedups.masks import tracking
tracking.EXPENSIVE, tracking.BUILD_AFTER, tracking.CHEAP = -1.0, 0.0, 0.0
"""

REVERT = """
import vllm_speedups
from vllm_speedups import plugin, telemetry
answer["first"] = go_on(use()[0])
stock_lives, answer["stock"] = use()
before = snapshot()
plugin.register()
applied = snapshot()
answer["applied"] = differing(before, applied)
answer["statuses"] = [patch.status for patch in plugin.patches()]
answer["targets"] = sorted(
    path.replace(":", ".") for patch in plugin.patches() if patch.active for path in patch.form.targets
)
lives, answer["patched"] = use()
for grammar in lives[0][1].grammars:
    deadline = time.monotonic() + 30
    while grammar._speedups.grammar.network is None and time.monotonic() < deadline:
        row(grammar, 257)
        time.sleep(0.01)
for each in lives[0]:
    Requests(each.backend)
counts = {name: sum(values.values()) for name, values in telemetry.snapshot().items()}
vllm_speedups.revert()
answer["after"] = differing(before, snapshot())
answer["names"] = len(before)
answer["now"], answer["as stock"] = go_on(lives), go_on(stock_lives)
answer["counted"] = counts
answer["counted after"] = {name: sum(values.values()) for name, values in telemetry.snapshot().items()}
answer["reverted"] = [patch.status for patch in plugin.patches()]
"""


@pytest.fixture(scope="module")
def answer(zygote):  # noqa: F811
    import json

    process, answers = zygote
    process.stdin.write(json.dumps({"code": USE + REVERT, "environ": {}}) + "\n")
    process.stdin.flush()
    answer = json.loads(answers.readline())
    assert "raised" not in answer, answer
    return answer


def test_while_patched_only_the_targets_and_names_bound_to_them_differ(answer):
    assert "declined" not in answer["statuses"] and len(answer["targets"]) > 10
    assert set(answer["targets"]) <= set(answer["applied"])
    names = {target.rpartition(".")[2] for target in answer["targets"]}
    assert {name.rpartition(".")[2] for name in answer["applied"]} == names


def test_after_a_revert_every_name_in_vllm_is_bound_to_what_it_was(answer):
    assert answer["after"] == [] and answer["names"] > 10_000
    assert not {"applied", "waiting"} & set(answer["reverted"])


def test_what_was_made_while_patched_goes_on_with_stocks_answers(answer):
    assert answer["patched"] == answer["stock"]
    assert answer["now"] == answer["as stock"]


def test_nothing_of_ours_runs_after_a_revert(answer):
    assert all(answer["counted"].get(name) for name in ("block-hashes", "grammar-masks", "guidance-history"))
    assert answer["counted after"] == answer["counted"]
