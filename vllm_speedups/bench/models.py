"""A small model for benchmarks and tests: a two-layer Llama with dummy weights and a tokenizer of real size."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

# Mistral's Tekken, 131,072 tokens, is part of mistral_common, which every vLLM since 0.6 depends on.
VOCAB_SIZE = 131_072
_TOKENIZERS = ("tekken_240911.json", "tekken_240718.json")


class NoTokenizer(RuntimeError):
    """Raised when mistral_common, or the tokenizer file inside it, is missing."""


def build_model(folder: Path, max_position_embeddings: int = 65_536) -> Path:
    """Write the model's configuration and tokenizer into `folder` (15 MB) and return it. Downloads nothing.

    vLLM reads it with `tokenizer_mode="mistral"`, `config_format="hf"` and `load_format="dummy"`.
    Raises NoTokenizer where mistral_common does not ship a Tekken file.
    """
    spec = find_spec("mistral_common")
    data = Path(spec.origin).parent / "data" if spec and spec.origin else None
    source = next((data / name for name in _TOKENIZERS if data and (data / name).is_file()), None)
    if source is None:
        raise NoTokenizer("mistral_common with a Tekken tokenizer is needed: pip install mistral_common")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shutil.copy(source, folder / "tekken.json")
    return folder
