"""Pushes KV from a prefill worker: one link of pooled connections per decode worker, any number of transfers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import uuid
from threading import Lock

import structlog

from farfill.clock import Clock
from farfill.config.model import KVTransferConfig
from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.core.ticket import Ticket
from farfill.kv.manifest import Manifest
from farfill.telemetry.log_limit import LimitedWarnings
from farfill.transfer.door import Door, ServedSession
from farfill.transfer.grid import propose_chunk_bytes
from farfill.transfer.limits import known_reason, limits_of, liveness_of
from farfill.transfer.link import PeerLink
from farfill.transfer.observer import GuardedObserver, TransferObserver
from farfill.transfer.outgoing import PushedTransfer, SendOptions
from farfill.transfer.protocol import OutgoingTransfer
from farfill.transfer.waiting import until
from farfill.transport.protocol import Transport
from farfill.transport.reactor import Reactor
from farfill.transport.tcp import TlsTcpTransport
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker
from farfill.wire.control import PROTOCOL_VERSION
from farfill.wire.frames import HelloPayload

TICK_S = 0.05
UNUSED_LINK_S = 60.0
LAST_WORDS_S = 0.5
JOIN_S = 5.0
_MIB = 1024 * 1024

_log = structlog.get_logger(__name__)


class KVSender:
    """Implements `TransferSender`. `transport` replaces TCP (tests, other fabrics).

    With `listen` it does not dial: decode workers connect there, and `begin` is given no address.
    """

    def __init__(  # noqa: PLR0917 (a composition root calls it once)
        self,
        identity_name: str,
        fingerprint: str,
        client_ctx: ssl.SSLContext | None,
        config: KVTransferConfig,
        clock: Clock,
        observer: TransferObserver | None = None,
        *,
        transport: Transport | None = None,
        listen: str | None = None,
        server_ctx: ssl.SSLContext | None = None,
    ) -> None:
        self._me = HelloPayload(PROTOCOL_VERSION, fingerprint, identity_name, uuid.uuid4().hex)
        self._transport = transport or TlsTcpTransport(
            client=client_ctx,
            server=server_ctx,
            sealed=config.encryption == "sealed",
            choose_congestion=config.congestion == "auto",
        )
        self._config = config
        self._clock = clock
        self._observer = GuardedObserver(observer)
        self._lock = Lock()
        self._links: dict[tuple[str, str], PeerLink] = {}
        self._retired: list[PeerLink] = []
        self._ticker: asyncio.Task[None] | None = None
        self._closed = False
        self._refusals = LimitedWarnings(_log, "transfer_connection_refused", clock.now_s)
        self._reactor = Reactor("farfill-kv-send")
        self._door: Door | None = None
        if listen is not None:
            self._door = Door(
                listen,
                self._transport,
                self._adopt,
                self._turned_away,
                liveness=liveness_of(config),
                clock=clock,
                reactor=self._reactor,
            )

    @property
    def address(self) -> str:
        """host:port where it lets decode workers in; empty when it dials."""
        return self._door.address if self._door is not None else ""

    async def start(self) -> None:
        """See `TransferSender`. Raises TransportError when the address cannot be bound."""
        if self._door is not None:
            self._door.start()
        self._ticker = asyncio.create_task(self._tick(), name="farfill-kv-send-tick")

    async def close(self) -> None:
        """Fail what is left, tell the peers, and end every thread. Idempotent."""
        self._closed = True
        links = [*self._links.values(), *self._retired]
        for link in links:
            link.fail_all(FallbackReason.PREFILL_LOST, "the prefill worker is shutting down")
        for link in links:
            link.stop()
        if self._door is not None:
            await self._door.close()
        self._refusals.tell_left_out(at_once=True)
        if not await until(lambda: not any(link.alive for link in links), LAST_WORDS_S):
            for link in links:
                link.abort()
            await until(lambda: not any(link.alive for link in links), JOIN_S)
        await until(lambda: not self._reactor.alive, JOIN_S)
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None

    def begin(
        self, ticket: Ticket, token: str, address: str, manifest: Manifest, *, timeout_s: float
    ) -> OutgoingTransfer:
        """See `TransferSender`.

        Raises TransferError once closed, TicketError while a transfer with that ticket is under way.
        """
        if self._closed:
            raise TransferError("the sender is closed", reason=str(FallbackReason.PREFILL_LOST), side="prefill")
        link = self._link("" if self._door is not None else address, ticket.decode)
        config = self._config
        options = SendOptions(
            limits=limits_of(config, timeout_s),
            chunk_bytes=propose_chunk_bytes(
                manifest.total_bytes,
                link.connections,
                min(config.chunk_size_mb * _MIB, link.chunk_limit_bytes),
                link.measured()[0],
            ),
            checksum=config.checksum,
            lossy=config.lossy,
        )
        transfer = PushedTransfer(
            ticket, token, manifest, options, link=link, clock=self._clock, observer=self._observer
        )
        link.add(transfer)
        return transfer

    def use_contexts(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        """Certificates and CAs for connections to come; standing ones, and what moves on them, are left alone."""
        if isinstance(self._transport, TlsTcpTransport):
            self._transport.replace_contexts(server=server, client=client)

    def active_transfers(self) -> int:
        """Transfers not ended; 0 when idle."""
        return sum(link.active for link in self._links.values())

    def link_rates(self) -> dict[str, float | None]:
        """Measured goodput per decode worker, in wire bytes per second; None: not measured yet."""
        return {link.peer_name: link.measured()[0] for link in self._links.values()}

    def _link(self, address: str, peer_name: str) -> PeerLink:
        key = (address, peer_name)
        with self._lock:
            if key in self._links:
                return self._links[key]
            link = PeerLink(
                address,
                peer_name,
                self._me,
                self._transport,
                self._reactor,
                config=self._config,
                clock=self._clock,
                observer=self._observer,
            )
            self._links[key] = link
        link.start()
        return link

    def _adopt(self, peer: PeerIdentity, remote: str, waker: Waker) -> ServedSession:
        return self._link("", peer.name).adopt(peer, waker)

    def _turned_away(self, peer: str | None, remote: str, reason: str, detail: str) -> None:
        self._observer.refused(known_reason(reason))
        self._refusals.warning(reason, peer=peer, remote=remote, detail=detail)

    async def _tick(self) -> None:
        while True:
            try:
                self._look_after_links()
            except Exception:  # deadlines must go on for everybody else
                _log.exception("transfer_tick_failed")
            await asyncio.sleep(TICK_S)

    def _look_after_links(self) -> None:
        self._refusals.tell_left_out()
        for key, link in list(self._links.items()):
            link.tick()
            if link.unused_s() > UNUSED_LINK_S:  # the peer left for good; should it come back, so does the link
                with self._lock:
                    del self._links[key]
                self._retired.append(link)
                link.stop()
        self._retired = [link for link in self._retired if link.alive]
