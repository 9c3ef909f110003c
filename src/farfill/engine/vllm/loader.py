"""From a model folder to a running vLLM: start or find it, learn the shape of its cache, know its fingerprint."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from tokenizers import Tokenizer

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.config.secrets import resolve_secret
from farfill.core.errors import ConfigError, EngineError, FarfillError, InvalidRequestError
from farfill.core.layout import KVLayout
from farfill.engine.fingerprint import fingerprint
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import EngineInfo
from farfill.engine.vllm.api import Endpoint, VllmApi
from farfill.engine.vllm.attached import AttachedServer
from farfill.engine.vllm.engine import STALL_S, Traits, VllmEngine
from farfill.engine.vllm.files import KVFolder
from farfill.engine.vllm.kv_events import VllmBlocks
from farfill.engine.vllm.layout import identity_of, layout_of, ranks_of
from farfill.engine.vllm.media import placeholder_of, render
from farfill.engine.vllm.messages import Hello
from farfill.engine.vllm.server import VllmServer

START_TIMEOUT_S = 600.0
FIRST_REQUEST_S = 120.0
# vLLM 0.32 on CPU: the convolution of their linear attention takes a single token for a wrongly laid out tensor.
_NOT_ONE_TOKEN = ("Qwen3_5", "Qwen3Next")
_MIB = 1 << 20

log = structlog.get_logger(__name__)


def load_engine(
    model: ModelConfig,
    engine: EngineConfig,
    prefill: PrefillConfig,
    base_dir: Path,
    *,
    stopped: Callable[[], bool] = lambda: False,
    stall_s: float = STALL_S,
) -> VllmEngine:
    """Start vLLM on the model folder, or attach to one, and wait until it serves. `stall_s`: see `VllmEngine`.

    Raises ConfigError for a folder that is none, ModuleNotFoundError where vLLM is not installed, EngineError when it
    does not come up, CancelledWorkError when `stopped` says so meanwhile.
    """
    path = base_dir / model.path
    config = _read_config(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    images = placeholder_of(config, tokenizer)
    folder = KVFolder(engine.kv_cache_mb * _MIB)
    server: VllmServer | AttachedServer | None = None
    try:
        server = _server(model, engine, prefill, base_dir, folder)
        hellos = server.wait_ready(START_TIMEOUT_S, stopped)
        _check_same_model(hellos[0], path)
        layout = layout_of(hellos, prefill.chunked_prefill_tokens)
        takes_images = asyncio.run(_first_request(server.endpoint, images=images is not None))
    except BaseException:
        if server is not None:
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
        kv_total_bytes=sum(hello.kv_bytes for hello in hellos) if engine.attach else engine.kv_cache_mb * _MIB,
    )
    on_cpu = hellos[0].platform.startswith("cpu:")
    architectures = " ".join(config.get("architectures") or ())
    vocabulary = Vocabulary.of(tokenizer, _eos_ids(path, config), info.vocab_size)
    return VllmEngine(
        info,
        vocabulary,
        server,
        folder,
        max_queue=engine.max_queue,
        stall_s=stall_s,
        traits=Traits(
            ranks=ranks_of(hellos[0]),
            # vLLM 0.32 takes back random numbers of a step that ended inside a prompt; a CPU's generator cannot.
            seeds_in_one_step=on_cpu,
            first_tokens=2 if on_cpu and any(name in architectures for name in _NOT_ONE_TOKEN) else 1,
            prioritizes=hellos[0].prioritizes,
            grammars=hellos[0].grammar_backend == "guidance",
            tells_begun=hellos[0].tells_begun,
            processes=hellos[0].ranks,
            images=images if takes_images else None,
        ),
        blocks=_blocks(server, layout, hellos[0]),
    )


def _blocks(server: VllmServer | AttachedServer, layout: KVLayout, hello: Hello) -> VllmBlocks | None:
    """Where its events tell which chunks it holds: a server of ours, attention alone, and blocks that make up a chunk.

    Otherwise gateways go by their routing history.
    """
    sizes = {tensor.block_tokens for tensor in hello.tensors}
    fits = len(sizes) == 1 and 0 not in sizes and not layout.prefill_chunk_tokens % min(sizes)
    if not isinstance(server, VllmServer) or not layout.resumable or not fits:
        return None
    return VllmBlocks(layout.prefill_chunk_tokens) if importlib.util.find_spec("zmq") else None


def _server(
    model: ModelConfig, engine: EngineConfig, prefill: PrefillConfig, base_dir: Path, folder: KVFolder
) -> VllmServer | AttachedServer:
    if engine.attach is not None:
        endpoint = _endpoint(engine.attach, engine.attach_key, base_dir)
        return AttachedServer(endpoint, folder.path, chunk_tokens=prefill.chunked_prefill_tokens)
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    return VllmServer(
        base_dir / model.path,
        folder.path,
        [
            f"--served-model-name={model.name}",
            f"--dtype={model.dtype}",
            f"--kv-cache-memory-bytes={engine.kv_cache_mb * _MIB}",
            f"--max-num-seqs={engine.max_batch}",
            # No step computes more of a prompt, so that its KV leaves while the rest is computed.
            f"--max-num-batched-tokens={max(prefill.chunked_prefill_tokens, engine.max_batch)}",
            *engine.vllm_args,
        ],
        chunk_tokens=prefill.chunked_prefill_tokens,
    )


def _endpoint(url: str, key: str | None, base_dir: Path) -> Endpoint:
    api_key = "" if key is None else resolve_secret(key, base_dir, private=True).decode().strip()
    socket = Path(url.removeprefix("unix:")) if url.startswith("unix:") else None
    return Endpoint(url="http://vllm" if socket else url.rstrip("/"), socket=socket, api_key=api_key)


def _check_same_model(hello: Hello, path: Path) -> None:
    """The fingerprint is of the files in `path`: KV of other weights under it would give wrong tokens."""
    if not Path(hello.model).is_dir():
        raise ConfigError(f"vLLM serves {hello.model}, no folder on this host: start it with the folder of model.path")
    if Path(hello.model).resolve() != path.resolve():
        raise ConfigError(f"vLLM serves {Path(hello.model).resolve()}, model.path is {path.resolve()}")


async def _first_request(endpoint: Endpoint, *, images: bool) -> bool:
    """vLLM loads a few things, for seconds, with its first request; and one without our endpoint is found out now.

    `images`: the model takes some. Returns whether vLLM renders prompts for them.
    """
    api = VllmApi(endpoint)
    await api.open()
    try:
        await api.find_dialect()
        async with asyncio.timeout(FIRST_REQUEST_S):
            sampling = {"max_tokens": 2, "temperature": 0.0, "detokenize": False}
            await api.once({"token_ids": [0, 0], "sampling_params": sampling})
            return images and await _renders(api)
    except (FarfillError, TimeoutError) as error:
        raise EngineError(f"vLLM is up but did not answer a first request: {error or 'timeout'}") from error
    finally:
        await api.close()


async def _renders(api: VllmApi) -> bool:
    """Whether what prompts with images need is open; they are refused otherwise."""
    problem = "it was started without --enable-scale-out"
    if api.tokens_only:
        try:
            await render(api, "text", (), add_special_tokens=False)
            return True
        except InvalidRequestError as error:
            problem = str(error)
    log.warning("vllm_takes_no_images", detail=problem)
    return False


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
