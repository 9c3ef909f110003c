"""What decode steps do between matrix products on a CPU, compiled: rows put into many caches, and attention over them.

torch would take a call for every sequence, each a meeting of all its threads. Here one call serves all sequences of a
layer. Exactness: what is computed for a head of a sequence depends on that head's rows and their number alone, never
on the other sequences or on how work is spread over threads; and every sum has one order (see `lanes`), so the bits
are the same in every process.

Compiled code is kept in Farfill's cache folder, one version per processor. Addresses are passed instead of arrays
because the rows of each sequence lie in memory of its own.
"""

# Compiled code takes no names.
# ruff: noqa: PLR0917
from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import blake3
import llvmlite
import numba
import numpy as np
import numpy.typing as npt
import torch

from farfill.config.paths import cache_dir
from farfill.engine.torch import lanes
from farfill.engine.torch.lanes import (
    LANES,
    add,
    copy_bytes,
    exp,
    fma,
    higher,
    highest,
    load,
    load_float,
    load_some,
    spread,
    store,
    store_float,
    store_some,
    times,
    total,
    zeros,
)

_log = logging.getLogger(__name__)

Addresses = npt.NDArray[np.int64]

# How torch keeps a number, and as what it is read here.
STORED: dict[torch.dtype, Any] = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}
# Multiplications for which waking another thread pays.
_SPLIT_WORK = 4_000_000

_FLOAT = np.float32(0)
_NONE = np.float32(0)
_BELOW = np.float32(-np.inf)


def supports(rows: torch.Tensor) -> bool:
    """Whether these functions can read such a cache."""
    return rows.device.type == "cpu" and rows.dtype in STORED


def prepare(dtype: torch.dtype) -> None:
    """Compile what caches of `dtype` need, or load it from disk, so that no step has to."""
    if dtype in STORED:
        rows = torch.zeros((1, 1, 1, LANES), dtype=dtype)
        at = np.array([rows.data_ptr()], np.int64)
        put(rows, at)
        row_bytes = LANES * dtype.itemsize, LANES * dtype.itemsize
        attend(rows, at, at, np.ones(1, np.int64), row_bytes=row_bytes, value_dim=LANES, scale=1.0)


def put(source: torch.Tensor, targets: Addresses) -> None:
    """Copy each row of `source` [sequences, ...] to its target."""
    source = source.contiguous()
    _put(source.data_ptr(), source[0].numel() * source.element_size(), targets)


def attend(
    query: torch.Tensor,
    keys: Addresses,
    values: Addresses,
    tokens: Addresses,
    *,
    row_bytes: tuple[int, int],
    value_dim: int,
    scale: float,
) -> torch.Tensor:
    """Softmax(q kᵀ · scale) v of one new token per sequence, over `tokens` rows from `keys` and `values` on.

    `query` [sequences, KV heads, heads of one KV head, dim]; rows are [KV heads, dim] of its type. `row_bytes` lie
    between the beginnings of a key's row and the next, and of a value's: more than a row has where it is a rank's part.
    Returns [sequences, KV heads, heads of one KV head, value_dim].
    """
    query = query.contiguous()
    sequences, kv_heads, group, dim = query.shape
    output = torch.empty((sequences, kv_heads, group, value_dim), dtype=query.dtype)
    fixed = (
        STORED[query.dtype],
        query.element_size(),
        query.data_ptr(),
        keys,
        values,
        tokens,
        (kv_heads, group, dim, value_dim),
        row_bytes,
        np.float32(scale),
        output.data_ptr(),
    )
    # A head's query and its scores, each with room for whole vectors.
    numbers = dim + int(tokens.max()) + 2 * LANES
    work = int(tokens.sum()) * kv_heads * group * (dim + value_dim)
    threads = min(torch.get_num_threads(), sequences * kv_heads, 1 + work // _SPLIT_WORK)
    scratch = torch.empty((threads, numbers), dtype=torch.float32)
    if threads == 1:
        _attend(*fixed, scratch.data_ptr(), 0, sequences * kv_heads)
    else:
        _spread(fixed, scratch, tokens, kv_heads)
    return output


def _spread(fixed: tuple[Any, ...], scratch: torch.Tensor, tokens: Addresses, kv_heads: int) -> None:
    """Do it in parts of about the same number of rows, one for each row of `scratch`, the last one here."""
    threads = len(scratch)
    ends = np.cumsum(np.repeat(tokens, kv_heads))
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, threads) / threads).tolist()
    cuts = [0, *cuts, len(ends)]
    parts = [(*fixed, scratch[i].data_ptr(), cuts[i], cuts[i + 1]) for i in range(threads)]
    others = [pool(threads - 1).submit(_attend, *part) for part in parts[:-1]]
    _attend(*parts[-1])
    for other in others:
        other.result()


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Threads for parts of a step. They run where the thread that first needs them may."""
    return ThreadPoolExecutor(threads, thread_name_prefix="farfill-attention")


def compiled(function: Callable[..., Any]) -> Any:
    """`function` as machine code that runs without the interpreter's lock, from disk where it was kept."""
    folder = _folder_of(function)
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)  # type: ignore[attr-defined]
    try:
        return numba.njit(cache=_is_writable(folder), nogil=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


def _folder_of(function: Callable[..., Any]) -> Path:
    """Where compiled code is kept. numba looks for changes in one file only, so all that matter name the folder."""
    digest = blake3.blake3(repr((numba.__version__, llvmlite.__version__)).encode())
    for source in (function.__code__.co_filename, lanes.__file__):
        digest.update(Path(source).read_bytes())
    return cache_dir() / "kernels" / digest.hexdigest(length=8)


def _is_writable(folder: Path) -> bool:
    """numba would take another folder, which is not named after the sources."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        error = None if os.access(folder, os.W_OK) else "not writable"
    except OSError as found:
        error = str(found)
    if error is not None:
        _log.warning("compiled code cannot be kept in %s, every start compiles anew: %s", folder, error)
    return error is None


_inner = numba.njit(error_model="numpy")


@_inner
def _load_head(query: int, like: Any, size: int, address: int, dim: int, factor: Any) -> None:
    """A head's query times `factor` as float32, filled up with zeros to whole vectors."""
    whole = dim - dim % LANES
    for i in range(0, whole, LANES):
        store(_FLOAT, query + 4 * i, times(load(like, address + size * i), factor))
    if whole < dim:
        store(_FLOAT, query + 4 * whole, times(load_some(like, address + size * whole, dim - whole, _NONE), factor))


@_inner
def _score(scores: int, count: int, query: int, dim: int, like: Any, size: int, keys: int, stride: int) -> None:
    """The product of `query` with each row; rows begin every `stride` bytes."""
    whole = dim - dim % LANES
    for t in range(count):
        row, sums = keys + t * stride, zeros()
        for i in range(0, whole, LANES):
            sums = fma(load(_FLOAT, query + 4 * i), load(like, row + size * i), sums)
        if whole < dim:
            tail = load_some(like, row + size * whole, dim - whole, _NONE)
            sums = fma(load(_FLOAT, query + 4 * whole), tail, sums)
        store_float(scores + 4 * t, total(sums))


@_inner
def _soften(scores: int, count: int) -> Any:
    """exp of each score less the highest, in place, whole vectors of them; one over their sum."""
    whole = -(-count // LANES) * LANES
    top = load(_FLOAT, scores)
    for t in range(LANES, whole, LANES):
        top = higher(load(_FLOAT, scores + 4 * t), top)
    most, sums = spread(-highest(top)), zeros()
    for t in range(0, whole, LANES):
        weights = exp(add(load(_FLOAT, scores + 4 * t), most))
        store(_FLOAT, scores + 4 * t, weights)
        sums = add(sums, weights)
    return np.float32(1) / total(sums)


@_inner
def _weigh(
    weights: int, count: int, share: Any, dim: int, like: Any, size: int, values: int, stride: int, out: int
) -> None:
    """The sum of the rows times their weights, token after token, times `share`."""
    i = 0
    while i + 4 * LANES <= dim:
        s0, s1, s2, s3 = zeros(), zeros(), zeros(), zeros()
        for t in range(count):
            row, weight = values + t * stride + size * i, spread(load_float(weights + 4 * t))
            s0 = fma(weight, load(like, row), s0)
            s1 = fma(weight, load(like, row + size * LANES), s1)
            s2 = fma(weight, load(like, row + size * 2 * LANES), s2)
            s3 = fma(weight, load(like, row + size * 3 * LANES), s3)
        to = out + size * i
        store(like, to, times(s0, share))
        store(like, to + size * LANES, times(s1, share))
        store(like, to + size * 2 * LANES, times(s2, share))
        store(like, to + size * 3 * LANES, times(s3, share))
        i += 4 * LANES
    while i < dim:
        sums, n = zeros(), min(LANES, dim - i)
        for t in range(count):
            row = values + t * stride + size * i
            part = load(like, row) if n == LANES else load_some(like, row, n, _NONE)
            sums = fma(spread(load_float(weights + 4 * t)), part, sums)
        sums = times(sums, share)
        if n == LANES:
            store(like, out + size * i, sums)
        else:
            store_some(like, out + size * i, sums, n)
        i += n


@compiled
def _put(source: int, nbytes: int, targets: Any) -> None:
    for b in range(len(targets)):
        copy_bytes(source + b * nbytes, targets[b], nbytes)


@compiled
def _attend(
    like: Any,
    size: int,
    query: int,
    keys: Any,
    values: Any,
    tokens: Any,
    shape: tuple[int, int, int, int],
    row_bytes: tuple[int, int],
    factor: Any,
    output: int,
    scratch: int,
    first: int,
    last: int,
) -> None:
    """Units [first, last): KV head by KV head of each sequence."""
    kv_heads, group, dim, value_dim = shape
    head, scores = scratch, scratch + 4 * (dim + LANES)
    for unit in range(first, last):
        b, h = unit // kv_heads, unit % kv_heads
        count = tokens[b]
        key, value = keys[b] + h * dim * size, values[b] + h * value_dim * size
        for g in range(group):
            _load_head(head, like, size, query + (unit * group + g) * dim * size, dim, factor)
            _score(scores, count, head, dim, like, size, key, row_bytes[0])
            # Whole vectors of scores: those past the last token weigh nothing.
            for t in range(count, count + LANES):
                store_float(scores + 4 * t, _BELOW)
            share = _soften(scores, count)
            out = output + (unit * group + g) * value_dim * size
            _weigh(scores, count, share, value_dim, like, size, value, row_bytes[1], out)
