"""From a model folder to an engine: weights, tokenizer, layout, fingerprint, and a check that it all works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.config.paths import cache_dir
from farfill.core.errors import ConfigError
from farfill.engine.fingerprint import fingerprint
from farfill.engine.limits import EngineLimits
from farfill.engine.local import LocalEngine
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import EngineInfo
from farfill.engine.torch import attention
from farfill.engine.torch.executor import TorchExecutor
from farfill.engine.torch.host import set_threads, usable_cpus
from farfill.engine.torch.kv import KVSpec
from farfill.engine.torch.layout import ModelShape, derive_shape, require_known
from farfill.engine.torch.linear import pack_linears
from farfill.engine.torch.mamba1 import fix_continuation
from farfill.engine.torch.norms import compile_norms
from farfill.engine.torch.processor import TorchMedia, open_media
from farfill.engine.torch.selfcheck import CheckMemory, ModelCheck
from farfill.engine.torch.vision import FAMILIES, TextPart, VisionPart
from farfill.engine.torch.weights import load_weights, open_config, open_tokenizer

ENGINE_VERSION = "torch-3"

_REQUIRED = ("config.json", "tokenizer.json")
# A model without positions goes on for ever; something has to bound what one request may ask for.
_UNBOUNDED_TOKENS = 1 << 20
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to run a model: torch device, attention ("auto", "sdpa" or "eager"), CPUs to run on (none: any), and every
    how many prefill chunks windows and states are exported (0: only at the prompt's end)."""

    device: str = "cpu"
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    cpus: frozenset[int] = frozenset()
    checkpoint_every_chunks: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that passed its check, ready for an engine. `info.kv_total_bytes` is the engine's to set.

    `vision` is there for vision-language models, `media` as well when their processor can be used here.
    """

    info: EngineInfo
    executor: TorchExecutor
    vocabulary: Vocabulary
    vision: VisionPart | None = None
    media: TorchMedia | None = None


def load(
    model: ModelConfig,
    engine: EngineConfig,
    prefill: PrefillConfig,
    base_dir: Path,
    *,
    open_model: Callable[[Path, ModelConfig, int, LoadOptions], LoadedModel] | None = None,
    make_engine: Callable[..., LocalEngine] = LocalEngine,
) -> LocalEngine:
    """See `farfill.engine.torch.load_engine`; `open_model` replaces `load_model`."""
    if engine.prefix_cache_mb >= engine.kv_cache_mb:
        raise ConfigError(
            f"engine.prefix_cache_mb ({engine.prefix_cache_mb}) must be less than engine.kv_cache_mb "
            f"({engine.kv_cache_mb}), which it is a part of"
        )
    cpus = usable_cpus(engine.cpus)
    set_threads(engine.threads or len(cpus))
    options = LoadOptions(
        device=engine.device,
        attention=engine.attention,
        cpus=cpus,
        checkpoint_every_chunks=prefill.checkpoint_every_chunks,
    )
    loaded = (open_model or load_model)(base_dir / model.path, model, prefill.chunked_prefill_tokens, options)
    prefix_bytes = engine.prefix_cache_mb * _MIB
    info = replace(loaded.info, kv_total_bytes=engine.kv_cache_mb * _MIB - prefix_bytes)
    limits = EngineLimits(
        max_batch=engine.max_batch,
        max_queue=engine.max_queue,
        prefix_cache_bytes=prefix_bytes,
        step_token_budget=engine.step_token_budget,
        # Only where pages are given out when they are written is room for later tokens free.
        output_reserve_tokens=engine.output_reserve_tokens if engine.device == "cpu" else None,
        prefix_ttl_s=engine.prefix_ttl_s,
    )
    return make_engine(info, loaded.executor, loaded.vocabulary, limits, media=loaded.media)


def load_model(
    folder: Path, model: ModelConfig, prefill_chunk_tokens: int, options: LoadOptions | None = None
) -> LoadedModel:
    """Weights, layout and tokenizer of `folder`, checked against a plain forward pass."""
    options = options or LoadOptions()
    require_files(folder)
    _device(options.device)
    config = open_config(folder)
    require_known(config.get_text_config())
    attention.register()
    sees = config.model_type in FAMILIES
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    net = _load_weights(kind, folder, config.model_type, model.dtype, options)
    vision = VisionPart(net) if sees else None
    net = TextPart(net) if sees else net
    fix_continuation(net)
    shape = derive_shape(net, prefill_chunk_tokens)
    if not shape.layout.resumable:
        shape = replace(shape, layout=replace(shape.layout, checkpoint_every_chunks=options.checkpoint_every_chunks))
    spec = KVSpec(shape.layout, net.device, num_layers=shape.num_layers, chunked=shape.chunked)
    executor = TorchExecutor(net, spec)
    vocab_size = net.get_output_embeddings().weight.shape[0]
    mark = fingerprint(folder, ENGINE_VERSION, model.dtype, shape.layout)
    _check(net, executor, shape, CheckMemory(cache_dir() / "model-checks", mark, (options.device, options.attention)))
    executor.pin(options.cpus)
    if vision is not None:
        vision.on_progress = executor.progress
    info = EngineInfo(
        engine="torch",
        model=model.name,
        fingerprint=mark,
        layout=shape.layout,
        max_context_tokens=getattr(net.config.get_text_config(), "max_position_embeddings", _UNBOUNDED_TOKENS),
        vocab_size=vocab_size,
        kv_total_bytes=0,
    )
    vocabulary = Vocabulary.of(open_tokenizer(folder), eos_ids(net), info.vocab_size)
    media = None if vision is None else open_media(folder, config.model_type, vision)
    return LoadedModel(info, executor, vocabulary, vision, media)


def _check(net: Any, executor: TorchExecutor, shape: ModelShape, memory: CheckMemory) -> None:
    """Pack the linear layers, and find out what the result can do or recall it."""
    found = memory.recall()
    check = ModelCheck(net) if found is None else None
    pack_linears(net, shape.called)
    compile_norms(net)
    if check is not None:
        memory.remember(check.run(executor))
    elif found is not None:
        executor.capabilities = found


def require_files(folder: Path) -> None:
    missing = [name for name in _REQUIRED if not (folder / name).is_file()]
    if missing or not any(folder.glob("*.safetensors")):
        missing = missing or ["*.safetensors"]
        raise ConfigError(
            f"model.path: {folder} has no {', '.join(missing)}; `farfill model fetch` makes such a folder"
        )


def _load_weights(kind: Any, folder: Path, model_type: str, dtype: str, options: LoadOptions) -> Any:
    net = load_weights(kind, folder, model_type, dtype=getattr(torch, dtype), attn_implementation=attention.SDPA)
    attention.choose(net, options.attention)
    return net.to(_device(options.device)).eval()


def _device(name: str) -> torch.device:
    device = torch.device(name)
    backends = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device.type in backends and not backends[device.type]():
        raise ConfigError(f"engine.device: {name}, but torch finds no such device here; use cpu")
    return device


def eos_ids(net: Any) -> frozenset[int]:
    """The ids that end a text, of the generation config or else of the model's."""
    for config in (net.generation_config, net.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
