"""A small chat model for tests: Hugging Face's form of tokenizer, marks for thoughts and tool calls, a chat template."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from vllm_speedups.bench.models import build_model

# How many of Tekken's tokens it knows, the 256 bytes among them: with the marks a multiple of 32.
WORDS = 3066
SPECIALS = ("<|end|>", "<|turn|>", "<think>", "</think>", "<tool_call>", "</tool_call>")

TEMPLATE = (
    "{%- if tools %}<|turn|>tools {{ tools | tojson }}<|end|>{% endif -%}"
    "{%- for message in messages %}<|turn|>{{ message['role'] }} {{ message['content'] }}<|end|>{% endfor -%}"
    "{%- if add_generation_prompt %}<|turn|>assistant {% endif -%}"
)


def build_chat_model(folder: Path) -> Path:
    """Write model and tokenizer into `folder` and return it. vLLM reads it with `load_format="dummy"`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    build_model(folder)
    tekken = folder / "tekken.json"
    entries = json.loads(tekken.read_text())["vocab"][:WORDS]
    tekken.unlink()
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    letters = _letters()

    def spell(word: bytes) -> str:
        return "".join(letters[byte] for byte in word)

    merges = [(spell(first), spell(second)) for first, second in (_halves(word, ranks) for word in ranks) if second]
    tokenizer = Tokenizer(models.BPE(vocab={spell(word): rank for word, rank in ranks.items()}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    description = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**description, "model_max_length": 65_536}))
    end = tokenizer.token_to_id(SPECIALS[0])
    config = json.loads((folder / "config.json").read_text())
    config.update(vocab_size=tokenizer.get_vocab_size(), bos_token_id=end, eos_token_id=end)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def mark_id(mark: str) -> int:
    """The token id of one of SPECIALS."""
    return WORDS + SPECIALS.index(mark)


def _letters() -> list:
    """What byte-level tokenizers write for each byte: itself where it is printable, otherwise the next free letter."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _halves(word: bytes, ranks: dict) -> tuple:
    """The two tokens that a word was merged from last: what merging the lowest ranks first leaves of it."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 2:
        pairs = [ranks.get(first + second, len(ranks)) for first, second in zip(parts, parts[1:])]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= ranks[word]:
            return b"", b""
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else (b"", b"")
