"""What vLLM says of its prefix cache (its KV events, over ZMQ), told in the terms of `engine.blocks`.

vLLM's blocks are smaller than a prefill chunk and hashed its own way. Each carries its tokens and the block before it,
so a chunk's key is computed when its last block is stored, and taken back as soon as any of its blocks is gone. Blocks
of unknown parents, of prompts with images or adapters, and of other places than the accelerator's memory are left out.
A gap in vLLM's numbering empties the ledger: what is told afterwards counts again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import Any

import msgspec
import structlog

from farfill.engine.blocks import BlockLedger
from farfill.kv.hashing import chain_key, root_key

log = structlog.get_logger(__name__)

EVENTS_SOCKET = "events.sock"
POLL_MS = 200
_ON_DEVICE = (None, "GPU")

BlockHash = bytes | int


class _Stored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


_decode = msgspec.msgpack.Decoder(_Batch).decode


@dataclass(slots=True)
class _Block:
    """`depth` tokens up to its end; `base` is the key of the last whole chunk before it; `key` of the one it ends."""

    parent: BlockHash | None
    tokens: bytes
    depth: int
    base: bytes
    key: bytes | None = None
    chunk: bytes | None = None


class VllmBlocks:
    """Pure: feed numbered batches; `ledger` follows."""

    def __init__(self, chunk_tokens: int) -> None:
        self.ledger = BlockLedger(chunk_tokens, sparse=False)
        self._chunk_tokens = chunk_tokens
        self._blocks: dict[BlockHash, _Block] = {}
        self._members: dict[bytes, list[BlockHash]] = {}
        self._next: int | None = None

    def feed(self, seq: int, payload: bytes) -> None:
        """Batch number `seq`. A batch that cannot be read empties the ledger, as a gap does."""
        try:
            batch = _decode(payload)
        except msgspec.DecodeError as error:
            log.warning("vllm_block_events_unreadable", error=str(error))
            self._clear()
            return
        if self._next is not None and seq != self._next:
            log.warning("vllm_block_events_missed", expected=self._next, got=seq)
            self._clear()
        self._next = seq + 1
        for event in batch.events:
            if isinstance(event, _Cleared):
                self._clear()
            elif event.medium in _ON_DEVICE and not event.group_idx:
                if isinstance(event, _Stored):
                    self._stored(event)
                else:
                    self._removed(event.block_hashes)

    def _clear(self) -> None:
        self._blocks.clear()
        self._members.clear()
        self.ledger.cleared()

    def _stored(self, event: _Stored) -> None:
        size = event.block_size
        if self._chunk_tokens % size or event.lora_id is not None or event.lora_name is not None:
            return
        parent = event.parent_block_hash
        if parent is not None and parent not in self._blocks:
            return
        for number, name in enumerate(event.block_hashes):
            salt = _salt_of(event, number, first=parent is None)
            if salt is None:
                return
            tokens = event.token_ids[number * size : (number + 1) * size]
            before = None if parent is None else self._blocks[parent]
            base = root_key(salt) if before is None else before.key or before.base
            depth = size + (0 if before is None else before.depth)
            self._blocks[name] = _Block(parent, pack(f"<{size}I", *tokens), depth, base)
            if depth % self._chunk_tokens == 0:
                self._complete(name)
            parent = name

    def _complete(self, name: BlockHash) -> None:
        """The block ends a chunk: gather the chunk's tokens, first one first."""
        members: list[BlockHash] = []
        parts: list[bytes] = []
        at: BlockHash | None = name
        wanted = self._chunk_tokens * 4
        while wanted > 0 and at is not None and (block := self._blocks.get(at)) is not None:
            members.append(at)
            parts.append(block.tokens)
            wanted -= len(block.tokens)
            at = block.parent
        if wanted:
            return
        last = self._blocks[name]
        key = last.key = chain_key(last.base, b"".join(reversed(parts)))
        for member in members:
            self._blocks[member].chunk = key
        self._members[key] = members
        self.ledger.stored((key,))

    def _removed(self, names: Sequence[BlockHash]) -> None:
        gone: list[bytes] = []
        for name in names:
            block = self._blocks.pop(name, None)
            if block is not None and block.chunk is not None and self._members.pop(block.chunk, None) is not None:
                gone.append(block.chunk)
        self.ledger.removed(gone)


def _salt_of(event: _Stored, number: int, *, first: bool) -> str | None:
    """The tenant's salt, which the first block carries; None: there is something else behind these tokens."""
    keys = [] if event.extra_keys is None else event.extra_keys[number] or []
    if first and number == 0 and len(keys) == 1 and isinstance(keys[0], str):
        return keys[0]
    return "" if not keys else None


class VllmBlockFeed:
    """Reads vLLM's events on a thread of its own, from `start` to `close`."""

    def __init__(self, socket: Path, blocks: VllmBlocks) -> None:
        self._endpoint = f"ipc://{socket}"
        self._blocks = blocks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="farfill-vllm-blocks", daemon=True)

    def start(self) -> None:
        """Begin to listen; vLLM may start later."""
        self._thread.start()

    def close(self) -> None:
        """Stop. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _read(self) -> None:
        import zmq  # pyright: ignore[reportMissingImports] -- vLLM's environment has it, others need not

        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._endpoint)
            while not self._stop.is_set():
                if socket.poll(POLL_MS):
                    parts = socket.recv_multipart()
                    if len(parts) == 3:
                        self._blocks.feed(int.from_bytes(parts[1], "big"), parts[2])
