"""From a model folder to a running vLLM: start it, learn the shape of its cache, know its fingerprint."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.core.errors import ConfigError, EngineError, FarfillError
from farfill.engine.fingerprint import fingerprint
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import EngineInfo
from farfill.engine.vllm.api import VllmApi
from farfill.engine.vllm.engine import STALL_S, VllmEngine
from farfill.engine.vllm.files import KVFolder
from farfill.engine.vllm.layout import identity_of, layout_of
from farfill.engine.vllm.server import VllmServer

START_TIMEOUT_S = 600.0
FIRST_REQUEST_S = 120.0
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
    folder = KVFolder(engine.kv_cache_mb * _MIB)
    server = VllmServer(
        path,
        folder.path,
        [
            f"--dtype={model.dtype}",
            f"--kv-cache-memory-bytes={engine.kv_cache_mb * _MIB}",
            f"--max-num-seqs={engine.max_batch}",
            # No step computes more of a prompt, so that its KV leaves while the rest is computed.
            f"--max-num-batched-tokens={max(prefill.chunked_prefill_tokens, engine.max_batch)}",
            *engine.vllm_args,
        ],
        chunk_tokens=prefill.chunked_prefill_tokens,
    )
    try:
        hellos = server.wait_ready(START_TIMEOUT_S, stopped)
        layout = layout_of(hellos, prefill.chunked_prefill_tokens)
        asyncio.run(_first_request(server.socket))
    except BaseException:
        server.stop()
        folder.close()
        raise
    info = EngineInfo(
        engine="vllm",
        model=model.name,
        fingerprint=fingerprint(path, identity_of(hellos[0]), layout),
        layout=layout,
        max_context_tokens=hellos[0].max_model_len,
        vocab_size=int(config["vocab_size"]),
        kv_total_bytes=engine.kv_cache_mb * _MIB,
    )
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    vocabulary = Vocabulary.of(tokenizer, _eos_ids(path, config), info.vocab_size)
    return VllmEngine(
        info,
        vocabulary,
        server,
        folder,
        max_queue=engine.max_queue,
        stall_s=stall_s,
        # vLLM 0.32 takes back random numbers of a step that ended inside a prompt; a CPU's generator cannot.
        seeds_in_one_step=hellos[0].platform.startswith("cpu:"),
    )


async def _first_request(socket: Path) -> None:
    """vLLM loads a few things, for seconds, with its first request; and one without our endpoint is found out now."""
    api = VllmApi(socket)
    await api.open()
    try:
        async with asyncio.timeout(FIRST_REQUEST_S):
            sampling = {"max_tokens": 2, "temperature": 0.0, "detokenize": False}
            await api.once({"token_ids": [0, 0], "sampling_params": sampling})
    except (FarfillError, TimeoutError) as error:
        raise EngineError(f"vLLM is up but did not answer a first request: {error or 'timeout'}") from error
    finally:
        await api.close()


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {folder}/config.json cannot be read: {error}") from error
    text = config.get("text_config", config)
    if "vocab_size" not in text:
        raise ConfigError(f"model.path: {folder}/config.json has no vocab_size")
    return {**text, **config}


def _eos_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
