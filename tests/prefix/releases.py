"""vLLM's own block hashing, to test against: of the installed release, and of unpacked ones that need not run here.

VLLM_SPEEDUPS_RELEASES names a folder that holds one folder a release, called by its version and holding `vllm/` as in
its wheel. Of those `v1/core/kv_cache_utils.py`, `v1/utils.py`, `utils/` and `multimodal/utils.py` are read.
Only the functions in question are run, in a module of their own.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import hashlib
import importlib
import os
import pickle
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, NewType, TypeVar
from unittest import mock

import cbor2
import xxhash

from vllm_speedups.patches.block_hashes import hash_function
from vllm_speedups.patching import Context, load
from vllm_speedups.patching.fingerprint import find_in_source, fingerprint

MODULE = "vllm.v1.core.kv_cache_utils"
CONTRACT = load(Path(__file__).parents[2] / "patches" / "block_hashes")
HASHES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


class Release:
    """One release: its module of block hashing, its hash functions, and which form of the contract it has."""

    def __init__(self, version: str, read, objects: dict, module: types.ModuleType):
        self.version = version
        self.module = module
        paths = {path for form in CONTRACT.forms for path in form.paths()}
        self.seen = {path: read(path) for path in sorted(paths)}
        self.form = CONTRACT.match(self.seen)
        self.stock = {path: objects[path] for path in self.form.paths()}
        offered = ((name, hash_function(self.stock, name)) for name in HASHES)
        self.hashes = {name: function for name, function in offered if function is not None}
        self.constant_list = self.stock["vllm.v1.utils:ConstantList"]
        self.factory = self.stock[f"{MODULE}:get_request_block_hasher"]

    @contextlib.contextmanager
    def patch(self, memo_mb: float = 64):
        """Our factory for this release, with its module in place while it is used. Raises what we would have logged."""
        from vllm_speedups import settings
        from vllm_speedups.patches import block_hashes

        def failed(error):
            raise AssertionError("the patch failed") from error

        context = Context(self.form.name, self.stock, failed)
        chosen = settings.Settings(prefix_memo_mb=memo_mb)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(sys.modules, {MODULE: self.module}))
            stack.enter_context(mock.patch.object(settings, "current", lambda: chosen))
            replacements = block_hashes.build(context)
            block_hashes.probe(context, replacements)
            yield replacements[f"{MODULE}:get_request_block_hasher"]

    def __repr__(self) -> str:
        return self.version


def installed():
    """The release that is installed, or None."""
    try:
        import vllm
    except ImportError:
        return None
    root = Path(vllm.__file__).parents[1]

    def live(path):
        module, name = path.split(":")
        with contextlib.suppress(ImportError):
            # Where hash functions are at home is another module in another release.
            return getattr(importlib.import_module(module), name, None)
        return None

    objects = {path: live(path) for form in CONTRACT.forms for path in form.paths()}
    return Release(vllm.__version__, _reader(root), objects, importlib.import_module(MODULE))


def unpacked() -> list:
    """The releases under VLLM_SPEEDUPS_RELEASES."""
    folder = os.environ.get("VLLM_SPEEDUPS_RELEASES")
    roots = [root for root in Path(folder).iterdir() if (root / "vllm").is_dir()] if folder else []
    return [_load(root) for root in sorted(roots, key=lambda root: [int(part) for part in root.name.split(".")])]


def _reader(root: Path):
    def read(path):
        module, name = path.split(":")
        base = root / module.replace(".", "/")
        file = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
        node = find_in_source(file.read_bytes(), name) if file.exists() else None
        return None if node is None else fingerprint(node)

    return read


def _load(root: Path) -> Release:
    names = {
        "ConstantList", "tensor_data", "get_mm_features_in_window", "hash_block_tokens", "get_request_block_hasher",
        "generate_block_hash_extra_keys", "generate_lookahead_block_hash_extra_keys", "_gen_lora_extra_hash_keys",
        "_gen_mm_extra_hash_keys", "_gen_prompt_embeds_extra_hash_keys", "init_none_hash", "resolve_none_hash_seed",
        "sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "_xxhash_digest",
        "DEFAULT_NONE_HASH_SEED", "_NON_CRYPTO_HASH_FUNCTIONS",
    }  # fmt: skip
    module = types.ModuleType(MODULE)
    vars(module).update(
        bisect=bisect, cbor2=cbor2, hashlib=hashlib, os=os, pickle=pickle, _xxhash=xxhash, logger=mock.Mock(),
        BlockHash=NewType("BlockHash", bytes), Generic=Generic, Sequence=Sequence, T=TypeVar("T"), overload=lambda f: f,
    )  # fmt: skip
    with contextlib.suppress(ImportError):
        import torch

        module.torch = torch
    for file in ("utils/__init__.py", "utils/hashing.py", "v1/utils.py", "multimodal/utils.py", "v1/core/kv_cache_utils.py"):
        path = root / "vllm" / file
        if not path.exists():
            continue
        tree = ast.parse(path.read_bytes())
        body = [node for node in tree.body if _name(node) in names]
        lazy = ast.parse("from __future__ import annotations").body
        exec(compile(ast.Module(lazy + body, []), str(path), "exec"), vars(module))
    objects = {path: getattr(module, path.split(":")[1], None) for form in CONTRACT.forms for path in form.paths()}
    return Release(root.name, _reader(root), objects, module)


def _name(node: ast.AST):
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", None)
