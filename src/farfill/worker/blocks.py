"""GET /v1/blocks: what this worker's prefix cache holds, and every change of it, to whoever follows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiohttp import web

from farfill.core.errors import InvalidRequestError
from farfill.engine.blocks import BlockLedger
from farfill.wire.blocks import (
    BEAT_S,
    KEYS_PER_FRAME,
    BlocksChanged,
    BlocksHello,
    BlocksSnapshot,
    encode_blocks,
    join_keys,
)
from farfill.wire.control import CONTENT_TYPE

log = structlog.get_logger()

CHANGES_PER_FRAME = 1024
# Changes come in bursts while a prompt is computed: what happens within this time leaves as one frame.
GATHER_S = 0.02


@dataclass(frozen=True, slots=True)
class BlockService:
    """`ledger` None: this engine does not tell, and followers get 400 (no_block_events)."""

    ledger: BlockLedger | None
    generation: str
    _following: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Never ends by itself. A slow follower gets a new snapshot once it is behind what the ledger keeps."""
        if self.ledger is None:
            raise InvalidRequestError("this engine does not tell what its prefix cache holds", reason="no_block_events")
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._following.add(task)
        try:
            response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
            await response.prepare(request)
            hello = BlocksHello(
                generation=self.generation, chunk_tokens=self.ledger.chunk_tokens, sparse=self.ledger.sparse
            )
            await response.write(encode_blocks(hello))
            async with contextlib.aclosing(frames(self.ledger)) as coming:
                async for frame in coming:
                    await response.write(frame)
            return response
        finally:
            self._following.discard(task)

    async def close(self, _: web.Application) -> None:
        """End all streams: the worker stops and waits for nobody who would follow for ever."""
        for task in tuple(self._following):
            task.cancel()


async def frames(ledger: BlockLedger) -> AsyncGenerator[bytes]:
    """A snapshot, then changes as they happen; a snapshot again after a gap."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody follows any more
            loop.call_soon_threadsafe(changed.set)

    stop = ledger.follow(wake)
    try:
        seq: int | None = None
        while True:
            if seq is None:
                seq, keys = ledger.snapshot()
                for at in range(0, max(1, len(keys)), KEYS_PER_FRAME):
                    part = keys[at : at + KEYS_PER_FRAME]
                    last = at + KEYS_PER_FRAME >= len(keys)
                    yield encode_blocks(BlocksSnapshot(seq=seq, first=at == 0, last=last, keys=join_keys(part)))
            changed.clear()
            found = ledger.since(seq, CHANGES_PER_FRAME)
            if found is None:
                log.warning("block_events_missed", seq=seq, latest=ledger.seq)
                seq = None
                continue
            if not found:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await changed.wait()
                        await asyncio.sleep(GATHER_S)
                        continue
            changes = [(str(change.kind), join_keys(change.keys)) for change in found]
            yield encode_blocks(BlocksChanged(first=seq + 1, changes=changes))
            seq += len(found)
    finally:
        stop()
