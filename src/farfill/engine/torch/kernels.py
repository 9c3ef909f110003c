"""What decode steps do between matrix products on a CPU, compiled: rows put into many caches, and attention over them.

torch would take a call for every sequence, each a meeting of all its threads. Here one call serves all sequences of a
layer. Exactness: what is computed for a head of a sequence depends on that head's rows and their number alone, never
on the other sequences or on how work is spread over threads.

Compiled code is kept in Farfill's cache folder, one version per processor. Addresses are passed instead of arrays
because the rows of each sequence lie in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import (
    carray,  # pyright: ignore[reportPrivateImportUsage]
    types,
)
from numba.extending import intrinsic, overload

from farfill.config.paths import cache_dir

Addresses = npt.NDArray[np.int64]

# How torch keeps a number, and as what it is read here.
_STORED: dict[torch.dtype, npt.NDArray[Any]] = {
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float32: np.empty(0, np.float32),
}
# Multiplications for which waking another thread pays.
_SPLIT_WORK = 4_000_000

_f32, _u32 = np.float32, np.uint32
_LOG2_E, _LN2_HIGH, _LN2_LOW = _f32(1.4426950408889634), _f32(0.693359375), _f32(-2.12194440e-4)
_LEAST = _f32(-87.0)
# exp(r) - 1 - r over r², |r| ≤ ln 2 / 2: Cephes' expf.
_C0, _C1, _C2 = _f32(1.9875691500e-4), _f32(1.3981999507e-3), _f32(8.3334519073e-3)
_C3, _C4, _C5 = _f32(4.1665795894e-2), _f32(1.6666665459e-1), _f32(5.0000001201e-1)

# Sums may be reordered, which is done once, when the code is compiled.
_REORDERED = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}


def supports(rows: torch.Tensor) -> bool:
    """Whether these functions can read such a cache."""
    return rows.device.type == "cpu" and rows.dtype in _STORED


def put(source: torch.Tensor, targets: Addresses) -> None:
    """Copy each row of `source` [sequences, ...] to its target."""
    source = source.contiguous()
    _put(source.data_ptr(), source[0].numel() * source.element_size(), targets)


def attend(
    query: torch.Tensor, keys: Addresses, values: Addresses, tokens: Addresses, *, value_dim: int, scale: float
) -> torch.Tensor:
    """Softmax(q kᵀ · scale) v of one new token per sequence, over `tokens` rows from `keys` and `values` on.

    `query` [sequences, KV heads, heads of one KV head, dim]; rows are [KV heads, dim] of its type, one after the other.
    Returns [sequences, KV heads, heads of one KV head, value_dim].
    """
    query = query.contiguous()
    sequences, kv_heads, group, dim = query.shape
    output = torch.empty((sequences, kv_heads, group, value_dim), dtype=query.dtype)
    fixed = (
        _STORED[query.dtype],
        query.data_ptr(),
        keys,
        values,
        tokens,
        (kv_heads, group, dim, value_dim),
        _f32(scale),
        output.data_ptr(),
    )
    work = int(tokens.sum()) * kv_heads * group * (dim + value_dim)
    threads = min(torch.get_num_threads(), sequences * kv_heads, 1 + work // _SPLIT_WORK)
    if threads == 1:
        _attend(*fixed, 0, sequences * kv_heads)
    else:
        _spread(fixed, tokens, kv_heads, threads)
    return output


def _spread(fixed: tuple[Any, ...], tokens: Addresses, kv_heads: int, threads: int) -> None:
    """Do it in parts of about the same number of rows, the last one here."""
    ends = np.cumsum(np.repeat(tokens, kv_heads))
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, threads) / threads).tolist()
    cuts = [0, *cuts, len(ends)]
    others = [_pool(threads - 1).submit(_attend, *fixed, cuts[i], cuts[i + 1]) for i in range(threads - 1)]
    _attend(*fixed, cuts[-2], cuts[-1])
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads for parts of a step. They run where the thread that first needs them may."""
    return ThreadPoolExecutor(threads, thread_name_prefix="farfill-attention")


def _compiled(function: Callable[..., Any]) -> Any:
    """`function` as machine code that runs without the interpreter's lock, from disk where it was kept."""
    numba.config.CACHE_DIR = str(cache_dir() / "kernels")  # type: ignore[attr-defined]
    try:
        return numba.njit(nogil=True, cache=True, **_REORDERED)(function)
    except RuntimeError:  # no folder can be written: every process compiles anew
        return numba.njit(nogil=True, **_REORDERED)(function)


def _pointer(kind: Any) -> Any:
    @intrinsic
    def at(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return at


def _same_bits(source: Any, target: Any) -> Any:
    @intrinsic
    def reread(_: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

        return target(source), generate

    return reread


_bytes_at, _halves_at, _floats_at = _pointer(types.uint8), _pointer(types.uint16), _pointer(types.float32)
_to_float, _to_bits = _same_bits(types.uint32, types.float32), _same_bits(types.float32, types.uint32)


def _row(like: Any, address: int, start: int, length: int) -> Any:
    """`length` stored numbers from number `start` after `address` on."""
    raise AssertionError


@overload(_row, strict=False)
def _row_of(like: Any, address: Any, start: Any, length: Any) -> Any:
    if like.dtype == types.uint16:
        return lambda like, address, start, length: carray(_halves_at(address + 2 * start), length)
    return lambda like, address, start, length: carray(_floats_at(address + 4 * start), length)


def _load(stored: Any) -> Any:
    """A stored number as float32."""
    raise AssertionError


@overload(_load, inline="always", strict=False)
def _load_of(stored: Any) -> Any:
    if stored == types.uint16:
        return lambda stored: _to_float(_u32(stored) << _u32(16))
    return lambda stored: stored


def _store(row: Any, index: int, number: Any) -> None:
    """Round to nearest, ties to even."""
    raise AssertionError


@overload(_store, strict=False)
def _store_of(row: Any, index: Any, number: Any) -> Any:
    if row.dtype == types.uint16:

        def rounded(row: Any, index: Any, number: Any) -> None:
            bits = _to_bits(number)
            half = (bits + _u32(0x7FFF) + ((bits >> _u32(16)) & _u32(1))) >> _u32(16)
            row[index] = np.uint16(0x7FC0) if np.isnan(number) else np.uint16(half)

        return rounded

    def plain(row: Any, index: Any, number: Any) -> None:
        row[index] = number

    return plain


# Not reordered: the remainder of the range reduction would be lost.
@numba.njit(fastmath={"contract"})
def _exp(x: Any) -> Any:
    """For x ≤ 0, to two units of the last place; NaN of NaN."""
    known = max(x, _LEAST)
    n = np.floor(known * _LOG2_E + _f32(0.5))
    r = (known - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    y = p * (r * r) + r + _f32(1)
    power = y * _to_float(_u32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return x if np.isnan(x) else power


@numba.njit(**_REORDERED)
def _score(scores: Any, query: Any, like: Any, keys: int, stride: int) -> None:
    """The product of `query` with each row; rows begin every `stride` numbers."""
    dim = len(query)
    if dim == 64:  # a known length leaves no loop
        for t in range(len(scores)):
            row, total = _row(like, keys, t * stride, 64), _f32(0)
            for i in range(64):
                total += query[i] * _load(row[i])
            scores[t] = total
    else:
        for t in range(len(scores)):
            row, total = _row(like, keys, t * stride, dim), _f32(0)
            for i in range(dim):
                total += query[i] * _load(row[i])
            scores[t] = total


@numba.njit(**_REORDERED)
def _softmax(scores: Any) -> None:
    """In place."""
    count = len(scores)
    highest = scores[0]
    for t in range(1, count):
        highest = max(highest, scores[t])
    total = _f32(0)
    for t in range(count):
        weight = _exp(scores[t] - highest)
        scores[t] = weight
        total += weight
    share = _f32(1) / total
    for t in range(count):
        scores[t] *= share


@numba.njit(**_REORDERED)
def _weigh(total: Any, weights: Any, like: Any, values: int, stride: int) -> None:
    """The sum of the rows times their weights; four at a time, so that sums are read and written less often."""
    total[:] = _f32(0)
    dim, count = len(total), len(weights)
    fours = count - count % 4
    for t in range(0, fours, 4):
        w0, w1, w2, w3 = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        v0, v1 = _row(like, values, t * stride, dim), _row(like, values, (t + 1) * stride, dim)
        v2, v3 = _row(like, values, (t + 2) * stride, dim), _row(like, values, (t + 3) * stride, dim)
        if dim == 64:
            for i in range(64):
                total[i] += w0 * _load(v0[i]) + w1 * _load(v1[i]) + w2 * _load(v2[i]) + w3 * _load(v3[i])
        else:
            for i in range(dim):
                total[i] += w0 * _load(v0[i]) + w1 * _load(v1[i]) + w2 * _load(v2[i]) + w3 * _load(v3[i])
    for t in range(fours, count):
        weight, row = weights[t], _row(like, values, t * stride, dim)
        for i in range(dim):
            total[i] += weight * _load(row[i])


@_compiled
def _put(source: int, nbytes: int, targets: Any) -> None:
    for b in range(len(targets)):
        row, target = carray(_bytes_at(source + b * nbytes), nbytes), carray(_bytes_at(targets[b]), nbytes)
        for i in range(nbytes):
            target[i] = row[i]


@_compiled
def _attend(  # noqa: PLR0917 (compiled code takes no names)
    like: Any,
    query: int,
    keys: Any,
    values: Any,
    tokens: Any,
    shape: tuple[int, int, int, int],
    scale: Any,
    output: int,
    first: int,
    last: int,
) -> None:
    """Units [first, last): KV head by KV head of each sequence."""
    kv_heads, group, dim, value_dim = shape
    scores = np.empty(tokens.max(), np.float32)
    scaled, total = np.empty(dim, np.float32), np.empty(value_dim, np.float32)
    for unit in range(first, last):
        b, h = unit // kv_heads, unit % kv_heads
        weights = scores[: tokens[b]]
        key, value = keys[b] + h * dim * like.itemsize, values[b] + h * value_dim * like.itemsize
        for g in range(group):
            row = _row(like, query, (unit * group + g) * dim, dim)
            for i in range(dim):
                scaled[i] = _load(row[i]) * scale
            _score(weights, scaled, like, key, kv_heads * dim)
            _softmax(weights)
            _weigh(total, weights, like, value, kv_heads * value_dim)
            row = _row(like, output, (unit * group + g) * value_dim, value_dim)
            for i in range(value_dim):
                _store(row, i, total[i])
