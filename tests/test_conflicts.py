"""Another plugin beside ours, loaded by vLLM's own loader before us and after us: who yields, who is named, what works on."""

from __future__ import annotations

import plugins
import pytest
from test_plugin import lines, run, zygote  # noqa: F401

pytest.importorskip("vllm")

BEFORE, AFTER = "before", "after"
ORDERS = pytest.mark.parametrize("order", [BEFORE, AFTER])

LOAD = """
import sys
sys.path.insert(0, site) if order == "before" else sys.path.append(site)
from vllm.plugins import load_general_plugins
from vllm_speedups import plugin
load_general_plugins()
patches = {patch.name: patch for patch in plugin.patches()}
def report():
    answer["patches"] = {name: [patch.status, patch.reason] for name, patch in patches.items()}
    answer["notes"] = {name: patch.notes for name, patch in patches.items() if patch.notes}
report()
"""

# What somebody may do to a target: code for `register()`, where `owner` holds `name`.
WRAP = """
import functools
stock = vars(owner)[name]
@functools.wraps(stock)
def theirs(*args, **kwargs):
    import toy_speedups
    toy_speedups.calls = getattr(toy_speedups, "calls", 0) + 1
    return stock(*args, **kwargs)
setattr(owner, name, theirs)
"""
REPLACE = """
def theirs(*args, **kwargs):
    raise NotImplementedError("the toy's own")
setattr(owner, name, theirs)
"""
SUBCLASS = """
Home = getattr(module, owner_name)
class Theirs(Home):
    def {name}(self, *args, **kwargs):
        raise NotImplementedError("the toy's own")
import toy_speedups
toy_speedups.Theirs = Theirs
"""
PUT = """
setattr(module, owner_name, Theirs)
"""

FUNCTION = ("grammar-masks", "vllm.v1.structured_output.utils", "", "apply_grammar_bitmask")
METHOD = ("guidance-history", "vllm.v1.structured_output.backend_guidance", "GuidanceGrammar", "accept_tokens")


def toy(folder, target: tuple, what: str) -> str:
    """A toy plugin that does `what` to a target."""
    _, module, owner, name = target
    found = f"module = importlib.import_module({module!r})\nowner_name, name = {owner!r}, {name!r}\n"
    found += "owner = getattr(module, owner_name) if owner_name else module\n"
    return str(plugins.make(folder, "import importlib\n" + found + what.replace("{name}", name)))


def told(answer: dict, name: str) -> str:
    """All that was said about one patch at WARNING or above, and why it is not applied."""
    return " | ".join([text for level in ("WARNING", "ERROR") for text in lines(answer, level) if name in text])


@pytest.mark.parametrize("target", [FUNCTION, METHOD], ids=["a function", "a method"])
@pytest.mark.parametrize("what", [WRAP, REPLACE], ids=["wrapped", "replaced"])
def test_a_target_that_was_taken_before_us_is_left_to_its_owner_who_is_named(run, tmp_path, target, what):  # noqa: F811
    answer = run(f"site, order = {toy(tmp_path, target, what)!r}, 'before'\n" + LOAD)
    assert "raised" not in answer, answer
    status, reason = answer["patches"].pop(target[0])
    assert status == "declined" and f"{target[3]} was replaced by" in reason and "toy_speedups.py:" in reason
    assert "declined" not in {status for status, _ in answer["patches"].values()}
    (line,) = lines(answer, "INFO")
    assert "toy_speedups.py:" in line and answer["notes"] == {}


STEP = """
import numpy as np, torch
from types import SimpleNamespace as N
def step():
    logits = torch.zeros(1, 32)
    utils.apply_grammar_bitmask(
        N(scheduled_spec_decode_tokens={}),
        N(grammar_bitmask=np.array([[6]], dtype=np.int32), structured_output_request_ids=["a"]),
        N(req_ids=["a"]),
        logits,
    )
    return logits.isfinite().nonzero()[:, 1].tolist()
"""


def test_a_function_wrapped_after_us_works_on_and_the_wrapper_is_named_at_first_use_and_at_a_revert(
    run,  # noqa: F811
    tmp_path,
):
    answer = run(
        f"site, order = {toy(tmp_path, FUNCTION, WRAP)!r}, 'after'\n"
        + LOAD
        + STEP
        + """
answer["before"] = list(said)
answer["allowed"] = step()
answer["live"] = patches["grammar-masks"].live
answer["again"] = step()
answer["during"] = list(said)
import vllm_speedups
vllm_speedups.revert()
answer["reverted"] = step()
report()
import toy_speedups
answer["calls"] = toy_speedups.calls
"""
    )
    assert "raised" not in answer, answer
    assert answer["allowed"] == answer["again"] == answer["reverted"] == [1, 2] and answer["live"]
    assert answer["calls"] == 3 and len(answer["before"]) == 1
    named = [text for _, text in answer["during"] if "was wrapped after us by" in text]
    assert len(named) == 1 and "apply_grammar_bitmask" in named[0] and "toy_speedups.py:" in named[0]
    assert "and is left alone" in lines(answer, "WARNING")[-1]
    assert answer["patches"]["grammar-masks"][0] == "reverted"


def test_a_function_replaced_after_us_is_its_owners_and_the_next_load_names_him(run, tmp_path):  # noqa: F811
    answer = run(
        f"site, order = {toy(tmp_path, FUNCTION, REPLACE)!r}, 'after'\n"
        + LOAD
        + STEP
        + """
try:
    step()
except NotImplementedError:
    answer["theirs"] = True
plugin.register()
plugin.register()
report()
answer["overruled"] = [name for name, patch in patches.items() if patch.overruled()]
"""
    )
    assert "raised" not in answer, answer
    assert answer["theirs"] and answer["overruled"] == ["grammar-masks"]
    (named,) = lines(answer, "WARNING")
    assert "apply_grammar_bitmask was replaced after us by" in named and "toy_speedups.py:" in named


# A backend without an engine, and what its grammars allow after some tokens.
GUIDANCE = """
import llguidance, torch
from types import SimpleNamespace as N
from vllm.v1.structured_output import backend_guidance as guidance
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind
tokenizer = llguidance.LLTokenizer("byte")
backend = guidance.GuidanceBackend.__new__(guidance.GuidanceBackend)
backend.ll_tokenizer, backend.vocab_size = tokenizer, tokenizer.vocab_size
backend.disable_any_whitespace = backend.disable_additional_properties = False
def row(grammar):
    bitmask = torch.zeros((1, (tokenizer.vocab_size + 31) // 32), dtype=torch.int32)
    grammar.fill_bitmask(bitmask, 0)
    return bitmask.tolist()
def walk(grammar, text):
    rows = [row(grammar)]
    for token in text:
        assert grammar.accept_tokens("r", [token])
        rows.append(row(grammar))
    return rows
def fresh(text):
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("regex", "a(b|c)*d"))
    matcher.consume_tokens(list(text))
    from llguidance.torch import fill_next_token_bitmask
    bitmask = torch.zeros((1, (tokenizer.vocab_size + 31) // 32), dtype=torch.int32)
    fill_next_token_bitmask(matcher, bitmask, 0)
    return bitmask.tolist()
def compiled():
    return backend.compile_grammar(Kind.REGEX, "a(b|c)*d")
from vllm_speedups.masks import tracking
tracking.EXPENSIVE = -1.0
"""

MOVES = """
def theirs(self, request_id, tokens):
    return self.ll_matcher.consume_tokens(tokens)
setattr(owner, name, theirs)
"""


def test_a_method_replaced_after_us_keeps_its_own_way_and_our_rows_stay_out_of_it(run, tmp_path):  # noqa: F811
    answer = run(
        f"site, order = {toy(tmp_path, METHOD, MOVES)!r}, 'after'\n"
        + LOAD
        + GUIDANCE
        + """
answer["rows"] = [walk(compiled(), b"abcb") for _ in range(3)]
answer["fresh"] = [fresh(b"abcb"[:count]) for count in range(5)]
report()
"""
    )
    assert "raised" not in answer, answer
    assert answer["rows"] == [answer["fresh"]] * 3
    assert "accept_tokens was replaced after us by" in told(answer, "guidance-history")
    assert answer["patches"]["guidance-history"][0] == "applied"


@ORDERS
@pytest.mark.parametrize("puts", [False, True], ids=["beside", "in its place"])
def test_a_subclass_keeps_what_it_overrides_and_is_named(run, tmp_path, order, puts):  # noqa: F811
    answer = run(
        f"site, order = {toy(tmp_path, METHOD, SUBCLASS + (PUT if puts else ''))!r}, {order!r}\n"
        + LOAD
        + GUIDANCE
        + """
import toy_speedups
matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("regex", "ab"))
theirs = toy_speedups.Theirs(ll_matcher=matcher, ll_tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
try:
    theirs.accept_tokens("r", [97])
except NotImplementedError:
    answer["own"] = True
answer["filled"] = row(theirs)
matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("regex", "ab"))
plain = toy_speedups.Theirs.__mro__[1](ll_matcher=matcher, ll_tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
answer["stock"] = row(plain)
answer["tracked"] = "_speedups" in vars(compiled())
for patch in patches.values():
    patch.look_again()
report()
"""
    )
    assert "raised" not in answer, answer
    assert answer["own"] and answer["filled"] == answer["stock"]
    status, reason = answer["patches"]["guidance-history"]
    if puts:
        assert status == "declined" and "toy_speedups" in reason and "Theirs" in reason and not answer["tracked"]
        return
    assert status == "applied" and answer["tracked"]
    everything = " ".join([reason, *answer["notes"].get("guidance-history", [])])
    assert "Theirs" in everything and "accept_tokens" in everything


INHERITS = """
class Theirs(getattr(module, owner_name)):
    def hello(self):
        return "hello"
import toy_speedups
toy_speedups.Theirs = Theirs
"""


@ORDERS
def test_a_subclass_that_overrides_nothing_gets_ours(run, tmp_path, order):  # noqa: F811
    answer = run(
        f"site, order = {toy(tmp_path, METHOD, INHERITS)!r}, {order!r}\n"
        + LOAD
        + GUIDANCE
        + """
import inspect, toy_speedups
Home = toy_speedups.Theirs.__mro__[1]
answer["inherited"] = all(
    inspect.getattr_static(toy_speedups.Theirs, path.rpartition(".")[2]) is gate
    for path, gate in patches["guidance-history"].gates.items() if "GuidanceGrammar." in path
)
answer["rows"] = [walk(compiled(), b"abcb") for _ in range(2)]
answer["fresh"] = [fresh(b"abcb"[:count]) for count in range(5)]
from vllm_speedups import telemetry
answer["hits"] = telemetry.snapshot()["guidance-history"].get("hits", 0)
report()
"""
    )
    assert "raised" not in answer, answer
    assert answer["inherited"] and answer["rows"] == [answer["fresh"]] * 2 and answer["hits"] > 0
    assert answer["notes"] == {} and answer["patches"]["guidance-history"][0] == "applied"


PREMISE = ("block-hashes", "vllm.v1.core.kv_cache_utils", "", "generate_block_hash_extra_keys")
EXTRA = """
stock = getattr(owner, name)
def theirs(request, start, end, item):
    keys, item = stock(request, start, end, item)
    return ("toy", *(keys or ())), item
setattr(owner, name, theirs)
"""
HASH = """
from types import SimpleNamespace as N
from vllm.v1.core import kv_cache_utils as cache
from vllm.utils.hashing import sha256
cache.init_none_hash(sha256)
def hashes():
    hasher = cache.get_request_block_hasher(16, sha256)
    request = N(all_token_ids=list(range(1000)), num_tokens=1000, block_hashes=[], lora_request=None, cache_salt=None,
                mm_features=[], prompt_embeds=None)
    return [digest.hex() for digest in hasher(request)]
"""


@ORDERS
def test_whoever_replaces_what_we_rely_on_is_heard_and_ours_steps_aside(run, tmp_path, order):  # noqa: F811
    use = "answer['ours'] = hashes()\nplugin.revert()\nanswer['stock'] = hashes()\n"
    answer = run(f"site, order = {toy(tmp_path, PREMISE, EXTRA)!r}, {order!r}\n" + LOAD + HASH + use + "report()\n")
    assert "raised" not in answer, answer
    plain = run(HASH + "answer['stock'] = hashes()")
    assert answer["ours"] == answer["stock"] != plain["stock"]
    status, reason = answer["patches"]["block-hashes"]
    assert status == "declined" and "generate_block_hash_extra_keys was replaced" in reason and "toy_speedups.py" in reason


@ORDERS
@pytest.mark.parametrize(("what", "says"), [(WRAP, "wrapped"), (REPLACE, "replaced")], ids=["wrapped", "replaced"])
def test_doctor_loads_the_other_plugins_as_vllm_does_and_names_them(run, tmp_path, order, what, says):  # noqa: F811
    answer = run(
        f"site, order = {toy(tmp_path, FUNCTION, what)!r}, {order!r}\n"
        """
import sys
sys.path.insert(0, site) if order == "before" else sys.path.append(site)
from vllm_speedups import doctor
report = doctor.examine()
answer["status"], answer["text"] = report["status"], doctor.text(report)
answer["patch"] = next(patch for patch in report["patches"] if patch["name"] == "grammar-masks")
"""
    )
    assert "raised" not in answer, answer
    assert answer["status"] == (0 if (order, says) == (AFTER, "wrapped") else 1)
    assert "toy_speedups.py:" in answer["text"]
    if order == BEFORE:
        assert answer["patch"]["status"] == "declined" and "was replaced by" in answer["patch"]["reason"]
    else:
        (note,) = answer["patch"]["notes"]
        assert answer["patch"]["status"] == "applied" and f"was {says} after us by" in note


def test_doctor_goes_on_where_another_plugin_fails_and_says_so(run, tmp_path):  # noqa: F811
    site = plugins.make(tmp_path, "raise RuntimeError('no such device')")
    answer = run(
        f"""
        import sys
        sys.path.append({str(site)!r})
        from vllm_speedups import doctor
        report = doctor.examine()
        answer["status"], answer["warnings"] = report["status"], report["warnings"]
        """
    )
    assert "raised" not in answer, answer
    assert answer["status"] == 0
    (warning,) = answer["warnings"]
    assert "toy_speedups" in warning and "no such device" in warning
