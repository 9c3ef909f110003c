"""From a model folder to an engine: weights, tokenizer, layout, fingerprint, and a check that it all works."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blake3
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.core.errors import ConfigError
from farfill.core.layout import KVLayout
from farfill.engine.local import EngineLimits, LocalEngine
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import EngineInfo
from farfill.engine.torch import attention
from farfill.engine.torch.executor import TorchExecutor
from farfill.engine.torch.host import set_threads
from farfill.engine.torch.kv import KVSpec
from farfill.engine.torch.layout import derive_layout
from farfill.engine.torch.linear import pack_linears
from farfill.engine.torch.selfcheck import ModelCheck

ENGINE_VERSION = "torch-1"

_REQUIRED = ("config.json", "tokenizer.json")
_IDENTITY_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Keys of config.json that say where a file came from, not what the model computes.
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that passed its check, ready for an engine. `info.kv_total_bytes` is the engine's to set."""

    info: EngineInfo
    executor: TorchExecutor
    vocabulary: Vocabulary


def load(model: ModelConfig, engine: EngineConfig, prefill: PrefillConfig, base_dir: Path) -> LocalEngine:
    """See `farfill.engine.torch.load_engine`."""
    if engine.prefix_cache_mb >= engine.kv_cache_mb:
        raise ConfigError(
            f"engine.prefix_cache_mb ({engine.prefix_cache_mb}) must be less than engine.kv_cache_mb "
            f"({engine.kv_cache_mb}), which it is a part of"
        )
    set_threads(engine.threads)
    loaded = load_model(base_dir / model.path, model, prefill.chunked_prefill_tokens, engine.device)
    prefix_bytes = engine.prefix_cache_mb * _MIB
    info = replace(loaded.info, kv_total_bytes=engine.kv_cache_mb * _MIB - prefix_bytes)
    limits = EngineLimits(max_batch=engine.max_batch, max_queue=engine.max_queue, prefix_cache_bytes=prefix_bytes)
    return LocalEngine(info, loaded.executor, loaded.vocabulary, limits)


def load_model(folder: Path, model: ModelConfig, prefill_chunk_tokens: int, device: str = "cpu") -> LoadedModel:
    """Weights, layout and tokenizer of `folder`, checked against a plain forward pass."""
    _require_files(folder)
    attention.register()
    net = _load_weights(folder, model.dtype, device)
    layout = derive_layout(net, prefill_chunk_tokens)
    executor = TorchExecutor(net, KVSpec(layout, net.device))
    config = net.config.get_text_config()
    vocab_size = net.get_output_embeddings().weight.shape[0]
    check = ModelCheck(net)
    pack_linears(net)
    check.run(executor)
    info = EngineInfo(
        engine="torch",
        model=model.name,
        fingerprint=fingerprint(folder, layout, model.dtype),
        layout=layout,
        max_context_tokens=config.max_position_embeddings,
        vocab_size=vocab_size,
        kv_total_bytes=0,
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return LoadedModel(info, executor, Vocabulary.of(tokenizer, _eos_ids(net), info.vocab_size))


def fingerprint(folder: Path, layout: KVLayout, dtype: str) -> str:
    """32 hex digits over everything that decides what a byte of KV means."""
    digest = blake3.blake3()
    digest.update(repr((ENGINE_VERSION, dtype, layout)).encode())
    config = json.loads((folder / "config.json").read_text())
    identity = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    digest.update(json.dumps(identity, sort_keys=True).encode())
    present = [folder / name for name in _IDENTITY_FILES if (folder / name).is_file()]
    for path in (*present, *sorted(folder.glob("*.safetensors"))):
        # Each file by name and digest, so that bytes cannot move from one to the next unnoticed.
        content = blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).digest()
        digest.update(path.name.encode() + b"\0" + content)
    return digest.hexdigest(length=16)


def _require_files(folder: Path) -> None:
    missing = [name for name in _REQUIRED if not (folder / name).is_file()]
    if missing or not any(folder.glob("*.safetensors")):
        missing = missing or ["*.safetensors"]
        raise ConfigError(
            f"model.path: {folder} has no {', '.join(missing)}; `farfill model fetch` makes such a folder"
        )


def _load_weights(folder: Path, dtype: str, device: str) -> Any:
    logging.disable_progress_bar()
    # A model folder is complete; asking the hub for what is missing would only hide that.
    net: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation=attention.IMPLEMENTATION,
        local_files_only=True,
        use_safetensors=True,
    )
    return net.to(torch.device(device)).eval()


def _eos_ids(net: Any) -> frozenset[int]:
    """The ids that end a text, of the generation config or else of the model's."""
    for config in (net.generation_config, net.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
