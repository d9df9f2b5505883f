"""Glue of `xgrammar-processors`: the xgrammar logits processors of the V0 engine."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch

from vllm_speedups import settings
from vllm_speedups.masks.apply import MaskApplier
from vllm_speedups.masks.packed import words_for
from vllm_speedups.patches.processors import check_scores
from vllm_speedups.patching import Declined
from vllm_speedups.telemetry import counters

MODULE = "vllm.model_executor.guided_decoding.xgrammar_decoding"
CALL = f"{MODULE}:XGrammarLogitsProcessor.__call__"
TOKENIZER = f"{MODULE}:GrammarConfig.tokenizer_info"
# A server has one tokenizer, and one for each adapter that brings its own.
KEPT = 4


def build(context) -> dict:
    """`XGrammarLogitsProcessor.__call__` and `GrammarConfig.tokenizer_info`."""
    counts = counters("xgrammar-processors")
    return {CALL: _call(context, counts), TOKENIZER: _tokenizer_info(context.stock[TOKENIZER], counts)}


def _call(context, counts: dict):
    stock = context.stock[CALL]
    applier = MaskApplier(int(settings.current().mask_cache_mb * 2**20), counts)
    verifies = context.verifies

    def __call__(self, input_ids, scores):
        if not (scores.dim() == 1 and applier.supports(scores.unsqueeze(0)) and scores.shape[0] > 1):
            counts["left to stock"] += 1
            return stock(self, input_ids, scores)
        if self.batch_size != 1 or words_for(scores.shape[0]) != words_for(self.tokenizer_info.vocab_size):
            counts["left to stock"] += 1
            return stock(self, input_ids, scores)
        # Stock, asked for a row without logits, takes the token and fills the bitmask, or raises what it raises. While the
        # request reasons it gives back the very row that it was given.
        nothing = scores[:0]
        if stock(self, input_ids, nothing) is nothing:
            return scores
        masked = scores if scores.dtype == torch.float32 else scores.clone()
        expected = masked.clone() if verifies is not None and verifies() else None
        try:
            applier.apply(masked.unsqueeze(0), self.token_bitmask.numpy(), [0])
        except Exception as error:
            _apply(masked, self.token_bitmask)
            context.failed(error)
        if expected is not None:
            _apply(expected, self.token_bitmask)
            ours = masked.clone()
            masked.copy_(expected)
            check_scores(context, expected, ours, {}, {"bitmask": self.token_bitmask.tolist()})
        return masked

    return __call__


def _apply(scores: torch.Tensor, bitmask: torch.Tensor) -> None:
    """What stock does with a row, without advancing: for the case that ours failed."""
    import xgrammar

    masked = scores.float().unsqueeze(0)
    xgrammar.apply_token_bitmask_inplace(masked, bitmask)
    scores.copy_(masked.squeeze(0))


def _tokenizer_info(stock: staticmethod, counts: dict) -> staticmethod:
    known: list = []
    lock = threading.Lock()

    def tokenizer_info(tokenizer_data):
        """What xgrammar makes of a vocabulary, immutable, made once for equal vocabularies."""
        for data, info in list(known):
            # Pickled configurations bring a vocabulary of their own: all of it is compared.
            if data is tokenizer_data or data == tokenizer_data:
                counts["tokenizers shared"] += 1
                return info
        info = stock.__func__(tokenizer_data)
        with lock:
            known.append((tokenizer_data, info))
            del known[:-KEPT]
        return info

    return staticmethod(tokenizer_info)


def probe(context, replacements) -> None:
    """Rows as a matcher leaves them, stock and ours, and a vocabulary that is made into a tokenizer twice."""
    import xgrammar

    vocabulary = SimpleNamespace(encoded_vocab=["a", "b", "ab", "</s>"] * 12, metadata=_METADATA)
    infos = [function.__func__(vocabulary) for function in (context.stock[TOKENIZER], replacements[TOKENIZER])]
    if replacements[TOKENIZER].__func__(vocabulary) is not infos[1] or infos[0].vocab_size != infos[1].vocab_size:
        raise Declined("its probe found another tokenizer than stock's")
    compiled = xgrammar.GrammarCompiler(infos[1], max_threads=1).compile_grammar('root ::= "ab" | "b"')
    processors = [
        SimpleNamespace(
            reasoner=None, ctx=compiled, matchers=[], tokenizer_info=infos[1], batch_size=1, prefilled=False, config=None
        )
        for _ in range(2)
    ]
    for history in ([], [0], [0, 1]):
        rows = [torch.linspace(-1, 1, 48) for _ in processors]
        calls = context.stock[CALL], replacements[CALL]
        rows = [call(own, history, row) for call, own, row in zip(calls, processors, rows)]
        if not torch.equal(*rows):
            raise Declined(f"its probe found other logits than stock's (after {history})")


_METADATA = '{"vocab_type":0,"vocab_size":48,"add_prefix_space":false,"stop_token_ids":[3]}'
