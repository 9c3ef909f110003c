"""Whole blocks of vLLM's cache, to and from a request's file. Runs in vLLM's worker process, between its steps."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import structlog
import torch
import vllm
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from farfill.core.layout import KVLayout, TensorKind
from farfill.engine.vllm.layout import layout_of, places_of
from farfill.engine.vllm.messages import (
    CACHE_VERSION,
    LINE_SOCKET,
    Alive,
    Begun,
    CacheTensor,
    Exported,
    ExportFailed,
    Hello,
    Loaded,
    LoadFailed,
    Message,
    piece_offsets,
    send,
)
from farfill.kv.manifest import Manifest, Piece, build_manifest

ALIVE_S = 0.1

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Export:
    """Tokens [start, end) of a prompt of `num_tokens` are in these blocks after the step; ids per group by position."""

    key: str
    file: str
    num_tokens: int
    start: int
    end: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Import:
    """Tokens [local_tokens, valid_tokens) of a prompt of `num_tokens` go into these blocks; ids per group by position.

    Every rank has a name of its own for the file (`rank_file`), which it removes. `waits`: the request's id where vLLM
    has it wait until it is told that its KV is there.
    """

    key: str
    file: str
    num_tokens: int
    local_tokens: int
    valid_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    waits: str = ""


def rank_file(file: str, rank: int) -> str:
    """The name that keeps a file for one worker process, also when the engine removes its own meanwhile."""
    return f"{file}.rank{rank}"


@dataclass(frozen=True)
class _Source:
    """A tensor in vLLM's memory: block b is `rows[b]`, bytes. It is tensor `tensor` of the layout, or from byte `start`
    of each row on a part of it. Pairs are (row of a piece, block).
    """

    group: int
    block_tokens: int
    rows: torch.Tensor
    tensor: int
    start: int

    def read(self, pairs: list[tuple[int, int]], data: torch.Tensor) -> None:
        """Blocks into `data`, the rows of a piece; one copy off the device for all."""
        for first, blocks in _runs(pairs):
            found = self.rows[torch.tensor(blocks, device=self.rows.device)]
            self._place(data, first, len(blocks)).copy_(found)

    def write(self, pairs: list[tuple[int, int]], data: torch.Tensor) -> None:
        """Rows of a piece into blocks."""
        for first, blocks in _runs(pairs):
            found = self._place(data, first, len(blocks))
            self.rows[torch.tensor(blocks, device=self.rows.device)] = found.to(self.rows.device)

    def _place(self, data: torch.Tensor, first: int, count: int) -> torch.Tensor:
        return data[first : first + count, self.start : self.start + self.rows.shape[1]]


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """(first row, blocks) of each run of neighbouring rows."""
    start = 0
    for end in range(1, len(pairs) + 1):
        if end == len(pairs) or pairs[end][0] != pairs[end - 1][0] + 1:
            yield pairs[start][0], [block for _, block in pairs[start:end]]
            start = end


@lru_cache(maxsize=64)
def _plan(layout: KVLayout, num_tokens: int) -> tuple[Manifest, list[int], int]:
    """The manifest of a prompt, where its pieces begin in the file, and the file's length."""
    manifest = build_manifest(layout, num_tokens)
    return manifest, *piece_offsets(manifest)


def describe_cache(vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any]) -> Hello:
    """What the cache is made of. Raises TypeError for what Farfill cannot move."""
    parallel = vllm_config.parallel_config
    tensors = tuple(
        tensor
        for name, spec in _layers(kv_cache_config)
        for tensor in _describe(name, spec, kv_caches[name], kv_cache_config.num_blocks)
    )
    return Hello(
        cache_version=CACHE_VERSION,
        vllm_version=vllm.__version__,
        platform=_platform(),
        dtype=str(vllm_config.cache_config.cache_dtype) + "/" + str(vllm_config.model_config.dtype),
        rank=parallel.rank,
        ranks=parallel.tensor_parallel_size,
        num_blocks=kv_cache_config.num_blocks,
        max_model_len=vllm_config.model_config.max_model_len,
        tensors=tensors,
        model=_full_path(str(vllm_config.model_config.model)),
        kv_bytes=sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors),
        prioritizes=vllm_config.scheduler_config.policy == "priority",
        grammar_backend=str(vllm_config.structured_outputs_config.backend),
        tells_begun=True,
        images=_image_options(vllm_config.model_config),
    )


def _image_options(model_config: Any) -> str:
    """What an operator told the model's image processor; "" where it does what its folder says."""
    options = getattr(model_config.multimodal_config, "mm_processor_kwargs", None)
    return json.dumps(options, sort_keys=True, default=str) if options else ""


def _full_path(model: str) -> str:
    """Relative paths are this process's."""
    return os.path.realpath(model) if os.path.isdir(model) else model


def _layers(kv_cache_config: Any) -> Iterator[tuple[str, Any]]:
    """(name, spec) of each layer, in the order of the groups."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            yield name, spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _describe(name: str, spec: Any, tensors: Any, num_blocks: int) -> list[CacheTensor]:
    layer = _layer_index(name)
    if isinstance(spec, MambaSpec):
        kind, tokens, window = TensorKind.RECURRENT, 0, 0
    elif isinstance(spec, SlidingWindowSpec):
        kind, tokens, window = TensorKind.WINDOW, spec.block_size, spec.sliding_window - 1
    elif isinstance(spec, AttentionSpec) and not isinstance(spec, ChunkedLocalAttentionSpec):
        kind, tokens, window = TensorKind.FULL, spec.block_size, 0
    else:
        raise TypeError(f"{name} keeps a {type(spec).__name__}, which Farfill cannot move")
    sizes = [rows.shape[1] for rows in _rows(tensors, num_blocks)]
    by_head = kind is not TensorKind.RECURRENT and _by_head(spec, tensors)
    return [
        CacheTensor(layer, name if len(sizes) == 1 else f"{name}.{part}", str(kind), tokens, size, window, by_head)
        for part, size in enumerate(sizes)
    ]


def _by_head(spec: Any, tensor: Any) -> bool:
    """Whether a block of vLLM's CPU backend, [heads, tokens, key and value], has one head after the other."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or tensor.dim() != 4:
        return False
    heads, tokens = getattr(spec, "num_kv_heads", 0), spec.block_size
    return not isinstance(spec, MLAAttentionSpec) and tuple(tensor.shape[1:3]) == (heads, tokens)


def _layer_index(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else 0


def _platform() -> str:
    """The instruction set decides how vLLM's CPU backend packs a block; on GPUs the attention backend does."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return f"{current_platform.device_type}:{current_platform.get_device_name()}"
    amx = torch.cpu._is_amx_tile_supported()
    return f"cpu:{'amx' if amx else torch.backends.cpu.get_cpu_capability()}"


def _rows(tensors: Any, num_blocks: int) -> list[torch.Tensor]:
    """A layer's tensors as bytes, [block, bytes of a block] each; views, nothing is copied."""
    found: list[torch.Tensor] = []
    for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
        parts = [tensor]
        if (
            tensor.shape[0] == 2
            and tensor.dim() > 1
            and tensor.shape[1] % num_blocks == 0 != tensor.shape[0] % num_blocks
        ):
            parts = [tensor[0], tensor[1]]  # keys and values apart
        found += [_as_bytes(part, num_blocks) for part in parts]
    return found


def _as_bytes(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Kernels may use smaller blocks than the scheduler: those of one scheduler's block lie together."""
    if tensor.shape[0] % num_blocks:
        raise TypeError(f"a cache tensor of shape {tuple(tensor.shape)} does not have {num_blocks} blocks")
    ratio = tensor.shape[0] // num_blocks
    inner = tensor[0]
    if not inner.is_contiguous():
        raise TypeError(f"a cache tensor with strides {tensor.stride()} has blocks in pieces")
    nbytes = inner.numel() * inner.element_size()
    stride = tensor.stride(0) * tensor.element_size()
    if ratio > 1 and stride != nbytes:
        raise TypeError("kernel blocks with gaps between them")
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (1,), (1,)
    )
    return storage.as_strided((num_blocks, nbytes * ratio), (stride * ratio, 1))


def _layout(hello: Hello, chunk_tokens: int) -> KVLayout:
    """The engine's, with the tensors of all ranks, which are made of the same."""
    return layout_of([msgspec.structs.replace(hello, rank=rank) for rank in range(hello.ranks)], chunk_tokens)


class BlockCopier:
    """One worker's copies. Used by vLLM's worker thread only; remembers nothing of a request from step to step."""

    def __init__(self, kv_cache_config: Any, kv_caches: dict[str, Any], hello: Hello) -> None:
        self._hello = hello
        self._layout: KVLayout = _layout(hello, 1)
        groups = kv_cache_config.kv_cache_groups
        group_of = {name: index for index, group in enumerate(groups) for name in group.layer_names}
        parts = [
            (group_of[name], 0 if isinstance(spec, MambaSpec) else spec.block_size, rows)
            for name, spec in _layers(kv_cache_config)
            for rows in _rows(kv_caches[name], hello.num_blocks)
        ]
        self._sources = {
            tensor: _Source(*part, tensor, start) for part, (tensor, start) in zip(parts, places_of(hello), strict=True)
        }
        self._socket: socket.socket | None = None
        self._told_s = 0.0

    def attach(self, folder: str, chunk_tokens: int) -> None:
        """Open the line to the engine that made `folder`; one to another engine ends. Nobody there: a log line."""
        self.close()
        self._layout = _layout(self._hello, chunk_tokens)
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(os.path.join(folder, LINE_SOCKET))
        except OSError as error:
            line.close()
            _log.warning("engine_unreachable", folder=folder, detail=str(error))
            return
        self._socket = line
        self._tell(self._hello)

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def alive(self) -> None:
        """Tell now and then that steps end."""
        if time.monotonic() - self._told_s > ALIVE_S:
            self._tell(Alive())

    def save(self, export: Export) -> None:
        """Copy what the step completed, and tell of pieces that are whole."""
        try:
            done = self._save(export)
        except (OSError, ValueError, RuntimeError, LookupError) as error:
            # The engine removed the file because nobody wants it any more, or something is wrong: never a broken step.
            _log.warning("kv_export_failed", key=export.key, detail=str(error))
            self._tell(ExportFailed(export.key, str(error)))
            return
        if done:
            self._tell(Exported(export.key, tuple(done), self._hello.rank))

    def load(self, item: Import) -> bool:
        """Copy a request's file into its blocks. False: something is wrong, and none of them may be used."""
        try:
            self._load(item)
        except (OSError, ValueError, RuntimeError, LookupError) as error:
            _log.warning("kv_load_failed", key=item.key, detail=str(error))
            self._tell(LoadFailed(item.key, str(error)))
            return False
        self._tell(Loaded(item.key, self._hello.rank))
        return True

    def refused(self, key: str, detail: str) -> None:
        """Tell the engine that the KV of `key` is not used."""
        self._tell(LoadFailed(key, detail, refused=True))

    def begun(self, key: str, cached_tokens: int) -> None:
        """Tell the engine that `key` begins after so many tokens."""
        if self._hello.rank == 0:
            self._tell(Begun(key, cached_tokens))

    def blocks_of(self, item: Import) -> set[int]:
        """The blocks that `item` was to fill, of a cache with one group."""
        (block_tokens,) = {source.block_tokens for source in self._sources.values()}
        (blocks,) = item.block_ids
        return {block for block in blocks[item.local_tokens // block_tokens :] if block}

    def _load(self, item: Import) -> None:
        manifest, offsets, nbytes = _plan(self._layout, item.num_tokens)
        path = rank_file(item.file, self._hello.rank)
        with open(path, "r+b") as file:
            os.unlink(path)
            memory = mmap.mmap(file.fileno(), nbytes)
        with memory:
            data = torch.frombuffer(memory, dtype=torch.uint8)
            for piece in self._own(manifest):
                if piece.start_token < item.valid_tokens or item.valid_tokens == item.num_tokens:
                    self._copy_in(piece, item, manifest, self._rows_of(piece, manifest, data, offsets[piece.index]))

    def _own(self, manifest: Manifest) -> Iterator[Piece]:
        """The pieces that this rank has, or has a part of."""
        return (piece for piece in manifest.pieces if piece.tensor in self._sources)

    @staticmethod
    def _rows_of(piece: Piece, manifest: Manifest, data: torch.Tensor, start: int) -> torch.Tensor:
        """The piece's place in a file as [row, bytes]."""
        row_bytes = manifest.layout.tensors[piece.tensor].row_bytes
        return data[start : start + piece.nbytes].view(-1, row_bytes)

    def _copy_in(self, piece: Piece, item: Import, manifest: Manifest, data: torch.Tensor) -> None:
        source = self._sources[piece.tensor]
        window = manifest.layout.tensors[piece.tensor].kind is TensorKind.WINDOW
        wanted: list[tuple[int, int]] = []
        for row, (position, block) in enumerate(self._blocks_of(piece, item.block_ids[source.group], source)):
            if source.block_tokens and (position + 1) * source.block_tokens <= item.local_tokens:
                continue
            if block is not None:
                wanted.append((row, block))
            elif not window:  # a window's: before what the next token looks at, vLLM has no place for it, nor need
                raise LookupError(f"{item.key}: no block for tokens from {position * source.block_tokens} on")
        source.write(wanted, data)

    def _save(self, export: Export) -> list[int]:
        manifest, offsets, nbytes = _plan(self._layout, export.num_tokens)
        last = export.end >= export.num_tokens
        done: list[int] = []
        with open(export.file, "r+b") as file, mmap.mmap(file.fileno(), nbytes) as memory:
            data = torch.frombuffer(memory, dtype=torch.uint8)
            for piece in self._own(manifest):
                grows = manifest.layout.tensors[piece.tensor].kind.grows
                if not last and not grows:
                    continue
                if grows and (piece.end_token <= export.start or piece.start_token >= export.end):
                    continue  # told of in an earlier step, or to come
                self._copy_out(piece, export, grows, self._rows_of(piece, manifest, data, offsets[piece.index]))
                if last or piece.end_token <= export.end:
                    done.append(piece.index)
        return done

    def _copy_out(self, piece: Piece, export: Export, grows: bool, data: torch.Tensor) -> None:
        source = self._sources[piece.tensor]
        wanted: list[tuple[int, int]] = []
        for row, (position, block) in enumerate(self._blocks_of(piece, export.block_ids[source.group], source)):
            end = min((position + 1) * source.block_tokens, export.num_tokens)
            if grows and not export.start < end <= export.end:
                continue  # left in an earlier step, or not whole yet
            if block is None:
                raise LookupError(f"no block for tokens up to {end}")
            wanted.append((row, block))
        source.read(wanted, data)

    @staticmethod
    def _blocks_of(piece: Piece, ids: tuple[int, ...], source: _Source) -> Iterator[tuple[int, int | None]]:
        """(position, block id) of each row of the piece; None: vLLM has no block there (its null block is 0)."""
        if not source.block_tokens:
            live = [block for block in ids if block]
            yield 0, live[-1] if live else None
            return
        for row in range(piece.start_token // source.block_tokens, -(-piece.end_token // source.block_tokens)):
            yield row, (ids[row] or None) if row < len(ids) else None

    def _tell(self, message: Message) -> None:
        if self._socket is None:
            return
        self._told_s = time.monotonic()
        try:
            send(self._socket, message)
        except OSError as error:
            # The engine is gone and with it all its requests; whoever started vLLM ends it, or attaches anew.
            _log.warning("engine_gone", detail=str(error))
            self.close()
