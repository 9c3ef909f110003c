"""vLLM's paged cache as a Farfill layout: a row is a block, because only whole blocks mean the same elsewhere.

Inside a block the bytes are in whatever order vLLM's backend likes; the fingerprint makes sure that both sides like the
same. Prefill chunks are whole numbers of blocks of every group.
"""

from __future__ import annotations

from math import lcm

from farfill.core.errors import ModelUnsupportedError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.engine.vllm.messages import CacheTensor, Hello


def layout_of(hellos: list[Hello], chunk_tokens: int) -> KVLayout:
    """The layout of an engine from what its ranks said, in order of rank.

    `chunk_tokens` is rounded up to whole blocks. Raises ModelUnsupportedError when there is nothing to move.
    """
    blocks = [t.block_tokens for hello in hellos for t in hello.tensors if t.block_tokens]
    step = lcm(*blocks) if blocks else 1
    if any(hello.tensors != hellos[0].tensors for hello in hellos):
        raise ModelUnsupportedError("vLLM's ranks keep different caches (pipeline parallelism is not supported)")
    first = hellos[0] if hellos else None
    tensors = () if first is None else tuple(part for t in first.tensors for part in _tensors(t, first.ranks))
    if not tensors:
        raise ModelUnsupportedError("vLLM keeps no cache for this model")
    return KVLayout(tensors, -(-chunk_tokens // step) * step)


def places_of(hello: Hello) -> list[tuple[int, int]]:
    """For each tensor of this rank: which tensor of the layout it is or is part of, and from which byte of a row on."""
    found: list[tuple[int, int]] = []
    index = 0
    for tensor in hello.tensors:
        if tensor.by_head:
            found.append((index, hello.rank * tensor.block_bytes))
            index += 1
        else:
            found.append((index + hello.rank, 0))
            index += hello.ranks
    return found


def ranks_of(hello: Hello) -> tuple[int, ...]:
    """For each tensor of the layout: how many ranks have a part of it."""
    return tuple(
        count for tensor in hello.tensors for count in ([hello.ranks] if tensor.by_head else [1] * hello.ranks)
    )


def _tensors(tensor: CacheTensor, ranks: int) -> list[TensorLayout]:
    """By heads, all ranks together have what one would have: the layout does not tell how many there are."""
    if tensor.by_head:
        return [_tensor(tensor, tensor.name, tensor.block_bytes * ranks)]
    names = [tensor.name] if ranks == 1 else [f"{tensor.name}.rank{rank}of{ranks}" for rank in range(ranks)]
    return [_tensor(tensor, name, tensor.block_bytes) for name in names]


def _tensor(tensor: CacheTensor, name: str, row_bytes: int) -> TensorLayout:
    return TensorLayout(
        tensor.layer,
        name,
        TensorKind(tensor.kind),
        "uint8",
        (row_bytes,),
        window_tokens=tensor.window_tokens,
        row_tokens=tensor.block_tokens or 1,
    )


def identity_of(hello: Hello) -> tuple[object, ...]:
    """All that decides what a block's bytes mean, the model and the layout aside."""
    images = (hello.images,) if hello.images else ()
    return ("vllm", hello.cache_version, hello.vllm_version, hello.platform, hello.dtype, *images)
