"""Attention for many sequences at once without padding, masks or copies.

A ragged step (see `step`) runs the model's linear layers on all sequences together ([B, 1] tokens); only attention
is done for each sequence by itself, over its own KV buffer: on a CPU in one compiled call (see `kernels`). Prefill of
one sequence is compiled where that gains (see `tiles`). Everything else takes the attention of transformers that the
model would use by itself: `sdpa`, or the model's own explicit formula where sdpa cannot do what it needs (sinks,
soft-capping).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from farfill.core.errors import ConfigError, ModelUnsupportedError
from farfill.engine.torch import kernels, tiles
from farfill.engine.torch.step import RaggedRows

# Names known to transformers: over its sdpa, or over the model's own formula ("eager" there).
SDPA, EXPLICIT = "farfill", "farfill_explicit"

# What models pass besides the tensors and may not change the result of a ragged step; anything else is refused.
_HARMLESS = frozenset(
    {
        "cache",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_router_logits",
        "position_ids",
        "sliding_window",
        "use_cache",
    }
)

# What a mask of ours tells of itself: the keys each query looks at (see `_measure_window`).
_WINDOW = "farfill_window"

# Tokens of each sequence in the ragged step this thread is in, the new one included.
_ragged_tokens: ContextVar[Sequence[int] | None] = ContextVar("ragged_tokens", default=None)


@contextmanager
def ragged_step(tokens: Sequence[int]) -> Iterator[None]:
    """Within, attention is ragged; `tokens` counts each sequence's, the new one included."""
    token = _ragged_tokens.set(tokens)
    try:
        yield
    finally:
        _ragged_tokens.reset(token)


def register() -> None:
    """Make `attn_implementation=SDPA` and `=EXPLICIT` known to transformers. Idempotent."""
    AttentionInterface.register(SDPA, _attention_over_sdpa)
    AttentionInterface.register(EXPLICIT, _attention_over_explicit)
    AttentionMaskInterface.register(SDPA, _mask_over_sdpa)
    AttentionMaskInterface.register(EXPLICIT, _mask_over_explicit)


def choose(net: Any, wanted: str) -> None:
    """Have a model that was loaded with `SDPA` attend as `wanted` ("auto", "sdpa" or "eager").

    Raises ConfigError when it cannot use sdpa and must.
    """
    explicit = not net._supports_sdpa or getattr(net.config.get_text_config(), "attn_logit_softcapping", None)
    if explicit and wanted == "sdpa":
        raise ConfigError(f"engine.attention: {type(net).__name__} cannot use sdpa; leave it at auto")
    if explicit or wanted == "eager":
        net.set_attn_implementation(EXPLICIT)


def _attention_over_sdpa(
    module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, Any]:
    """`query` [B, heads, q, dim] over each sequence's KV; [B, q, heads, dim]."""
    if _ragged_tokens.get() is None:
        window = _window_of(module, query, key, attention_mask, kwargs)
        scale = kwargs.get("scaling") or query.shape[3] ** -0.5
        if window and scale > 0 and tiles.supports(query, key, value):
            return tiles.attend(query, key, value, scale=scale, window=window), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return _ragged_attention(module, query, key, value, **kwargs), None


def _attention_over_explicit(
    module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, Any]:
    if _ragged_tokens.get() is None:
        formula = sys.modules[type(module).__module__].eager_attention_forward  # pyright: ignore[reportAttributeAccessIssue]
        return formula(module, query, key, value, attention_mask, **kwargs)
    return _ragged_attention(module, query, key, value, **kwargs), None


def _mask_over_sdpa(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask in a ragged step, whose tokens may look at everything they are given."""
    if _ragged_tokens.get() is not None:
        return None
    mask = sdpa_mask(*args, **kwargs)
    if mask is not None and tiles.available():
        setattr(mask, _WINDOW, _measure_window(mask))
    return mask


def _mask_over_explicit(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _ragged_tokens.get() is not None else eager_mask(*args, **kwargs)


def _measure_window(mask: torch.Tensor) -> int:
    """The keys that each query of `mask` [1, 1, queries, keys] looks at, up to its own; 0 when it is not like that."""
    if mask.dtype is not torch.bool or mask.shape[:2] != (1, 1):
        return 0
    queries, keys = mask.shape[2:]
    window = int(mask[0, 0, -1].sum())
    own = torch.arange(keys - queries, keys, device=mask.device).unsqueeze(1)
    behind = own - torch.arange(keys, device=mask.device)
    return window if torch.equal(mask[0, 0], (behind >= 0) & (behind < window)) else 0


def _window_of(module: torch.nn.Module, query: torch.Tensor, key: Any, mask: Any, options: dict[str, Any]) -> int:
    """The keys that each query looks at, up to its own; 0 when that is not all there is to this attention."""
    if any(given is not None for name, given in options.items() if name not in _HARMLESS | {"scaling"}):
        return 0
    if options.get("dropout") or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        return 0
    if mask is not None:
        return getattr(mask, _WINDOW, 0) if mask.shape[2:] == (query.shape[2], key.shape[2]) else 0
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return key.shape[2] if is_causal and query.shape[2] == key.shape[2] else 0


def _ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    if unknown:
        raise ModelUnsupportedError(f"{type(module).__name__} needs attention with {', '.join(unknown)}")
    batch, heads, _, dim = query.shape
    by_formula = softcap is not None or s_aux is not None
    scale = dim**-0.5 if scaling is None else scaling
    ragged = isinstance(key, RaggedRows) and isinstance(value, RaggedRows)
    kv_heads = key.shape[0] if ragged else key.shape[1]
    # One query token: the heads that share a KV head become its query rows, so KV is never repeated.
    packed = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    if ragged and key.readable and query.dtype is key.dtype and not by_formula:
        output = kernels.attend(
            packed,
            key.addresses,
            value.addresses,
            key.counts,
            row_bytes=(key.row_bytes, value.row_bytes),
            value_dim=value.shape[1],
            scale=scale,
        )
        return output.view(batch, 1, heads, -1)
    keys, values = _split(key), _split(value)
    if not by_formula:
        outputs = [
            scaled_dot_product_attention(packed.narrow(0, row, 1), keys[row], values[row], scale=scale)
            for row in range(batch)
        ]
    else:
        formula = _Explicit(scale, softcap, s_aux)
        outputs = [formula(packed.narrow(0, row, 1), keys[row], values[row]) for row in range(batch)]
    output = torch.cat(outputs) if batch > 1 else outputs[0]
    return output.reshape(batch, 1, heads, output.shape[-1])


def _split(rows: Any) -> Sequence[torch.Tensor]:
    """One tensor a sequence, without the empty rows of a padded one."""
    if isinstance(rows, RaggedRows):
        return rows.tensors()
    tokens = _ragged_tokens.get()
    assert tokens is not None
    return [rows[row : row + 1, :, :count] for row, count in enumerate(tokens)]


@dataclass(frozen=True, slots=True)
class _Explicit:
    """Attention by its formula, for what sdpa cannot do: soft-capped scores, and sinks.

    A head's sink takes its share of the softmax and gives nothing (gpt-oss).
    """

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`query` [1, kv heads, group, dim] over [1, kv heads, tokens, dim]."""
        scores = torch.matmul(query, key.transpose(2, 3)) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.sinks is None:
            weights = torch.softmax(scores.float(), dim=-1)
        else:
            # Laid out as the query is: KV head by KV head, then the heads that share it.
            sink = self.sinks.reshape(1, query.shape[1], query.shape[2], 1).to(scores.dtype)
            weights = torch.softmax(torch.cat([scores, sink], dim=-1).float(), dim=-1)[..., :-1]
        return torch.matmul(weights.to(value.dtype), value)
