"""A sequence's KV in the memory of several ranks: the same bytes whatever their number, here and on the other side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.engine.torch.kv import KVSpec, TorchKV
from farfill.engine.torch.ranks.shared_kv import SharedKV, SharedSpec, share
from farfill.kv.manifest import build_manifest

CHUNK = 16
DIM = 4
WINDOW = 10
RANKS = (1, 2, 4)


def layout_of(heads: int) -> KVLayout:
    """A full layer, a window layer, latents and a state."""
    row = (heads, DIM)
    return KVLayout(
        (
            TensorLayout(0, "k", TensorKind.FULL, "float32", row),
            TensorLayout(0, "v", TensorKind.FULL, "float32", row),
            TensorLayout(1, "k", TensorKind.WINDOW, "float32", row, WINDOW),
            TensorLayout(1, "v", TensorKind.WINDOW, "float32", row, WINDOW),
            TensorLayout(2, "k", TensorKind.LATENT, "float32", (1, 6)),
            TensorLayout(2, "v", TensorKind.LATENT, "float32", (1, 2)),
            TensorLayout(3, "recurrent0", TensorKind.RECURRENT, "float32", (2, 3)),
        ),
        CHUNK,
    )


def cut_of(heads: int, ranks: int) -> frozenset[int]:
    """What the plan would cut: attention, when heads divide or are divided."""
    return frozenset(range(4)) if heads % ranks == 0 or ranks % heads == 0 else frozenset()


class Site:
    """All ranks' views of one sequence, in one process."""

    def __init__(self, layout: KVLayout, heads: int, ranks: int, capacity: int) -> None:
        self.layout = layout
        specs = [SharedSpec(layout, rank, ranks, cut_of(heads, ranks)) for rank in range(ranks)]
        buffer = np.zeros(specs[0].buffer_bytes(capacity), np.uint8)
        self.views = [SharedKV(spec, capacity, buffer) for spec in specs]
        self.specs = specs

    def step(self, values: Sequence[torch.Tensor], start: int, end: int) -> None:
        """Every rank adds its heads of tokens [start, end), one rank after the other."""
        for view, spec in zip(self.views, self.specs, strict=True):
            for layer in range(3):
                parts = []
                for index in (2 * layer, 2 * layer + 1):
                    part = spec.shares[index]
                    heads = values[index][start:end, part.start : part.end]
                    parts.append(heads.transpose(0, 1).unsqueeze(0))
                rows = view.layers[layer].rows
                assert rows is not None
                rows.append(*parts)
            view.layers[3].recurrent[0].copy_(values[6][end - 1 : end])
            view.tokens = end

    def seen(self, index: int) -> torch.Tensor:
        """[tokens, heads, dim] as the ranks together see it; ranks that see the same head must agree."""
        kind = self.layout.tensors[index]
        found: dict[int, torch.Tensor] = {}
        for view, spec in zip(self.views, self.specs, strict=True):
            part, rows = spec.shares[index], view.layers[kind.layer].rows
            assert rows is not None
            buffer = rows.key_rows if kind.name == "k" else rows.value_rows
            first, last = rows.span(*span_of(kind, view.tokens), attached=True)
            for head in range(part.start, part.end):
                column = buffer[first:last, head - part.start]
                assert torch.equal(found.setdefault(head, column), column)
        return torch.stack([found[head] for head in range(kind.row_shape[0])], dim=1)

    def exported(self, tokens: int) -> list[bytes]:
        """The pieces as rank 0 sends them."""
        return [
            bytes(self.views[0].read(piece.tensor, piece.start_token, piece.end_token))
            for piece in build_manifest(self.layout, tokens).pieces
        ]

    def imported(self, tokens: int, content: Sequence[bytes]) -> None:
        for piece, data in zip(build_manifest(self.layout, tokens).pieces, content, strict=True):
            self.views[0].place(piece.tensor, piece.start_token, piece.end_token)[:] = data
        for view in self.views:
            view.attach(tokens)


def span_of(tensor: TensorLayout, tokens: int) -> tuple[int, int]:
    return max(0, tokens - tensor.window_tokens) if tensor.window_tokens else 0, tokens


def made_up(layout: KVLayout, tokens: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((tokens, *tensor.row_shape), generator=generator) for tensor in layout.tensors]


@settings(max_examples=12)
@given(
    heads=st.sampled_from([1, 2, 3, 4, 8]),
    tokens=st.integers(1, 120),
    more=st.integers(0, 90),
    seed=st.integers(0, 1 << 16),
)
@pytest.mark.parametrize("there", RANKS)
@pytest.mark.parametrize("here", RANKS)
def test_kv_of_any_number_of_ranks_goes_on_at_any_other(
    here: int, there: int, heads: int, tokens: int, more: int, seed: int
) -> None:
    layout = layout_of(heads)
    total = tokens + more
    values = made_up(layout, total, seed)
    source, target, alone = (Site(layout, heads, ranks, total) for ranks in (here, there, 1))
    for site in (source, alone):
        for start in range(0, tokens, CHUNK):
            site.step(values, start, min(start + CHUNK, tokens))
    content = source.exported(tokens)
    assert content == alone.exported(tokens), "the layout on the wire knows nothing of ranks"
    target.imported(tokens, content)
    for token in range(tokens, total):
        target.step(values, token, token + 1)
    for index, tensor in enumerate(layout.tensors[:6]):
        start, end = span_of(tensor, total)
        assert torch.equal(target.seen(index), values[index][start:end])
    for view in target.views:
        assert torch.equal(view.layers[3].recurrent[0], values[6][total - 1 : total])


def test_a_rank_ahead_of_another_does_not_disturb_it() -> None:
    layout = layout_of(3)
    site = Site(layout, 3, 2, 200)
    values = made_up(layout, 200, seed=1)
    site.step(values, 0, 80)
    first, second = site.views
    rows = first.layers[1].rows
    assert rows is not None
    for token in range(80, 160):
        rows.append(*(values[i][token : token + 1].transpose(0, 1).unsqueeze(0) for i in (2, 3)))
    other = second.layers[1].rows
    assert other is not None
    start, end = other.span(80 - WINDOW, 80, attached=True)
    assert torch.equal(other.key_rows[start:end], values[2][80 - WINDOW : 80])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_head_is_in_the_buffer_once(heads: int, ranks: int) -> None:
    owned = [share(rank, ranks, heads, cut=True) for rank in range(ranks)]
    assert sorted(h for part in owned if part.owned for h in range(part.start, part.end)) == list(range(heads))


def test_memory_counts_the_copies_of_all_ranks() -> None:
    layout = layout_of(2)
    plain, capacity = KVSpec(layout, torch.device("cpu")), 100
    cut_evenly = SharedSpec(layout, 0, 2, cut_of(2, 2))
    latents_and_state = capacity * (6 + 2) * 4 + 2 * 3 * 4
    assert cut_evenly.kv_bytes(capacity) == plain.kv_bytes(capacity) + latents_and_state
    full_heads, window_rows = capacity * 2 * DIM * 4, plain.rows(layout.tensors[2], capacity) * 2 * DIM * 4
    few = SharedSpec(layout, 0, 4, cut_of(2, 4))
    # Each of two heads is on two ranks, one of which has a copy.
    copies = 2 * full_heads + 2 * window_rows + 3 * latents_and_state
    assert few.kv_bytes(capacity) == plain.kv_bytes(capacity) + copies


def test_one_rank_alone_keeps_what_a_plain_sequence_keeps() -> None:
    layout = layout_of(2)
    site, plain = Site(layout, 2, 1, 50), TorchKV(KVSpec(layout, torch.device("cpu")), 50)
    assert not site.specs[0].has_copies
    content = [bytes([index % 251]) * 4 for index in range(3)]
    for kv in (site.views[0], plain):
        for index, data in enumerate(content):
            kv.place(0, index, index + 1)[:4] = data
        kv.attach(3)
    assert bytes(site.views[0].read(0, 0, 3)) == bytes(plain.read(0, 0, 3))
