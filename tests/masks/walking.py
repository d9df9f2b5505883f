"""Walks random and adversarial outputs through a grammar, and compares every cached row with a fresh fill."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
import xgrammar as xgr

from vllm_speedups.masks.network import Network, State
from vllm_speedups.masks.serialized import Unsupported
from vllm_speedups.masks.trail import Lost, Trail
from vllm_speedups.patches.xgrammar_states import automaton_of, vocabulary_of


class Tongue:
    """A vocabulary, a compiler for it, and which tokens to try for what."""

    def __init__(self, info: xgr.TokenizerInfo):
        self.info = info
        self.vocabulary = info.decoded_vocab
        self.longest = max(map(len, self.vocabulary))
        self.compiler = xgr.GrammarCompiler(info, max_threads=2)
        self.stops = set(info.stop_token_ids)
        words = [bytes(token) for token in self.vocabulary]
        self.tastes = [
            self._which(lambda t: t.isalpha() and len(t) < 9, words),
            self._which(lambda t: any(byte >= 0x80 for byte in t), words),
            self._which(lambda t: len(t) > 1 and not t.isalnum(), words),
            self._which(lambda t: len(t) == 1, words),
            self._which(lambda t: len(t) > 8, words),
            self._which(lambda t: t[-1:] in b'"}],:' and len(t) > 0, words),
        ]

    @staticmethod
    def _which(wanted, words) -> np.ndarray:
        return np.array([wanted(word) for word in words])

    def compile(self, kind: str, source, **options):
        if kind == "schema":
            return self.compiler.compile_json_schema(json.dumps(source), **options)
        return {
            "regex": self.compiler.compile_regex,
            "ebnf": self.compiler.compile_grammar,
            "tag": lambda text: self.compiler.compile_structural_tag(json.dumps(text)),
        }[kind](source)


@lru_cache(None)
def small() -> Tongue:
    """All bytes, and some 200 tokens chosen to cross the borders of rules."""
    words = [bytes([i]) for i in range(256)]
    words += [
        w.encode() for w in ("ab", "abc", "the", " the", "null", "true", "false", '":', '": ', '", "', '"}', '"]', "]}")
    ]
    words += [
        w.encode()
        for w in ('{"', '["', "[[", "]]", "}}", "},{", '"},{"', "\\n", "\\u", "\\u00", '\\"', "\n\n", "  ", ", ")
    ]
    words += [
        w.encode()
        for w in ("é", "日", "本語", "😀", "aé", '日"', "ß\\", "0.", "10", "123", "-1", "e+", "1e", "1]", '1,"')
    ]
    words += [
        "日".encode()[:2],
        "日".encode()[1:],
        "😀".encode()[:3],
        "😀".encode()[2:],
        b"a\xe6",
        b"\xe6\x97",
        b'\xa5"',
    ]
    words += (
        [b"a" * n for n in (2, 3, 4, 5, 8, 13)]
        + [b"1" * n for n in (2, 3, 5)]
        + [b'a","b', b'a"}', b'"a":1', b"()", b"+1"]
    )
    words += [f"{a}{b}".encode() for a in "abxyz019 " for b in 'abxyz019",' if f"{a}{b}" not in ("ab", "10")]
    words += [b"", b"<s>", b"</s>", b"<end>"]
    words = list(dict.fromkeys(words))
    stop = words.index(b"</s>")
    return Tongue(xgr.TokenizerInfo(words, vocab_type=xgr.VocabType.RAW, stop_token_ids=[stop]))


@lru_cache(None)
def tekken() -> Tongue:
    """Mistral's Tekken, 131,072 tokens: it ships inside mistral_common."""
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer = Tekkenizer.from_file(str(Path(mistral_common.__file__).parent / "data/tekken_240911.json"))
    words = [
        tokenizer.id_to_byte_piece(i) if i >= tokenizer.num_special_tokens else tokenizer.id_to_piece(i).encode()
        for i in range(tokenizer.n_words)
    ]
    return Tongue(
        xgr.TokenizerInfo(words, vocab_type=xgr.VocabType.RAW, stop_token_ids=[tokenizer.eos_id], add_prefix_space=True)
    )


def bits(row: np.ndarray, size: int) -> np.ndarray:
    """bool [size] of a packed row."""
    return np.unpackbits(row.view(np.uint8), bitorder="little")[:size].astype(bool)


def state_of(place) -> State:
    return place if place.__class__ is State else place[0]


def walk(
    tongue: Tongue,
    compiled,
    network: Network | None = None,
    outputs: int = 8,
    length: int = 60,
    seed: int = 0,
    spell_out: bool = False,
    seconds: float = 5.0,
) -> Counter:
    """Raises AssertionError at the first wrong row, wrong "complete", or token on which the network disagrees.

    `spell_out` also asks the network, in every state met for the first time, about every token of the vocabulary: a
    stronger check, for small vocabularies. After `seconds` it ends early: xgrammar takes as long for one row of some
    ambiguous grammars.
    """
    # As in an engine, or with counts told apart no further than need be, however short the repetitions.
    horizon = tongue.longest if seed % 2 else None
    network = network or Network(automaton_of(compiled), vocabulary_of(tongue.info), horizon)
    random_, size, rows, counts = random.Random(seed), tongue.info.vocab_size, {}, Counter()
    specials = np.zeros(size, bool)
    specials[list(tongue.info.special_token_ids) if hasattr(tongue.info, "special_token_ids") else []] = True
    bitmask, deadline = xgr.allocate_token_bitmask(1, size), time.monotonic() + seconds
    for _ in range(outputs):
        matcher, trail = xgr.GrammarMatcher(compiled), Trail(network.initial, network.follow)
        taste = random_.choice(tongue.tastes)
        for _ in range(random_.randrange(1, length)):
            if time.monotonic() > deadline:
                return counts
            matcher.fill_next_token_bitmask(bitmask, 0)
            row, state = bitmask[0].numpy(), state_of(trail.place())
            assert state.complete == matcher.is_completed(), trail.tokens
            known = rows.get(state.number)
            if known is None:
                rows[state.number] = row.copy()
                counts["misses"] += 1
            else:
                assert np.array_equal(known, row), ("a wrong row", trail.tokens)
                counts["hits"] += 1
            allowed = bits(row, size)
            if spell_out and known is None:
                counts["masked by mistake"] += _spell_out(tongue, network, trail.place(), matcher, allowed)
            choices = np.flatnonzero(allowed)
            if not len(choices):
                counts["dead ends"] += 1
                break
            if random_.random() < 0.1:
                taste = random_.choice(tongue.tastes)
            liked = np.flatnonzero(allowed & taste)
            if len(liked) and random_.random() < 0.7:
                choices = liked
            token = int(choices[random_.randrange(len(choices))])
            if token in tongue.stops and random_.random() < 0.7 and len(choices) > 1:
                token = int(choices[random_.randrange(len(choices))])
            if random_.random() < 0.05:
                refused = np.flatnonzero(~allowed)
                token_ = int(refused[random_.randrange(len(refused))]) if len(refused) else None
                if token_ is not None and matcher.accept_token(token_):
                    # Drafted tokens can get there too: vLLM asks the matcher, not the mask.
                    counts["masked by mistake"] += 1
                    trail.accept([token_])
                    continue
            assert matcher.accept_token(token)
            trail.accept([token])
            if matcher.is_terminated() or random_.random() < 0.08:
                back = random_.randrange(1, min(len(trail), 6) + 1)
                matcher.rollback(back)
                trail.rollback(back)
                counts["rollbacks"] += 1
            if random_.random() < 0.01:
                matcher.reset()
                trail.reset()
    counts["states"] = len(network)
    return counts


def _spell_out(tongue: Tongue, network: Network, place, matcher, allowed: np.ndarray) -> int:
    """How many tokens xgrammar accepts and yet masks.

    Its masks may be narrower than its grammar, where a rule's lookahead assertion was wrongly taken to be exact; they
    still depend on the state alone.
    """
    mistakes = 0
    for token, word in enumerate(tongue.vocabulary):
        if token in tongue.stops:
            assert allowed[token] == matcher.is_completed()
            continue
        if not word:
            continue
        try:
            network.follow(place, token)
            follows = True
        except Lost:
            follows = False
        if allowed[token] != follows:
            accepts = matcher.accept_token(token)
            if accepts:
                matcher.rollback(1)
            assert accepts == follows, (token, word)
            mistakes += 1
    return mistakes


__all__ = ["Lost", "Tongue", "Unsupported", "bits", "small", "state_of", "tekken", "walk"]
