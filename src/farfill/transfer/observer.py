"""What the transfer plane tells about itself while it works. Telemetry turns it into metrics."""

from __future__ import annotations

from typing import Protocol


class TransferObserver(Protocol):
    """Called from connection threads; must not block. Reasons, codecs and kinds of tensors are stable label values."""

    def chunk_sent(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None: ...

    def chunk_received(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None: ...

    def resent(self, reason: str) -> None:
        """A chunk must travel again."""
        ...

    def dropped(self, reason: str) -> None:
        """A chunk arrived that nobody needs (any more)."""
        ...

    def refused(self, reason: str) -> None:
        """A connection or a transfer was refused, by this side or the other."""
        ...

    def connections(self, peer: str, count: int) -> None:
        """How many connections to `peer` stand now."""
        ...

    def link(self, peer: str, rate_bytes_per_s: float | None, rtt_s: float | None) -> None:
        """The estimates of the link to `peer` changed."""
        ...

    def path(self, peer: str, rtt_s: float, segments_resent: int, delivery_bytes_per_s: float) -> None:
        """What TCP measured on all connections to `peer`; `segments_resent` since the last call."""
        ...


class SilentObserver:
    """Listens to nothing."""

    def chunk_sent(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        pass

    def chunk_received(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        pass

    def resent(self, reason: str) -> None:
        pass

    def dropped(self, reason: str) -> None:
        pass

    def refused(self, reason: str) -> None:
        pass

    def connections(self, peer: str, count: int) -> None:
        pass

    def link(self, peer: str, rate_bytes_per_s: float | None, rtt_s: float | None) -> None:
        pass

    def path(self, peer: str, rtt_s: float, segments_resent: int, delivery_bytes_per_s: float) -> None:
        pass
