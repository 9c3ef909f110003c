"""Estimates a profile from what a model computes and what accelerators can do, when nothing was measured.

Williams, Waterman, Patterson, "Roofline", CACM 2009: time is work over the rate of whatever is scarcer. A share of the
peak is assumed for both rates; measured profiles are better, and the source of every estimate says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from farfill.core.errors import ConfigError
from farfill.core.layout import DTYPE_BYTES, TensorKind
from farfill.planner.accelerators import Accelerator
from farfill.planner.curves import QuadraticCurve
from farfill.planner.geometry import Geometry
from farfill.planner.kv_size import fixed_bytes, kv_bytes
from farfill.planner.model_config import Fields, Json
from farfill.planner.parameters import Parameters, count_parameters
from farfill.planner.profile import DecodePoint, Profile

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXTS = (1024, 8192, 32768, 131072)
_STEP_OVERHEAD_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peak that are reached, the bytes of one weight, and the context that must fit."""

    compute: float = 0.45
    memory: float = 0.7
    weight_bytes: float = 2.0
    usable_memory: float = 0.9
    context_tokens: int = 8192


def estimate_profile(
    config: Json,
    geometry: Geometry,
    accelerator: Accelerator,
    gpus: int,
    *,
    efficiency: Efficiency | None = None,
    parameters: Parameters | None = None,
) -> Profile:
    """Of an instance of `gpus` such accelerators. Raises ConfigError when the model does not fit."""
    e = efficiency or Efficiency()
    p = parameters or count_parameters(config, geometry)
    compute = gpus * accelerator.flops * e.compute
    memory = gpus * accelerator.bandwidth * e.memory
    weights = p.total * e.weight_bytes
    free = gpus * accelerator.memory_bytes * e.usable_memory - weights
    each = kv_bytes(geometry.layout, e.context_tokens)
    if free < each:
        raise ConfigError(
            f"{gpus} × {accelerator.name} hold {gpus * accelerator.memory_bytes / 1e9:.0f} GB, but the weights take"
            f" {weights / 1e9:.0f} GB and one sequence of {e.context_tokens} tokens {each / 1e9:.2f} GB;"
            " use more accelerators for one instance, or smaller weights"
        )
    linear, square = _attention_flops(config, geometry)
    prefill = QuadraticCurve(
        fixed_s=weights / memory + _STEP_OVERHEAD_S,
        per_token_s=(2 * p.active + linear) / compute,
        per_token_squared_s=square / compute,
    )
    steps = [
        DecodePoint(
            batch=batch, context_tokens=context, step_s=_step_s(geometry, p, e, memory, batch=batch, context=context)
        )
        for batch in _BATCHES
        for context in _CONTEXTS
    ]
    return Profile(
        name=f"{accelerator.name.lower()}-x{gpus}-roofline",
        accelerator=accelerator.name,
        gpus_per_instance=gpus,
        prefill=prefill,
        decode=tuple(steps),
        max_batch=max(1, int(free // each)),
        sources=(
            f"roofline estimate, not measured: {p.active / 1e9:.1f}B of {p.total / 1e9:.1f}B parameters used per token,"
            f" {e.compute:.0%} of {accelerator.flops / 1e12:.0f} TFLOP/s and {e.memory:.0%} of"
            f" {accelerator.bandwidth / 1e12:.2f} TB/s of each of {gpus} {accelerator.name}"
            f" ({accelerator.source})",
        ),
    )


def _attention_flops(config: Json, geometry: Geometry) -> tuple[float, float]:
    """(per token, per token squared): scores and weighted sums, causal, so half of the square."""
    heads = Fields(config).int("num_attention_heads", "n_head", "num_heads", default=1)
    linear = square = 0.0
    for tensor in geometry.layout.tensors:
        if tensor.name not in ("k", "v"):
            if tensor.kind is TensorKind.RECURRENT:
                size = tensor.row_bytes / DTYPE_BYTES[tensor.dtype]
                linear += 4 * size  # decay and update, then read
            continue
        width = tensor.row_shape[-1]
        if tensor.kind is TensorKind.WINDOW:
            linear += 2 * heads * width * tensor.window_tokens
        else:
            square += heads * width
    return linear, square


def _step_s(g: Geometry, p: Parameters, e: Efficiency, memory: float, *, batch: int, context: int) -> float:
    """Weights that the batch touches, and every sequence's cache, read once."""
    routed = (p.total - p.active) / max(1e-9, 1 - p.chosen / p.experts) if p.experts > 1 else 0.0
    resident = p.total - routed
    touched = resident + routed * (1 - (1 - p.chosen / p.experts) ** batch) if p.experts > 1 else p.total
    cache = g.layout.bytes_per_token * context + fixed_bytes(g.layout)
    return (touched * e.weight_bytes + batch * cache) / memory + _STEP_OVERHEAD_S
