"""The manifest: what pieces a prompt's KV consists of, and which prefix an incomplete set allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.errors import InvalidRequestError, ModelUnsupportedError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.kv.manifest import build_manifest

FULL = KVLayout((TensorLayout(0, "k", TensorKind.FULL, "bfloat16", (2, 8)),), 64)
MIXED = KVLayout(
    (
        *FULL.tensors,
        TensorLayout(1, "c", TensorKind.LATENT, "float32", (12,)),
        TensorLayout(2, "k", TensorKind.WINDOW, "bfloat16", (4,), window_tokens=100),
        TensorLayout(3, "s", TensorKind.RECURRENT, "float32", (2, 4, 4)),
        TensorLayout(3, "x", TensorKind.CONV, "bfloat16", (3, 5)),
    ),
    64,
)
CHECKPOINTED = replace(MIXED, checkpoint_every_chunks=3)
layouts = st.sampled_from([FULL, MIXED])


@given(layouts, st.integers(1, 1000))
def test_growing_tensors_are_covered_once_and_in_order(layout: KVLayout, num_tokens: int) -> None:
    manifest = build_manifest(layout, num_tokens)
    assert [piece.index for piece in manifest.pieces] == list(range(len(manifest.pieces)))
    assert [p.prefill_chunk for p in manifest.pieces] == sorted(p.prefill_chunk for p in manifest.pieces)
    for index, tensor in enumerate(layout.tensors):
        pieces = [p for p in manifest.pieces if p.tensor == index]
        if tensor.kind.grows:
            assert [p.start_token for p in pieces] == list(range(0, num_tokens, 64))
            assert [p.end_token for p in pieces] == [*list(range(64, num_tokens, 64)), num_tokens]
            assert sum(p.nbytes for p in pieces) == num_tokens * tensor.row_bytes
        else:
            assert len(pieces) == 1
            assert pieces[0].prefill_chunk == manifest.num_prefill_chunks - 1


@given(st.integers(1, 1000))
def test_window_sends_only_its_last_tokens(num_tokens: int) -> None:
    piece = next(p for p in build_manifest(MIXED, num_tokens).pieces if p.tensor == 2)
    assert (piece.start_token, piece.end_token) == (max(0, num_tokens - 100), num_tokens)
    assert piece.nbytes == min(100, num_tokens) * 8


@given(layouts, st.integers(1, 600), st.data())
def test_incomplete_set_allows_whole_chunks_from_the_start_only(
    layout: KVLayout, num_tokens: int, data: st.DataObject
) -> None:
    manifest = build_manifest(layout, num_tokens)
    held = data.draw(st.sets(st.integers(0, len(manifest.pieces) - 1)))
    tokens = manifest.complete_prefix_tokens(held)
    if len(held) == len(manifest.pieces):
        assert tokens == num_tokens
    elif not layout.resumable:
        assert tokens == 0
    else:
        assert tokens % 64 == 0
        assert all(p.index in held for p in manifest.pieces if p.end_token <= tokens)
        assert not all(p.index in held for p in manifest.pieces if p.start_token == tokens)


@given(st.integers(1, 1000))
def test_checkpoints_are_windows_and_states_at_every_third_boundary(num_tokens: int) -> None:
    manifest, plain = build_manifest(CHECKPOINTED, num_tokens), build_manifest(MIXED, num_tokens)
    boundaries = list(range(192, num_tokens, 192))
    pieces = manifest.checkpoint_pieces
    assert [(p.tensor, p.end_token) for p in pieces] == [(t, end) for end in boundaries for t in (2, 3, 4)]
    assert all(p.prefill_chunk == p.end_token // 64 - 1 for p in pieces)
    window, *states = (next(p for p in plain.pieces if p.tensor == tensor) for tensor in (2, 3, 4))
    for piece in pieces:
        if piece.tensor == 2:
            assert piece.start_token == max(0, piece.end_token - 100)
            assert piece.nbytes == (piece.end_token - piece.start_token) * 8
        else:
            assert (piece.start_token, piece.nbytes) == (piece.end_token, states[piece.tensor - 3].nbytes)
    kept = [p for p in manifest.pieces if p not in pieces]
    assert [replace(p, index=0) for p in kept] == [replace(p, index=0) for p in plain.pieces]
    assert window in plain.pieces


@given(st.integers(1, 1000), st.data())
def test_incomplete_set_with_checkpoints_allows_the_last_one_that_is_there(
    num_tokens: int, data: st.DataObject
) -> None:
    manifest = build_manifest(CHECKPOINTED, num_tokens)
    missing = data.draw(st.sets(st.integers(0, len(manifest.pieces) - 1), max_size=4))
    held = set(range(len(manifest.pieces))) - missing
    tokens = manifest.complete_prefix_tokens(held)
    ends = [*range(192, num_tokens, 192), num_tokens]
    usable = [
        end
        for end in ends
        if all(
            p.index in held
            for p in manifest.pieces
            if (CHECKPOINTED.tensors[p.tensor].kind.grows and p.start_token < end)
            or (not CHECKPOINTED.tensors[p.tensor].kind.grows and p.end_token == end)
        )
    ]
    assert tokens == max(usable, default=0)


def test_checkpoints_of_a_layout_that_needs_none_change_nothing() -> None:
    assert build_manifest(replace(FULL, checkpoint_every_chunks=2), 500).digest == build_manifest(FULL, 500).digest


def test_digest_depends_on_every_part_of_the_layout() -> None:
    first = MIXED.tensors[0]
    variants = [
        MIXED,
        replace(MIXED, prefill_chunk_tokens=128),
        replace(MIXED, version=2),
        CHECKPOINTED,
        replace(MIXED, tensors=MIXED.tensors[1:]),
        replace(MIXED, tensors=MIXED.tensors[::-1]),
        *(
            replace(MIXED, tensors=(replace(first, **change), *MIXED.tensors[1:]))
            for change in (
                {"layer": 7},
                {"name": "q"},
                {"kind": TensorKind.LATENT},
                {"dtype": "float16"},
                {"row_shape": (8, 2)},
            )
        ),
    ]
    digests = {build_manifest(layout, 200).digest for layout in variants}
    digests.add(build_manifest(MIXED, 201).digest)
    assert len(digests) == len(variants) + 1
    assert build_manifest(MIXED, 200).digest == build_manifest(replace(MIXED), 200).digest


def test_no_tokens_make_no_manifest() -> None:
    with pytest.raises(InvalidRequestError):
        build_manifest(FULL, 0)


@given(st.integers(1, 1000))
def test_rows_of_several_tokens_move_whole(num_tokens: int) -> None:
    layout = KVLayout(
        (
            TensorLayout(0, "kv", TensorKind.FULL, "uint8", (96,), row_tokens=16),
            TensorLayout(1, "kv", TensorKind.WINDOW, "uint8", (96,), window_tokens=40, row_tokens=16),
        ),
        64,
    )
    manifest = build_manifest(layout, num_tokens)
    rows = -(-num_tokens // 16)
    assert sum(p.nbytes for p in manifest.pieces if p.tensor == 0) == rows * 96
    window = next(p for p in manifest.pieces if p.tensor == 1)
    assert window.nbytes == (rows - max(0, num_tokens - 40) // 16) * 96


def test_prefill_chunk_that_cuts_rows_is_refused() -> None:
    layout = KVLayout((TensorLayout(0, "kv", TensorKind.FULL, "uint8", (96,), row_tokens=48),), 64)
    with pytest.raises(ModelUnsupportedError, match="whole number of rows of 48"):
        build_manifest(layout, 10)
