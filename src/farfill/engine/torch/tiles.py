"""Causal attention of many new tokens of one sequence in bfloat16, on CPUs that multiply pairs of it (AVX512-BF16).

Products are made of small tiles that stay in registers, over keys and values whose words hold two numbers; scores and
sums are float32, and the softmax goes over blocks of keys from the first on, as in FlashAttention. What a token gets
depends on the keys it looks at alone: not on the tokens computed with it, nor on how work is spread over threads.
"""

# Compiled code takes no names.
# ruff: noqa: PLR0917
from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from farfill.engine.torch.kernels import compiled, pool
from farfill.engine.torch.lanes import (
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    add,
    copy_bytes,
    exp,
    fma,
    higher,
    highest,
    load,
    spread,
    store,
    store_float,
    tile,
    times,
    total,
    zero_bytes,
    zeros,
)

# Queries of one head and keys computed at once: scores that stay in the second cache.
_QUERIES, _KEYS = 8 * TILE_ROWS, 4 * TILE_COLUMNS
# Fewer are left to torch.
_LEAST_QUERIES = 2 * TILE_ROWS
_FLOAT, _HALF = np.float32(0), np.uint16(0)
_BELOW = np.float32(-np.inf)
# Lower than every score, and a number.
_LOWEST = np.float32(-1e30)


@cache
def available() -> bool:
    """Whether this processor is one for it. Where there is AMX, torch is faster."""
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `attend` can, and gains; by type and shape."""
    return (
        available()
        and all(one.dtype is torch.bfloat16 and one.device.type == "cpu" for one in (query, key, value))
        and query.shape[0] == 1
        and query.shape[2] >= _LEAST_QUERIES
        and query.shape[3] % 2 == 0
        and value.shape[3] % TILE_COLUMNS == 0
        and all(one.stride(3) == 1 for one in (query, key, value))
        # Keys are read two numbers at a time.
        and key.storage_offset() % 2 == key.stride(1) % 2 == key.stride(2) % 2 == 0
    )


def prepare() -> None:
    """Compile, or load from disk."""
    rows = torch.zeros((1, 1, _QUERIES, TILE_COLUMNS), dtype=torch.bfloat16)
    if supports(rows, rows, rows):
        attend(rows, rows, rows, scale=1.0, window=_QUERIES)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int) -> torch.Tensor:
    """Softmax(q kᵀ · scale) v, where the last query looks at the last `window` keys, the one before at those before it.

    `query` [1, heads, queries, dim], `key` [1, KV heads, keys, dim], `value` [1, KV heads, keys, value dim]. Returns
    [1, queries, heads, value dim].
    """
    _, heads, queries, dim = query.shape
    _, kv_heads, keys, value_dim = value.shape
    output = torch.empty((1, queries, heads, value_dim), dtype=query.dtype)
    # From a whole block on, so that blocks are the same for every query.
    first = max(0, keys - queries - window + 1) // _KEYS * _KEYS
    paired_keys, paired_values = _pair_keys(key[0, :, first:]), _pair_values(value[0, :, first:])
    fixed = (
        (query.data_ptr(), query.stride(1) * 2, query.stride(2) * 2),
        (paired_keys.data_ptr(), paired_values.data_ptr(), first, paired_keys.shape[1]),
        (heads, heads // kv_heads, queries, keys, dim, value_dim, window),
        np.float32(scale),
        output.data_ptr(),
    )
    threads = torch.get_num_threads()
    scratch = torch.empty((threads, _QUERIES * (6 * _KEYS + 4 * value_dim + 2 * dim)), dtype=torch.uint8)
    parts = [(*fixed, scratch[index].data_ptr(), index, threads) for index in range(threads)]
    others = [pool(threads - 1).submit(_attend, *part) for part in parts[1:]]
    _attend(*parts[0])
    for other in others:
        other.result()
    return output


def _pair_keys(key: torch.Tensor) -> torch.Tensor:
    """[heads, keys, dim] as [heads, blocks, dim / 2, keys of a block, 2]; zeros after the last key."""
    heads, keys, dim = key.shape
    blocks = -(-keys // TILE_COLUMNS)
    words = torch.empty((heads, blocks, dim // 2, TILE_COLUMNS), dtype=torch.int32)
    whole, source = keys // TILE_COLUMNS, key.view(torch.int32)
    split = source[:, : whole * TILE_COLUMNS].unflatten(1, (whole, TILE_COLUMNS))
    words[:, :whole].copy_(split.transpose(2, 3))
    if whole < blocks:
        words[:, whole] = 0
        words[:, whole, :, : keys - whole * TILE_COLUMNS].copy_(source[:, whole * TILE_COLUMNS :].transpose(1, 2))
    return words


def _pair_values(value: torch.Tensor) -> torch.Tensor:
    """[heads, keys, dim] as [heads, parts of a row, keys / 2, part, 2]; zeros after the last key."""
    heads, keys, dim = value.shape
    parts, rows = dim // TILE_COLUMNS, -(-keys // TILE_COLUMNS) * TILE_COLUMNS
    pairs = torch.empty((heads, parts, rows // 2, TILE_COLUMNS, 2), dtype=value.dtype)
    pairs[:, :, keys // 2 :] = 0
    for place in range(2):
        source = value[:, place::2].unflatten(2, (parts, TILE_COLUMNS))
        pairs[:, :, : source.shape[1], :, place].copy_(source.transpose(1, 2))
    return pairs


_inner = numba.njit(error_model="numpy")


@_inner
def _copy_queries(target: int, query: int, row_stride: int, rows: int, dim: int) -> None:
    """`rows` rows without gaps, zeros up to `_QUERIES`."""
    for r in range(_QUERIES):
        if r < rows:
            copy_bytes(query + r * row_stride, target + 2 * r * dim, 2 * dim)
        else:
            zero_bytes(target + 2 * r * dim, 2 * dim)


@_inner
def _hide(scores: int, first: int, last: int) -> None:
    """No share for keys [first, last) of a row."""
    for t in range(first, last):
        store_float(scores + 4 * t, _BELOW)


@_inner
def _weigh(scores: int, weights: int, columns: int, factor: Any, before: Any) -> Any:
    """A row of scores to weights in bfloat16: (the highest so far, the sum of these weights)."""
    top = load(_FLOAT, scores)
    for t in range(LANES, columns, LANES):
        top = higher(load(_FLOAT, scores + 4 * t), top)
    most = max(before, highest(top) * factor)
    by, less, sums = spread(factor), spread(-most), zeros()
    for t in range(0, columns, LANES):
        part = exp(fma(load(_FLOAT, scores + 4 * t), by, less))
        store(_HALF, weights + 2 * t, part)
        sums = add(sums, part)
    return most, total(sums)


@_inner
def _rescale(row: int, dim: int, factor: Any) -> None:
    for i in range(0, dim, LANES):
        store(_FLOAT, row + 4 * i, times(load(_FLOAT, row + 4 * i), factor))


@compiled
def _attend(
    queries_at: tuple[int, int, int],
    paired_at: tuple[int, int, int, int],
    shape: tuple[int, int, int, int, int, int, int],
    factor: Any,
    output: int,
    scratch: int,
    index: int,
    threads: int,
) -> None:
    """Every `threads`-th block of queries of a head, from the `index`-th on."""
    query, head_stride, row_stride = queries_at
    paired_keys, paired_values, base, blocks = paired_at
    heads, group, queries, keys, dim, value_dim, window = shape
    scores = scratch
    weights = scores + 4 * _QUERIES * _KEYS
    sums = weights + 2 * _QUERIES * _KEYS
    rows = sums + 4 * _QUERIES * value_dim
    most, shares = np.empty(_QUERIES, np.float32), np.empty(_QUERIES, np.float32)
    key_pairs, row_blocks = dim // 2, -(-queries // _QUERIES)
    for unit in range(index, heads * row_blocks, threads):
        h, start = unit % heads, unit // heads * _QUERIES
        count = min(_QUERIES, queries - start)
        _copy_queries(rows, query + h * head_stride + start * row_stride, row_stride, count, dim)
        most[:], shares[:] = _LOWEST, np.float32(0)
        # The key that is each query's own, of the first one and of the last.
        own = keys - queries + start
        end, fresh = own + count, 1
        first = max(0, own - window + 1)
        for block in range((first - base) // _KEYS * _KEYS + base, end, _KEYS):
            columns = -(-min(_KEYS, end - block) // TILE_COLUMNS) * TILE_COLUMNS
            for column in range(0, columns, TILE_COLUMNS):
                number = (h // group) * blocks + (block - base + column) // TILE_COLUMNS
                right = paired_keys + number * key_pairs * TILE_COLUMNS * 4
                for r in range(0, count, TILE_ROWS):
                    to = scores + 4 * (r * _KEYS + column)
                    tile(rows + 2 * r * dim, 2 * dim, right, key_pairs, to, 4 * _KEYS, 0)
            for r in range(-(-count // TILE_ROWS) * TILE_ROWS):
                row = scores + 4 * r * _KEYS
                seen = max(0, min(columns, own + min(r, count - 1) + 1 - block))
                _hide(row, seen, columns)
                _hide(row, 0, min(seen, own + r + 1 - window - block))
                highest_now, share = _weigh(row, weights + 2 * r * _KEYS, columns, factor, most[r])
                kept = highest(exp(spread(most[r] - highest_now)))
                most[r], shares[r] = highest_now, shares[r] * kept + share
                if fresh == 0 and kept != np.float32(1):
                    _rescale(sums + 4 * r * value_dim, value_dim, kept)
            for part in range(value_dim // TILE_COLUMNS):
                number = (h // group) * (value_dim // TILE_COLUMNS) + part
                right = paired_values + (number * blocks * TILE_COLUMNS + block - base) * TILE_COLUMNS * 2
                for r in range(0, count, TILE_ROWS):
                    to = sums + 4 * (r * value_dim + part * TILE_COLUMNS)
                    tile(weights + 2 * r * _KEYS, 2 * _KEYS, right, columns // 2, to, 4 * value_dim, 1 - fresh)
            fresh = 0
        for r in range(count):
            row, share = sums + 4 * r * value_dim, np.float32(1) / shares[r]
            to = output + 2 * ((start + r) * heads + h) * value_dim
            for i in range(0, value_dim, LANES):
                store(_HALF, to + 2 * i, times(load(_FLOAT, row + 4 * i), share))
