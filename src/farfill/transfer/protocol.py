"""The transfer plane as workers see it: one side offers pieces, the other gets them into a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from farfill.core.cluster import FallbackReason
from farfill.core.ticket import Ticket
from farfill.engine.protocol import KVSlot
from farfill.kv.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ChunkRetry:
    """Chunk number `chunk` was sent again for `reason`, `at_s` after the transfer began."""

    chunk: int
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """One side's account of one transfer. Durations come from that side's monotonic clock.

    Sender: `first_byte_s` counts from `begin` to the first chunk leaving; `total_s` to the last
    acknowledgement; `after_prefill_s` is the part of it after `finish` was called (what prefill did not
    hide); `link_*` is what the link was measured to be by then, None: not yet; `retries` has the
    first of them. Receiver: counts from `expect` to the first chunk, and to the complete set.
    """

    raw_bytes: int
    wire_bytes: int
    chunks: int
    resent_chunks: int
    codec: str
    connections: int
    first_byte_s: float
    total_s: float
    after_prefill_s: float
    link_bytes_per_s: float | None = None
    link_rtt_s: float | None = None
    retries: tuple[ChunkRetry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveResult:
    """How an expected transfer ended. `prefix_tokens` may be used; all N-1 when `complete`.

    `pieces` are complete and verified, those held before included: another sender need not bring them.

    When it returns, the transfer is fenced: no byte will be written into the slot any more.
    """

    complete: bool
    prefix_tokens: int
    failure: FallbackReason
    detail: str
    stats: TransferStats
    pieces: frozenset[int] = frozenset()


class ExpectedTransfer(Protocol):
    """A transfer the decode side awaits."""

    async def wait(self) -> ReceiveResult:
        """Returns once; on silence longer than the timeout, a terminal failure, or the complete set."""
        ...

    def fail(self, reason: FallbackReason, detail: str) -> None:
        """End it now from this side (the prefill leg failed, the client left): fences, tells the sender."""
        ...


class TransferReceiver(Protocol):
    """Receives KV at a decode worker."""

    @property
    def address(self) -> str:
        """host:port it listens on."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def expect(
        self,
        ticket: Ticket,
        slot: KVSlot,
        *,
        timeout_s: float,
        source: str = "",
        held: frozenset[int] | None = None,
    ) -> ExpectedTransfer:
        """Announce a transfer. An OPEN that came earlier is held for it and served now.

        `source` is where the sender lets this side in, when this side dials; empty when the sender dials. `held` are
        pieces that need not come, the slot's own unless told: an earlier sender's are among them.
        """
        ...

    def held_transfers(self) -> int:
        """Transfers with a slot not yet fenced; 0 when idle (the leak counter)."""
        ...


class OutgoingTransfer(Protocol):
    """A transfer being pushed from a prefill worker. All methods but `wait` may be called on any thread."""

    def offer(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Queue pieces; never blocks. Bytes must stay stable until `wait` returned."""
        ...

    def keepalive(self) -> None:
        """Tell the other side that prefill is alive though no bytes flow yet (rate limited inside)."""
        ...

    def finish(self) -> None:
        """All pieces have been offered."""
        ...

    def fail(self, reason: FallbackReason, detail: str) -> None:
        """Terminal failure on this side; the other side is told at once."""
        ...

    async def wait(self) -> TransferStats:
        """Returns when the receiver confirmed the complete set; raises TransferError otherwise."""
        ...


class TransferSender(Protocol):
    """Pushes KV from a prefill worker over pooled connections."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def begin(
        self, ticket: Ticket, token: str, address: str, manifest: Manifest, *, timeout_s: float
    ) -> OutgoingTransfer:
        """Open a transfer to the decode worker at `address` (ignored when decode workers dial).

        `token` is the signed ticket as received.
        """
        ...
