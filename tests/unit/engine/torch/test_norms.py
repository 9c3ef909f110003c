"""Compiled norms: the formula's numbers, and the same bits for a row alone, among others and over any threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from farfill.engine.torch import norms

DTYPES = [torch.bfloat16, torch.float32]


def norm_of(dim: int, dtype: torch.dtype) -> nn.Module:
    norm = Qwen3RMSNorm(dim).to(dtype)
    norm.weight.data = torch.randn(dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    return norm.requires_grad_(False)


def rows_of(count: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn((count, 1, dim), generator=torch.Generator().manual_seed(count)) * 5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 64, 576])
def test_a_norm_is_that_of_the_formula(dim: int, dtype: torch.dtype) -> None:
    norm, x = norm_of(dim, dtype), rows_of(40, dim, dtype)
    x[3] = 0
    expected = norm(x)
    assert norms.compile_norms(nn.Sequential(norm)) == 1
    # float32 sums in another order; of bfloat16 hardly a number differs, by one unit of the last place.
    tolerance = 2**-7 if dtype is torch.bfloat16 else 2e-6
    torch.testing.assert_close(norm(x), expected, rtol=tolerance, atol=1e-6)
    assert (norm(x) != expected).float().mean() < (0.01 if dtype is torch.bfloat16 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_get_the_same_bits_alone_strided_and_over_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, x = norm_of(64, dtype), rows_of(33, 64, dtype)
    norms.compile_norms(norm)
    together = norm(x)
    assert torch.equal(together, torch.cat([norm(row) for row in x.split(1)]))
    assert torch.equal(together, norm(torch.cat([x, x], dim=-1)[..., :64]))
    before = torch.get_num_threads()
    monkeypatch.setattr(norms, "_SPLIT_NUMBERS", 1)
    try:
        torch.set_num_threads(3)
        assert torch.equal(together, norm(x))
    finally:
        torch.set_num_threads(before)


def test_other_formulas_and_sizes_are_left_alone() -> None:
    others = nn.Sequential(Gemma3RMSNorm(64), nn.LayerNorm(64), LlamaRMSNorm(24), LlamaRMSNorm(64).half())
    assert norms.compile_norms(others) == 0
    norm = norm_of(64, torch.bfloat16)
    x = rows_of(3, 64, torch.float32)
    expected = norm(x)
    assert norms.compile_norms(norm) == 1
    assert torch.equal(norm(x), expected)
