"""Profiles out of NVIDIA aiconfigurator's database of measured operators: an optional extra.

The database is inside the package `aiconfigurator-core`: nothing is fetched, so only models it ships a config of work.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
from collections.abc import Sequence
from typing import Any

from farfill.core.errors import ConfigError
from farfill.planner.profile_file import DecodeFigure, PrefillFigure, ProfileFile

PACKAGE = "aiconfigurator-core"
BACKENDS = ("vllm", "sglang", "trtllm")
_SYSTEMS = {
    "A100-80G": "a100_sxm",
    "L4": "l4",
    "L40S": "l40s",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "GB200": "gb200",
}
_MS = 1000.0


def import_profile(
    name: str,
    model: str,
    accelerator: str,
    gpus: int,
    *,
    backend: str,
    lengths: Sequence[int],
    batches: Sequence[int],
) -> ProfileFile:
    """Prefill at `lengths`, decode at `batches` × `lengths`, of `model` (a hub id) over `gpus` with tensor and expert
    parallelism. Raises ConfigError when the package, the model, the accelerator or their combination is not there."""
    system = next((s for known, s in _SYSTEMS.items() if known.lower() == accelerator.lower()), None)
    if system is None:
        raise ConfigError(
            f"--accelerator: {accelerator or 'none'} is not in aiconfigurator; known: {', '.join(_SYSTEMS)}"
        )
    if backend not in BACKENDS:
        raise ConfigError(f"--backend is one of {', '.join(BACKENDS)}, not {backend!r}")
    engine, version = _engine(model, system, gpus, backend)
    source = f"aiconfigurator-core {version}, {system}/{backend}: composed of measured operators, not measured whole"
    try:
        prefill = [
            PrefillFigure(tokens=tokens, seconds=float(engine.predict_prefill_latency(1, tokens)) / _MS)
            for tokens in lengths
        ]
        decode = [
            DecodeFigure(
                batch=batch,
                context_tokens=tokens,
                step_s=float(engine.predict_decode_latency(batch, tokens, 2)) / _MS,
            )
            for batch in batches
            for tokens in lengths
        ]
    except Exception as error:
        raise ConfigError(f"aiconfigurator has no figures of {model} on {gpus} × {accelerator}: {error}") from error
    return ProfileFile(
        name=name,
        accelerator=accelerator,
        gpus_per_instance=gpus,
        source=source,
        prefill=prefill,
        decode=decode,
        max_batch=max(batches),
    )


def _engine(model: str, system: str, gpus: int, backend: str) -> tuple[Any, str]:
    try:
        module: Any = importlib.import_module("aiconfigurator_core.sdk.engine")
        version = importlib.metadata.version(PACKAGE)
    except ImportError as error:
        raise ConfigError(
            f"--aiconfigurator needs its database: pip install 'farfill[aiconfigurator]' ({error})"
        ) from error
    # It prints and logs of its own accord; what matters comes as an error.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return module.EngineHandle.compile(model, system, backend, tp_size=gpus, moe_ep_size=gpus), version
    except Exception as error:
        raise ConfigError(
            f"aiconfigurator cannot model {model} on {gpus} × {system} with {backend}: {error};"
            " measure it, or estimate it with --estimate"
        ) from error
