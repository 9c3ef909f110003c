"""Compiled prefill attention: as near to the formula as torch's, and the same bits however tokens are computed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from farfill.engine.torch import attention, tiles

pytestmark = pytest.mark.skipif(not tiles.available(), reason="needs a processor with AVX512-BF16 and no AMX")

# KV heads, heads of each, dim, value dim.
SHAPES = [(3, 3, 64, 64), (1, 4, 256, 256), (2, 2, 192, 128), (2, 1, 80, 64)]


def tensors(
    shape: tuple[int, int, int, int], queries: int, keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value, rows of heads side by side as in caches."""
    generator = torch.Generator().manual_seed(queries + keys)
    heads, group, dim, value_dim = shape
    sizes = ((queries, heads * group, dim), (keys, heads, dim), (keys, heads, value_dim))
    query, key, value = (torch.randn((1, *size), generator=generator).bfloat16().transpose(1, 2) for size in sizes)
    return query * 3, key, value


def formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, dtype: torch.dtype
) -> torch.Tensor:
    """By torch in `dtype`, as [1, queries, heads, dim]."""
    group = query.shape[1] // key.shape[1]
    behind = torch.arange(key.shape[2] - query.shape[2], key.shape[2]).unsqueeze(1) - torch.arange(key.shape[2])
    mask = (behind >= 0) & (behind < window)
    key, value = (one.to(dtype).repeat_interleave(group, 1) for one in (key, value))
    return scaled_dot_product_attention(query.to(dtype), key, value, attn_mask=mask, scale=0.1).transpose(1, 2).double()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("queries", "keys", "window"),
    [(12, 12, 12), (49, 49, 49), (300, 333, 333), (64, 700, 90), (333, 640, 1), (13, 600, 300)],
)
def test_attention_is_as_near_to_the_formula_as_that_of_torch(
    shape: tuple[int, int, int, int], queries: int, keys: int, window: int
) -> None:
    given = tensors(shape, queries, keys)
    assert tiles.supports(*given)
    found = tiles.attend(*given, scale=0.1, window=window).double()
    expected = formula(*given, window, torch.float64)
    error, error_of_torch = (
        (one - expected).square().mean().sqrt() for one in (found, formula(*given, window, torch.bfloat16))
    )
    assert error <= 1.2 * error_of_torch + 1e-9


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_tokens_get_the_same_bits_in_chunks_of_any_length_over_any_threads(
    shape: tuple[int, int, int, int], threads: int
) -> None:
    query, key, value = tensors(shape, 700, 700)
    whole = tiles.attend(query, key, value, scale=0.1, window=700)
    start = 0
    for end in (12, 61, 317, 512, 700):
        seen = query[:, :, start:end], key[:, :, :end], value[:, :, :end]
        assert torch.equal(whole[:, start:end], tiles.attend(*seen, scale=0.1, window=700))
        start = end
    window = tiles.attend(query, key, value, scale=0.1, window=100)
    later = tiles.attend(query[:, :, 512:], key, value, scale=0.1, window=100)
    assert torch.equal(window[:, 512:], later)
    torch.set_num_threads(1 if threads > 1 else 2)
    assert torch.equal(whole, tiles.attend(query, key, value, scale=0.1, window=700))


def test_heads_get_the_same_bits_alone() -> None:
    query, key, value = tensors((2, 3, 64, 64), 100, 300)
    whole = tiles.attend(query, key, value, scale=0.1, window=300)
    for head in range(6):
        own = slice(head // 3, head // 3 + 1)
        alone = tiles.attend(query[:, head : head + 1], key[:, own], value[:, own], scale=0.1, window=300)
        assert torch.equal(whole[:, :, head : head + 1], alone)


def test_far_scores_weigh_nothing_and_what_is_no_number_reaches_those_who_see_it() -> None:
    query, key, value = tensors((1, 1, 64, 64), 40, 40)
    key[:, :, 5], query[:] = 40.0, 1.0
    found = tiles.attend(query, key, value, scale=1.0, window=40)
    assert torch.equal(found[0, 5:, 0], value[0, 0, 5:6].expand(35, 64))
    query[:, :, 20] = float("nan")
    found = tiles.attend(query, key, value, scale=1.0, window=40)
    assert found[0, 20].isnan().all()
    assert found.isnan().sum() == 64


def test_shapes_and_types_that_it_is_not_made_for_are_left_to_torch() -> None:
    query, key, value = tensors((1, 1, 64, 64), 40, 40)
    assert tiles.supports(query, key, value)
    assert not tiles.supports(query.float(), key.float(), value.float())
    assert not tiles.supports(query[:, :, :8], key, value)
    assert not tiles.supports(query, key, value[..., :24])
    assert not tiles.supports(query.expand(2, 1, 40, 64), key, value)


def test_a_mask_tells_its_window_only_if_that_is_all_it_says() -> None:
    behind = torch.arange(30, 50).unsqueeze(1) - torch.arange(50)
    causal, window = behind >= 0, (behind >= 0) & (behind < 8)
    assert attention._measure_window(causal[None, None]) == 50
    assert attention._measure_window(window[None, None]) == 8
    chunked = causal & (torch.arange(30, 50).unsqueeze(1) // 16 == torch.arange(50) // 16)
    image = window.clone()
    image[3, 36] = True
    padded = causal.clone()
    padded[:, 2] = False
    for other in (chunked, image, padded, torch.ones_like(causal)):
        assert attention._measure_window(other[None, None]) == 0


_DIGEST = """
import blake3, torch
from farfill.engine.torch import tiles

tiles.prepare()
digest = blake3.blake3()
for heads, group, dim in ((3, 3, 64), (1, 4, 256), (2, 2, 128)):
    generator = torch.Generator().manual_seed(dim)
    query, key, value = (
        torch.randn((1, *size), generator=generator).bfloat16().transpose(1, 2)
        for size in ((333, heads * group, dim), (777, heads, dim), (777, heads, dim))
    )
    for window in (777, 200):
        found = tiles.attend(query, key, value, scale=dim**-0.5, window=window)
        digest.update(found.view(torch.uint8).numpy().tobytes())
print(digest.hexdigest(), sum(tiles._attend.stats.cache_hits.values()))
"""


def test_code_just_compiled_and_code_from_disk_give_the_same_bits(tmp_path: Path) -> None:
    def run(threads: int) -> tuple[str, int]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-c", _DIGEST]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        digest, hits = output.split()
        return digest, int(hits)

    (compiled, no_hits), (loaded, hits) = run(1), run(2)
    assert no_hits == 0
    assert hits > 0
    assert compiled == loaded
