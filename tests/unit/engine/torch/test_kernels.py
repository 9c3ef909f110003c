"""Compiled attention: the formula's numbers, and the same bits alone, in a batch and over any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.engine.torch import kernels

DTYPES = [torch.bfloat16, torch.float32]


class Caches:
    """Keys and values of sequences of some lengths, each in a buffer of its own with more rows, and `others` heads."""

    def __init__(
        self, lengths: list[int], heads: int, dims: tuple[int, int], dtype: torch.dtype, *, others: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        self.buffers = [
            [
                torch.randn((length + 3, others + heads, dim), generator=generator).to(dtype)[:, others:]
                for length in lengths
            ]
            for dim in dims
        ]
        self.lengths = lengths
        self.value_dim = dims[1]

    def attend(self, query: torch.Tensor, sequences: list[int], scale: float = 0.3) -> torch.Tensor:
        """Of `query` [all sequences, heads, group, dim], these; their rows begin at the second."""
        keys, values = (np.array([buffers[i][1:].data_ptr() for i in sequences], np.int64) for buffers in self.buffers)
        counts = np.array([self.lengths[i] for i in sequences], np.int64)
        row_bytes = [buffers[0].stride(0) * buffers[0].element_size() for buffers in self.buffers]
        return kernels.attend(
            query[sequences],
            keys,
            values,
            counts,
            row_bytes=(row_bytes[0], row_bytes[1]),
            value_dim=self.value_dim,
            scale=scale,
        )

    def formula(self, query: torch.Tensor, scale: float = 0.3) -> torch.Tensor:
        """The same in float64, by torch."""
        outputs = []
        for i, length in enumerate(self.lengths):
            keys, values = (buffers[i][1 : length + 1].double().transpose(0, 1) for buffers in self.buffers)
            scores = query[i].double() @ keys.transpose(1, 2) * scale
            outputs.append(torch.softmax(scores, dim=-1) @ values)
        return torch.stack(outputs)


def query_of(caches: Caches, heads: int, group: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn((len(caches.lengths), heads, group, dim), generator=generator) * 3).to(dtype)


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(kernels, "_SPLIT_WORK", 1)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "group", "dims"), [(3, 3, (64, 64)), (1, 5, (80, 24)), (2, 1, (128, 64)), (2, 2, (7, 9))]
)
def test_attention_is_that_of_the_formula(dtype: torch.dtype, heads: int, group: int, dims: tuple[int, int]) -> None:
    caches = Caches([1, 2, 5, 64, 203], heads, dims, dtype)
    query = query_of(caches, heads, group, dims[0], dtype)
    found = caches.attend(query, list(range(5)))
    tolerance = 1e-2 if dtype is torch.bfloat16 else 3e-6
    torch.testing.assert_close(found.double(), caches.formula(query), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_hold_heads_of_others(dtype: torch.dtype) -> None:
    """As on several ranks, each of which attends for its own heads of shared rows."""
    caches = Caches([1, 2, 5, 64, 203], 2, (24, 16), dtype, others=3)
    query = query_of(caches, 2, 2, 24, dtype)
    tolerance = 1e-2 if dtype is torch.bfloat16 else 3e-6
    found = caches.attend(query, list(range(5)))
    torch.testing.assert_close(found.double(), caches.formula(query), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=2, max_size=8),
    heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dim=st.sampled_from([8, 16, 33, 64, 96, 128]),
)
def test_heads_and_sequences_alone_and_together_are_bit_identical(
    dtype: torch.dtype, lengths: list[int], heads: int, group: int, dim: int
) -> None:
    caches = Caches(lengths, heads, (dim, dim), dtype)
    query = query_of(caches, heads, group, dim, dtype)
    everything = list(range(len(lengths)))
    together = caches.attend(query, everything)
    assert torch.equal(together, torch.cat([caches.attend(query, [i]) for i in everything]))
    assert torch.equal(together.flip(0), caches.attend(query, everything[::-1]))
    # Ranks that share a KV head have fewer heads of it.
    apart = [caches.attend(query[:, :, g : g + 1], everything) for g in range(group)]
    assert torch.equal(together, torch.cat(apart, dim=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("many_threads")
def test_threads_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = Caches([900, 3, 41, 1, 77, 400], 2, (64, 64), dtype)
    query = query_of(caches, 2, 3, 64, dtype)
    spread = caches.attend(query, list(range(6)))
    monkeypatch.setattr(kernels, "_SPLIT_WORK", 1 << 40)
    assert torch.equal(spread, caches.attend(query, list(range(6))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none_and_far_scores_weigh_nothing(dtype: torch.dtype) -> None:
    caches = Caches([40, 40], 1, (64, 64), dtype)
    caches.buffers[0][0][5, 0, 3] = float("nan")
    # Rows far below the highest score, and values that are exact then.
    caches.buffers[0][1][1:41] = -50.0
    caches.buffers[0][1][17] = 50.0
    query = torch.full((2, 1, 1, 64), 10.0, dtype=dtype)
    found = caches.attend(query, [0, 1])
    assert found[0].isnan().all()
    assert torch.equal(found[1, 0, 0], caches.buffers[1][1][17, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_put_where_they_belong(dtype: torch.dtype) -> None:
    targets = [torch.zeros((4, 2, 5), dtype=dtype) for _ in range(3)]
    rows = torch.randn((3, 2, 1, 5)).to(dtype)
    kernels.put(rows, np.array([target[i].data_ptr() for i, target in enumerate(targets)], np.int64))
    for i, target in enumerate(targets):
        assert torch.equal(target[i], rows[i, :, 0])
        assert target.count_nonzero() == 10


# Prints a digest of what attention gives for many shapes, alone or in a batch, and whether code came from disk.
_DIGEST = """
import sys
import blake3, numpy as np, torch
from farfill.engine.torch import kernels

digest, alone = blake3.blake3(), sys.argv[1] == "alone"
for dtype in (torch.bfloat16, torch.float32):
    kernels.prepare(dtype)
    for heads, group, dim, value_dim in ((3, 3, 64, 64), (1, 4, 256, 256), (2, 5, 80, 24), (1, 1, 8, 8)):
        generator = torch.Generator().manual_seed(dim)
        lengths = [1, 7, 16, 17, 63, 150, 331, 1200]
        keys = [torch.randn((n, heads, dim), generator=generator).to(dtype) for n in lengths]
        values = [torch.randn((n, heads, value_dim), generator=generator).to(dtype) for n in lengths]
        query = torch.randn((len(lengths), heads, group, dim), generator=generator).to(dtype)
        for part in ([[i] for i in range(len(lengths))] if alone else [list(range(len(lengths)))]):
            places = [np.array([rows[i].data_ptr() for i in part]) for rows in (keys, values)]
            counts = np.array([lengths[i] for i in part])
            row_bytes = heads * dim * dtype.itemsize, heads * value_dim * dtype.itemsize
            found = kernels.attend(
                query[part], *places, counts, row_bytes=row_bytes, value_dim=value_dim, scale=dim**-0.5
            )
            digest.update(found.view(torch.uint8).numpy().tobytes())
print(digest.hexdigest(), sum(kernels._attend.stats.cache_hits.values()))
"""


def test_code_just_compiled_and_code_from_disk_give_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    def run(mode: str) -> tuple[str, int]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "2"}
        command = [sys.executable, "-c", _DIGEST, mode]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        digest, hits = output.split()
        return digest, int(hits)

    compiled, compiled_alone = run("together"), run("alone")
    assert compiled[1] == 0
    assert compiled_alone[1] > 0
    assert compiled[0] == compiled_alone[0]


def test_code_that_cannot_be_kept_is_compiled_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "farfill").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = kernels.compiled(kernels._put.py_func)
    kept(0, 0, np.zeros(1, np.int64))
    assert "every start compiles anew" in caplog.text
    assert not kept.stats.cache_path
