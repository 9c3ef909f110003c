"""The near side of a link measurement: receives what the far side sends, and forgets it.

It speaks with the certificate of a decode worker, to prefill workers of the same cluster only. Tickets are signed by a
key that lives as long as this process; memory is bounded by how many may be under way and how large each may be.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import structlog
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from farfill.clock import WallClock
from farfill.config.model import KVTransferConfig
from farfill.core.cluster import Role
from farfill.core.errors import CapacityError, FarfillError, InvalidRequestError
from farfill.core.ticket import Ticket
from farfill.kv.manifest import Manifest, build_manifest
from farfill.transfer.protocol import ExpectedTransfer
from farfill.transfer.receiver import KVReceiver
from farfill.transfer.tickets import TicketSigner, TicketVerifier
from farfill.transport.tls import PeerIdentity, client_context, peer_identity, server_context
from farfill.verify.link import (
    AT_ONCE,
    FINGERPRINT,
    LAYOUT,
    MAX_TRANSFER_BYTES,
    REPORT_VERSION,
    TRANSFER_TIMEOUT_S,
    LinkOffer,
    TicketOffer,
)
from farfill.verify.link_codecs import CodecRates

MAX_EXPECTED = 2 * AT_ONCE
TICKET_S = 60.0
CLOCK_TOLERANCE_S = 5.0
_SENDING_ROLES = frozenset({str(Role.PREFILL), str(Role.MIXED)})

log = structlog.get_logger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class _ScratchSlot:
    """A `KVSlot` nobody reads. Pieces have memory of their own, since each is verified where it lies."""

    manifest: Manifest
    held: frozenset[int] = frozenset()
    _memory: list[bytearray] = field(init=False)

    def __post_init__(self) -> None:
        self._memory = [bytearray(piece.nbytes) for piece in self.manifest.pieces]

    def buffer(self, piece: int) -> memoryview:
        return memoryview(self._memory[piece])

    def release(self) -> None:
        self._memory = []


class LinkServer:
    """`start` it, serve `app` with mutual TLS, `close` it. `pems`: certificate, key and CA of the worker `name`.

    Without `listen` it dials for KV, to the `source` given with each ticket (see `verify.link_reverse`).
    """

    def __init__(
        self,
        *,
        cluster: str,
        name: str,
        listen: str | None,
        pems: tuple[bytes, bytes, bytes],
        config: KVTransferConfig,
        codecs: dict[str, CodecRates],
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._encryption = config.encryption
        self._codecs = codecs
        self._clock = WallClock()
        key = Ed25519PrivateKey.generate()
        self._signer = TicketSigner(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self._verifier = TicketVerifier(public, self._clock, CLOCK_TOLERANCE_S)
        self._listen = listen
        self._pems = pems
        self._config = config
        self._receiver = self._make_receiver(config)
        self._waiting: set[asyncio.Task[None]] = set()
        # Where senders reach it, once it started.
        self.transfer_address = ""

    async def start(self, advertise_host: str) -> None:
        """Receive; others reach it at `advertise_host`. Raises TransportError when the address is taken."""
        await self._receiver.start()
        self.transfer_address = f"{advertise_host}:{self._receiver.address.rpartition(':')[2]}"

    async def close(self) -> None:
        """Fail what is under way, and end."""
        await self._receiver.close()
        await asyncio.gather(*self._waiting)

    async def use_connections(self, connections: int) -> None:
        """Where this side dials: with so many connections from now on."""
        if self._listen is None and self._config.connections != connections:
            self._config = self._config.model_copy(update={"connections": connections})
            await self._receiver.close()
            self._receiver = self._make_receiver(self._config)
            await self._receiver.start()

    def _make_receiver(self, config: KVTransferConfig) -> KVReceiver:
        return KVReceiver(
            self._listen,
            self._name,
            FINGERPRINT,
            LAYOUT,
            server_context(*self._pems),
            self._verifier,
            config,
            self._clock,
            client_ctx=client_context(*self._pems),
        )

    @property
    def expected(self) -> int:
        """Transfers announced and not ended; 0 when idle."""
        return len(self._waiting)

    def app(self) -> web.Application:
        """The control calls."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v1/link", self._offer)
        app.router.add_get("/v1/link/ping", _pong)
        app.router.add_post(r"/v1/link/tickets/{tokens:\d{1,9}}", self._ticket)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        identity = _identity_of(request)
        if identity is None or identity.cluster != self._cluster or identity.role not in _SENDING_ROLES:
            log.warning("request_refused", reason="forbidden", peer=str(identity))
            return web.Response(status=403, text=f"only prefill workers of {self._cluster} may measure")
        return await handler(request)

    async def _offer(self, _: web.Request) -> web.Response:
        return _json(self.offer())

    def offer(self) -> LinkOffer:
        """What this side says about itself."""
        return LinkOffer(
            report_version=REPORT_VERSION,
            transfer_address=self.transfer_address,
            encryption=self._encryption,
            codecs=self._codecs,
        )

    async def _ticket(self, request: web.Request) -> web.Response:
        identity = _identity_of(request)
        assert identity is not None, "the guard saw to it"
        try:
            return _json(self.expect(identity.name, int(request.match_info["tokens"])))
        except InvalidRequestError as error:
            return web.Response(status=400, text=str(error))
        except CapacityError as error:
            return web.Response(status=429, text=str(error))

    def expect(self, prefill: str, num_tokens: int, source: str = "") -> TicketOffer:
        """Expect a transfer of that size from `prefill` now.

        Raises InvalidRequestError for a size out of bounds, CapacityError while too many are under way.
        """
        if not 1 <= num_tokens <= MAX_TRANSFER_BYTES // LAYOUT.bytes_per_token:
            raise InvalidRequestError(f"{num_tokens} tokens are none, or more than one transfer may have")
        if len(self._waiting) >= MAX_EXPECTED:
            raise CapacityError(f"{MAX_EXPECTED} transfers are under way already")
        now_s = self._clock.unix_s()
        ticket = Ticket(
            transfer_id=f"link-{secrets.token_hex(8)}",
            fingerprint=FINGERPRINT,
            tenant="link-test",
            prefill=prefill,
            decode=self._name,
            num_tokens=num_tokens,
            issued_unix_s=now_s,
            expires_unix_s=now_s + TICKET_S,
        )
        slot = _ScratchSlot(build_manifest(LAYOUT, num_tokens))
        expected = self._receiver.expect(ticket, slot, timeout_s=TRANSFER_TIMEOUT_S, source=source)
        task = asyncio.create_task(_await_end(expected, slot))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return TicketOffer(ticket=ticket, token=self._signer.sign(ticket))


async def _await_end(expected: ExpectedTransfer, slot: _ScratchSlot) -> None:
    try:
        result = await expected.wait()
    except FarfillError as error:
        log.warning("link_transfer_failed", reason=error.reason, error=str(error))
    else:
        if not result.complete:
            log.warning("link_transfer_failed", reason=str(result.failure), error=result.detail)
    finally:
        slot.release()


async def _pong(_: web.Request) -> web.Response:
    return web.Response()


def _identity_of(request: web.Request) -> PeerIdentity | None:
    ssl_object = None if request.transport is None else request.transport.get_extra_info("ssl_object")
    return None if ssl_object is None else peer_identity(ssl_object)


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
