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
    tensors = tuple(_tensor(t, hello.rank, hello.ranks) for hello in hellos for t in hello.tensors)
    if any(hello.tensors != hellos[0].tensors for hello in hellos):
        raise ModelUnsupportedError("vLLM's ranks keep different caches (pipeline parallelism is not supported)")
    if not tensors:
        raise ModelUnsupportedError("vLLM keeps no cache for this model")
    return KVLayout(tensors, -(-chunk_tokens // step) * step)


def _tensor(tensor: CacheTensor, rank: int, ranks: int) -> TensorLayout:
    name = tensor.name if ranks == 1 else f"{tensor.name}.rank{rank}of{ranks}"
    return TensorLayout(
        tensor.layer,
        name,
        TensorKind(tensor.kind),
        "uint8",
        (tensor.block_bytes,),
        window_tokens=tensor.window_tokens,
        row_tokens=tensor.block_tokens or 1,
    )


def identity_of(hello: Hello) -> tuple[object, ...]:
    """All that decides what a block's bytes mean, the model aside."""
    return ("vllm", hello.cache_version, hello.vllm_version, hello.platform, hello.dtype, hello.ranks)
