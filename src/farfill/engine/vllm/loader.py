"""From a model folder to a running vLLM: start it, learn the shape of its cache, know its fingerprint."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.core.errors import ConfigError, EngineError
from farfill.engine.fingerprint import fingerprint
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import EngineInfo
from farfill.engine.vllm.engine import STALL_S, VllmEngine
from farfill.engine.vllm.files import KVFolder
from farfill.engine.vllm.layout import identity_of, layout_of
from farfill.engine.vllm.server import VllmServer

START_TIMEOUT_S = 600.0
_MIB = 1 << 20


def load_engine(
    model: ModelConfig,
    engine: EngineConfig,
    prefill: PrefillConfig,
    base_dir: Path,
    *,
    stopped: Callable[[], bool] = lambda: False,
    stall_s: float = STALL_S,
) -> VllmEngine:
    """Start vLLM on the model folder and wait until it serves. `stall_s`: see `VllmEngine`.

    Raises ConfigError for a folder that is none, ModuleNotFoundError where vLLM is not installed, EngineError when it
    does not come up, CancelledWorkError when `stopped` says so meanwhile.
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
        hellos = server.wait_ready(START_TIMEOUT_S, stopped)
        layout = layout_of(hellos, prefill.chunked_prefill_tokens)
    except BaseException:
        server.stop()
        folder.close()
        raise
    info = EngineInfo(
        engine="vllm",
        model=model.name,
        fingerprint=fingerprint(path, identity_of(hellos[0]), layout),
        layout=layout,
        max_context_tokens=context,
        vocab_size=int(config["vocab_size"]),
        kv_total_bytes=engine.kv_cache_mb * _MIB,
    )
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    vocabulary = Vocabulary.of(tokenizer, _eos_ids(path, config), info.vocab_size)
    return VllmEngine(info, vocabulary, server, folder, max_queue=engine.max_queue, stall_s=stall_s)


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
