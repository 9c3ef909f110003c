"""Engine callbacks carried from the engine's thread to the event loop.

Sinks never block the engine: events cross with `call_soon_threadsafe` and wait in queues whose length the
request itself bounds (at most max_tokens × n events).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from farfill.core.cluster import FallbackReason
from farfill.core.errors import CancelledWorkError, FarfillError
from farfill.engine.protocol import PrefillStats, TokenEvent
from farfill.transfer.protocol import OutgoingTransfer


class TransferSink:
    """A `PrefillSink` that pushes every finished prefill chunk into a transfer as it appears."""

    def __init__(self, transfer: OutgoingTransfer, loop: asyncio.AbstractEventLoop) -> None:
        self._transfer = transfer
        self._loop = loop
        self.done: asyncio.Future[PrefillStats] = loop.create_future()
        # Whoever gave the request up does not wait for how its prefill ends.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    def progress(self) -> None:
        self._transfer.keepalive()

    def pieces_ready(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self._transfer.offer(pieces)

    def finished(self, stats: PrefillStats) -> None:
        self._transfer.finish()
        self._loop.call_soon_threadsafe(self._settle, stats, None)

    def failed(self, error: Exception) -> None:
        if not isinstance(error, CancelledWorkError):
            self._transfer.fail(FallbackReason.PREFILL_FAILED, str(error))
        self._loop.call_soon_threadsafe(self._settle, None, error)

    def _settle(self, stats: PrefillStats | None, error: Exception | None) -> None:
        if self.done.done():
            return
        if stats is not None:
            self.done.set_result(stats)
        elif error is not None:
            self.done.set_exception(error)


class TokenQueue:
    """A `TokenSink` read with `next_events`: everything that is there, or wait for more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: list[TokenEvent] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self.stats: PrefillStats | None = None

    def prefilled(self, stats: PrefillStats) -> None:
        self._loop.call_soon_threadsafe(self._on_prefilled, stats)

    def token(self, event: TokenEvent) -> None:
        self._loop.call_soon_threadsafe(self._on_token, event)

    def failed(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._on_failed, error)

    def _on_prefilled(self, stats: PrefillStats) -> None:
        self.stats = stats

    def _on_token(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._changed.set()

    def _on_failed(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    async def next_events(self) -> list[TokenEvent]:
        """At least one event; raises the engine's error once all events before it were read."""
        while not self._events:
            if self._error is not None:
                raise _as_farfill(self._error)
            self._changed.clear()
            await self._changed.wait()
        events, self._events = self._events, []
        return events


def _as_farfill(error: Exception) -> FarfillError:
    if isinstance(error, FarfillError):
        return error
    return FarfillError(str(error), reason="engine_error", side="decode")
