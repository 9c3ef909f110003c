"""What the transfer plane tells about itself while it works. Telemetry turns it into metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import structlog

_log = structlog.get_logger(__name__)


class TransferObserver(Protocol):
    """Called from connection threads; must not block. Reasons, codecs and kinds of tensors are stable label values."""

    def chunk_sent(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None: ...

    def chunk_confirmed(self, connection: int, wire_bytes: int) -> None:
        """The receiver holds a chunk that was sent; it said so on that connection of the link."""
        ...

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

    def path(
        self, peer: str, rtt_s: float, segments_sent: int, segments_resent: int, delivery_bytes_per_s: float
    ) -> None:
        """What TCP measured on all connections to `peer`; segments since the last call, all and sent again."""
        ...


class SilentObserver:
    """Listens to nothing."""

    def chunk_sent(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        pass

    def chunk_confirmed(self, connection: int, wire_bytes: int) -> None:
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

    def path(
        self, peer: str, rtt_s: float, segments_sent: int, segments_resent: int, delivery_bytes_per_s: float
    ) -> None:
        pass


class GuardedObserver:
    """Passes on to another observer, and survives it: a failure to count breaks nothing. Each kind is logged once."""

    def __init__(self, observer: TransferObserver | None) -> None:
        self._observer = observer or SilentObserver()
        self._logged: set[tuple[type[Exception], str]] = set()

    def chunk_sent(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        self._survive(self._observer.chunk_sent, raw_bytes, wire_bytes, codec, kind)

    def chunk_confirmed(self, connection: int, wire_bytes: int) -> None:
        self._survive(self._observer.chunk_confirmed, connection, wire_bytes)

    def chunk_received(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        self._survive(self._observer.chunk_received, raw_bytes, wire_bytes, codec, kind)

    def resent(self, reason: str) -> None:
        self._survive(self._observer.resent, reason)

    def dropped(self, reason: str) -> None:
        self._survive(self._observer.dropped, reason)

    def refused(self, reason: str) -> None:
        self._survive(self._observer.refused, reason)

    def connections(self, peer: str, count: int) -> None:
        self._survive(self._observer.connections, peer, count)

    def link(self, peer: str, rate_bytes_per_s: float | None, rtt_s: float | None) -> None:
        self._survive(self._observer.link, peer, rate_bytes_per_s, rtt_s)

    def path(
        self, peer: str, rtt_s: float, segments_sent: int, segments_resent: int, delivery_bytes_per_s: float
    ) -> None:
        self._survive(self._observer.path, peer, rtt_s, segments_sent, segments_resent, delivery_bytes_per_s)

    def _survive(self, tell: Callable[..., None], *values: Any) -> None:
        try:
            tell(*values)
        except Exception as error:  # whatever it is, the bytes on their way are worth more
            kind = (type(error), tell.__name__)
            if kind not in self._logged:
                self._logged.add(kind)
                _log.exception("transfer_observer_failed", call=tell.__name__)
