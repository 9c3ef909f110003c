"""Root mean square norms on a CPU as one compiled call, where models write them as seven operators.

Only norms whose forward is Llama's to the letter, of which there are a hundred copies among models. A row's result
depends on that row alone, its sum has one order, and numbers are rounded where the formula rounds them.
"""

# Compiled code takes no names.
# ruff: noqa: PLR0917
from __future__ import annotations

from functools import partial
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from farfill.engine.torch.kernels import STORED, compiled, pool
from farfill.engine.torch.lanes import LANES, fma, load, multiply, rounded, store, times, total, zeros

# Numbers for which waking another thread pays.
_SPLIT_NUMBERS = 200_000


def compile_norms(net: nn.Module) -> int:
    """Have the norms in `net` that this can compute do so; how many there are."""
    found = [module for module in net.modules() if _is_llamas(module)]
    for norm in found:
        weight, eps = norm.weight.detach(), float(norm.variance_epsilon)  # type: ignore[union-attr]
        norm.forward = partial(_forward, type(norm).forward.__get__(norm), weight, eps)  # type: ignore[method-assign]
    if found:
        _prepare({norm.weight.dtype for norm in found})  # type: ignore[misc]
    return len(found)


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight` x / √(mean x² + eps) of each row of `x` [..., dim], contiguous, dim a multiple of `LANES`."""
    output = torch.empty_like(x)
    dim = weight.shape[0]
    rows = x.numel() // dim
    fixed = (
        STORED[x.dtype],
        x.element_size(),
        x.data_ptr(),
        weight.data_ptr(),
        dim,
        np.float32(eps),
        output.data_ptr(),
    )
    threads = min(torch.get_num_threads(), 1 + x.numel() // _SPLIT_NUMBERS)
    cuts = [rows * index // threads for index in range(threads + 1)]
    others = [pool(threads - 1).submit(_normalize, *fixed, cuts[i], cuts[i + 1]) for i in range(1, threads)]
    _normalize(*fixed, 0, cuts[1])
    for other in others:
        other.result()
    return output


def _forward(plain: Any, weight: torch.Tensor, eps: float, hidden_states: torch.Tensor) -> torch.Tensor:
    if hidden_states.dtype is not weight.dtype:
        return plain(hidden_states)
    # Copied if need be: rows of one token are contiguous where those of several are not, and get the same bits.
    return normalize(hidden_states.contiguous(), weight, eps)


def _prepare(dtypes: set[torch.dtype]) -> None:
    """Compile, or load from disk."""
    for dtype in dtypes:
        normalize(torch.ones((1, LANES), dtype=dtype), torch.ones(LANES, dtype=dtype), 1e-6)


def _is_llamas(module: Any) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    if code is None or _formula(code) != _formula(LlamaRMSNorm.forward.__code__):
        return False
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and weight.device.type == "cpu"
        and weight.dtype in STORED
        and weight.dim() == 1
        and weight.shape[0] % LANES == 0
        and not module._forward_hooks
    )


def _formula(code: CodeType) -> tuple[Any, ...]:
    """What a function does, apart from where it is written."""
    return code.co_code, code.co_names, code.co_varnames, code.co_consts


@compiled
def _normalize(
    like: Any, size: int, x: int, weight: int, dim: int, eps: Any, output: int, first: int, last: int
) -> None:
    """Rows [first, last)."""
    for row in range(first, last):
        at, to, squares = x + row * dim * size, output + row * dim * size, zeros()
        for i in range(0, dim, LANES):
            part = load(like, at + i * size)
            squares = fma(part, part, squares)
        share = np.float32(1) / np.sqrt(total(squares) / np.float32(dim) + eps)
        for i in range(0, dim, LANES):
            part = rounded(like, times(load(like, at + i * size), share))
            store(like, to + i * size, multiply(load(like, weight + i * size), part))
