"""From a model folder to a running vLLM: start it, learn the shape of its cache, know its fingerprint."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import blake3
from tokenizers import Tokenizer

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.core.errors import ConfigError, EngineError
from farfill.core.layout import KVLayout
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import EngineInfo
from farfill.engine.vllm.engine import VllmEngine
from farfill.engine.vllm.files import KVFolder
from farfill.engine.vllm.layout import identity_of, layout_of
from farfill.engine.vllm.messages import Hello
from farfill.engine.vllm.server import VllmServer

START_TIMEOUT_S = 600.0
_MIB = 1 << 20
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def load_engine(model: ModelConfig, engine: EngineConfig, prefill: PrefillConfig, base_dir: Path) -> VllmEngine:
    """Start vLLM on the model folder and wait until it serves.

    Raises ConfigError for a folder that is none or where vLLM is not installed, EngineError when it does not come up.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    path = base_dir / model.path
    config = _read_config(path)
    context = int(config["max_position_embeddings"])
    folder = KVFolder(engine.kv_cache_mb * _MIB)
    server = VllmServer(
        path,
        folder.path,
        [
            f"--dtype={model.dtype}",
            f"--max-model-len={context}",
            f"--kv-cache-memory-bytes={engine.kv_cache_mb * _MIB}",
            f"--max-num-seqs={engine.max_batch}",
            *engine.vllm_args,
        ],
        chunk_tokens=prefill.chunked_prefill_tokens,
    )
    try:
        hellos = server.wait_ready(START_TIMEOUT_S)
        layout = layout_of(hellos, prefill.chunked_prefill_tokens)
    except BaseException:
        server.stop()
        folder.close()
        raise
    info = EngineInfo(
        engine="vllm",
        model=model.name,
        fingerprint=fingerprint(path, layout, hellos[0]),
        layout=layout,
        max_context_tokens=context,
        vocab_size=int(config["vocab_size"]),
        kv_total_bytes=engine.kv_cache_mb * _MIB,
    )
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    vocabulary = Vocabulary.of(tokenizer, _eos_ids(path, config), info.vocab_size)
    return VllmEngine(info, vocabulary, server, folder, max_queue=engine.max_queue)


def fingerprint(folder: Path, layout: KVLayout, hello: Hello) -> str:
    """32 hex digits over everything that decides what a block of vLLM's cache means."""
    digest = blake3.blake3(repr((identity_of(hello), layout)).encode())
    config = {key: value for key, value in _read_config(folder).items() if key not in _NOT_IDENTITY}
    digest.update(json.dumps(config, sort_keys=True).encode())
    present = [folder / name for name in _FILES if (folder / name).is_file()]
    for path in (*present, *sorted(folder.glob("*.safetensors"))):
        content = blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).digest()
        digest.update(path.name.encode() + b"\0" + content)
    return digest.hexdigest(length=16)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {folder}/config.json cannot be read: {error}") from error
    text = config.get("text_config", config)
    for key in ("max_position_embeddings", "vocab_size"):
        if key not in text:
            raise EngineError(f"{folder}/config.json has no {key}")
    return {**text, **config}


def _eos_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
