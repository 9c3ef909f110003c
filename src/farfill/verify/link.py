"""Measures the path between two sites through the transfer plane itself: the far side, and what it finds out.

The near side is `verify.link_serve`: it hands out tickets of its own, so nothing but two certificates of the cluster
is needed, and its fingerprint is no model's, so no real cache can ever get there. The far side dials it, or, with
`verify.link_reverse`, lets it dial: KV goes the same way, from far to near.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import msgspec

from farfill.clock import WallClock
from farfill.config.model import KVTransferConfig
from farfill.core.errors import FarfillError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.core.ticket import Ticket
from farfill.kv.manifest import build_manifest
from farfill.transfer.observer import SilentObserver
from farfill.transfer.sender import KVSender
from farfill.transport.errors import IdentityError
from farfill.transport.tls import client_context, peer_identity, server_context
from farfill.verify.link_codecs import CodecRates, measure_here
from farfill.verify.link_confirmed import Confirmations

REPORT_VERSION = 1
FINGERPRINT = "farfill-link-test-1"
LAYOUT = KVLayout(
    tuple(TensorLayout(layer, part, TensorKind.FULL, "bfloat16", (8, 128)) for layer in range(16) for part in "kv"),
    prefill_chunk_tokens=512,
)
MAX_TRANSFER_BYTES = 64 * 1024 * 1024
MIN_TRANSFER_BYTES = 1024 * 1024
# So many transfers are under way at once, so that the line never waits for one to be opened.
AT_ONCE = 3
# One transfer shall take about so long: many fit into a step, yet opening them costs little.
TRANSFER_S = 0.4
ROUND_TRIPS_OF_A_TRANSFER = 4
CONNECTIONS = (1, 2, 4, 8, 16, 32, 64)
# A step counts as better from here on, and two that are not end the search.
BETTER = 1.05
# The fewest connections that reach this much of the best are the best number.
NEAR_BEST = 0.95
PINGS = 40
SAMPLE_S = 0.1
SEGMENT_BYTES = 1448
CALL_DEADLINE_S = 10.0
TRANSFER_TIMEOUT_S = 60.0


class LinkTestError(FarfillError):
    """The link cannot be measured."""

    reason = "link_test_failed"
    side = "link"


class LinkOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What the near side says about itself."""

    report_version: int
    transfer_address: str
    encryption: str
    codecs: dict[str, CodecRates]


class TicketOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer is expected now."""

    ticket: Ticket
    token: str


class LinkStep(msgspec.Struct, frozen=True, kw_only=True):
    """What so many connections brought. `resent_share`: TCP segments that travelled again; `rtt_ms`: TCP's, loaded.

    `bits_per_s`: what the far side confirmed. `spread_bits_per_s`: how much that swung meanwhile (see
    `Confirmations.spread`); None: not known, or too short to tell.
    """

    connections: int
    bits_per_s: float
    resent_share: float
    rtt_ms: float | None
    spread_bits_per_s: float | None = None


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """A measured link; the format of baseline files. `samples`: (seconds, bits/s) over the whole measurement.

    `seconds`: how long each step was measured; None in older files.
    """

    version: int
    source: str
    target: str
    unix_s: float
    encryption: str
    rtt_ms: float
    jitter_ms: float
    steps: list[LinkStep]
    best_connections: int
    codecs_source: dict[str, CodecRates]
    codecs_target: dict[str, CodecRates]
    samples: list[tuple[float, float]]
    seconds: float | None = None

    @property
    def best(self) -> LinkStep:
        """The step with the best number of connections."""
        return next(step for step in self.steps if step.connections == self.best_connections)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Who measures whom. `pems`: certificate, key and CA of `source`; `control`: host:port of the near side."""

    cluster: str
    source: str
    target: str
    control: str
    pems: tuple[bytes, bytes, bytes] = field(repr=False)


class NearSide(Protocol):
    """Control calls to the near side. All raise LinkTestError."""

    async def offer(self) -> LinkOffer:
        """What it says about itself."""
        ...

    async def ticket(self, num_tokens: int, connections: int) -> TicketOffer:
        """It expects a transfer of that size now; `connections` is for a near side that dials."""
        ...

    async def ping(self) -> float:
        """Seconds to and fro."""
        ...


class _Seen(SilentObserver):
    """What the plane reports while a step runs."""

    def __init__(self) -> None:
        self.confirmed = Confirmations()
        self.sent_bytes = 0
        self.resent_segments = 0
        self.rtts_s: list[float] = []

    def chunk_sent(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        self.sent_bytes += wire_bytes

    def chunk_confirmed(self, connection: int, wire_bytes: int) -> None:
        self.confirmed.heard(connection, wire_bytes, time.monotonic())

    def path(
        self, peer: str, rtt_s: float, segments_sent: int, segments_resent: int, delivery_bytes_per_s: float
    ) -> None:
        self.resent_segments += segments_resent
        self.rtts_s.append(rtt_s)


class LinkMeasurement:
    """One measurement. `report` is told of each step in words.

    `near`: a near side that dials, together with `transfer_listen`, where its KV connections are let in.
    """

    def __init__(
        self,
        ends: Ends,
        config: KVTransferConfig,
        *,
        seconds: float,
        connections: Sequence[int] = CONNECTIONS,
        report: Callable[[str], None],
        near: contextlib.AbstractAsyncContextManager[NearSide] | None = None,
        transfer_listen: str | None = None,
    ) -> None:
        self._ends = ends
        self._near = near or _near_side(ends)
        self._transfer_listen = transfer_listen
        self._config = config
        self._seconds = seconds
        self._connections = connections
        self._report = report
        self._clock = WallClock()
        self._noise = memoryview(secrets.token_bytes(MAX_TRANSFER_BYTES))
        self._samples: list[tuple[float, float]] = []
        self._start_s = 0.0
        self._rate_bytes_per_s = 0.0
        self._open = 0

    async def run(self) -> LinkReport:
        """Measure. Raises LinkTestError, and TransferError when a transfer fails."""
        ends = self._ends
        async with self._near as near:
            offer = await near.offer()
            self._report(f"round trip to {ends.target}")
            rtt_s, jitter_s = await self._round_trips(near)
            self._report("codecs, on this host")
            codecs = await asyncio.to_thread(measure_here)
            self._start_s = time.monotonic()
            steps = [step async for step in self._steps(near, offer, rtt_s)]
        most = max(step.bits_per_s for step in steps)
        return LinkReport(
            version=REPORT_VERSION,
            source=ends.source,
            target=ends.target,
            unix_s=round(self._clock.unix_s(), 3),
            encryption=offer.encryption if offer.encryption == self._config.encryption else "tls",
            rtt_ms=rtt_s * 1e3,
            jitter_ms=jitter_s * 1e3,
            steps=steps,
            best_connections=min(step.connections for step in steps if step.bits_per_s >= NEAR_BEST * most),
            codecs_source=codecs,
            codecs_target=offer.codecs,
            samples=self._samples,
            seconds=self._seconds,
        )

    async def _round_trips(self, near: NearSide) -> tuple[float, float]:
        """Median round trip of small messages, and how much one differs from the next on average (RFC 3550)."""
        await near.ping()  # the connection's handshake is no round trip
        trips = [await near.ping() for _ in range(PINGS)]
        changes = [abs(after - before) for before, after in itertools.pairwise(trips)]
        return statistics.median(trips), statistics.fmean(changes)

    async def _steps(self, near: NearSide, offer: LinkOffer, rtt_s: float) -> AsyncIterator[LinkStep]:
        best, in_vain = 0.0, 0
        for connections in self._connections:
            self._report(f"{connections} connection{'s' if connections > 1 else ''} for {self._seconds:g} s")
            step = await self._step(near, offer, rtt_s, connections)
            yield step
            in_vain = 0 if step.bits_per_s >= BETTER * best else in_vain + 1
            best = max(best, step.bits_per_s)
            if in_vain == 2:
                return

    async def _step(self, near: NearSide, offer: LinkOffer, rtt_s: float, connections: int) -> LinkStep:
        seen = _Seen()
        config = self._config.model_copy(update={"connections": connections, "compression": "none"})
        pems = self._ends.pems
        sender = KVSender(
            self._ends.source,
            FINGERPRINT,
            client_context(*pems),
            config,
            self._clock,
            seen,
            listen=self._transfer_listen,
            server_ctx=server_context(*pems),
        )
        await sender.start()
        self._open = connections
        start_s = time.monotonic()
        try:
            await self._find_rate(near, sender, offer, rtt_s)
            resent, sent = seen.resent_segments, seen.sent_bytes
            seen.rtts_s.clear()
            rate, spread = await self._full_rate(near, sender, offer, seen)
        finally:
            await sender.close()
        self._sample(seen, start_s)
        segments = (seen.sent_bytes - sent) / SEGMENT_BYTES
        return LinkStep(
            connections=connections,
            bits_per_s=rate * 8,
            resent_share=(seen.resent_segments - resent) / segments if segments else 0.0,
            rtt_ms=statistics.median(seen.rtts_s) * 1e3 if seen.rtts_s else None,
            spread_bits_per_s=None if spread is None else spread * 8,
        )

    async def _find_rate(self, near: NearSide, sender: KVSender, offer: LinkOffer, rtt_s: float) -> None:
        """Transfers that grow until opening and confirming one hardly counts; they also open the connections."""
        nbytes = MIN_TRANSFER_BYTES
        await self._move(near, sender, offer, nbytes)
        while True:
            took_s = await self._move(near, sender, offer, nbytes)
            self._rate_bytes_per_s = nbytes / took_s
            if took_s >= TRANSFER_S + ROUND_TRIPS_OF_A_TRANSFER * rtt_s or nbytes >= MAX_TRANSFER_BYTES:
                return
            nbytes *= 4

    async def _full_rate(
        self, near: NearSide, sender: KVSender, offer: LinkOffer, seen: _Seen
    ) -> tuple[float, float | None]:
        """Confirmed bytes per second while transfers overlapped, from the first one's end on, and their spread.

        They end before the account is made: what crossed by the end of the window may be confirmed later.
        """
        nbytes = round(min(MAX_TRANSFER_BYTES, max(MIN_TRANSFER_BYTES, self._rate_bytes_per_s * TRANSFER_S)))
        first_end, over = asyncio.Event(), asyncio.Event()

        async def one_after_another() -> None:
            while not over.is_set():
                await self._move(near, sender, offer, nbytes)
                first_end.set()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(one_after_another())
                await first_end.wait()
                start_s = time.monotonic()
                await asyncio.sleep(self._seconds)
                end_s = time.monotonic()
                over.set()
        except* FarfillError as errors:
            raise errors.exceptions[0] from None
        (rate,) = seen.confirmed.rates(start_s, end_s)
        return rate, seen.confirmed.spread(start_s, end_s)

    async def _move(self, near: NearSide, sender: KVSender, offer: LinkOffer, nbytes: int) -> float:
        """One transfer of about that size; seconds from its beginning to the confirmation."""
        given = await near.ticket(_tokens(nbytes), self._open)
        manifest = build_manifest(LAYOUT, given.ticket.num_tokens)
        start_s = time.monotonic()
        transfer = sender.begin(
            given.ticket, given.token, offer.transfer_address, manifest, timeout_s=TRANSFER_TIMEOUT_S
        )  # fmt: skip
        transfer.offer([(piece.index, self._noise[: piece.nbytes]) for piece in manifest.pieces])
        transfer.finish()
        await transfer.wait()
        return time.monotonic() - start_s

    def _sample(self, seen: _Seen, start_s: float) -> None:
        count = max(1, int((time.monotonic() - start_s) / SAMPLE_S))
        rates = seen.confirmed.rates(start_s, start_s + count * SAMPLE_S, count)
        ends_s = (start_s - self._start_s + (number + 1) * SAMPLE_S for number in range(count))
        self._samples += [(round(end_s, 3), round(rate * 8)) for end_s, rate in zip(ends_s, rates, strict=True)]


class _DialledNearSide:
    """A near side that listens."""

    def __init__(self, session: aiohttp.ClientSession, control: str) -> None:
        self._session = session
        self._url = f"https://{control}"

    async def offer(self) -> LinkOffer:
        return checked_offer(await self._call("GET", "/v1/link"))

    async def ticket(self, num_tokens: int, connections: int) -> TicketOffer:
        return msgspec.json.decode(await self._call("POST", f"/v1/link/tickets/{num_tokens}"), type=TicketOffer)

    async def ping(self) -> float:
        start_s = time.monotonic()
        await self._call("GET", "/v1/link/ping")
        return time.monotonic() - start_s

    async def _call(self, method: str, path: str) -> bytes:
        try:
            async with self._session.request(method, self._url + path) as response:
                body = await response.read()
                if response.status != 200:
                    raise LinkTestError(f"{self._url}: {response.status} {body[:500].decode(errors='replace')}")
                return body
        except aiohttp.ClientConnectorCertificateError as error:
            raise LinkTestError(f"{self._url}: {_certificate_problem(error.certificate_error)}") from error
        except aiohttp.ClientResponseError as error:
            # What came is no HTTP; aiohttp's words quote it, bytes and all.
            raise LinkTestError(
                f"{self._url}: what answers there is not farfill link serve (it may be a KV port)"
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LinkTestError(f"{self._url}: {error or 'no answer'}\nis farfill link serve running there?") from error


@contextlib.asynccontextmanager
async def _near_side(ends: Ends) -> AsyncIterator[NearSide]:
    timeout = aiohttp.ClientTimeout(total=CALL_DEADLINE_S)
    connector = aiohttp.TCPConnector(ssl=checked_context(ends.pems, ends.cluster, ends.target), limit=AT_ONCE + 1)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        yield _DialledNearSide(session, ends.control)


def _certificate_problem(error: Exception) -> str:
    """In words. OpenSSL's refusals have a code; those of `checked_context` do not."""
    if not isinstance(error, ssl.SSLCertVerificationError) or not getattr(error, "verify_code", 0):
        return str(error)
    return f"the certificate shown there is not valid under this cluster's CA (tls.ca): {error.verify_message}"


def checked_offer(body: bytes) -> LinkOffer:
    """What the near side said, if it is of this version. Raises LinkTestError."""
    offer = msgspec.json.decode(body, type=LinkOffer)
    if offer.report_version != REPORT_VERSION:
        raise LinkTestError(f"link test version {offer.report_version} there, {REPORT_VERSION} here")
    return offer


def checked_context(pems: tuple[bytes, bytes, bytes], cluster: str, wanted: str) -> ssl.SSLContext:
    """Refuses whoever is not the worker `wanted`, before anything is said."""

    class IdentityCheckedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            try:
                found = peer_identity(self)
            except IdentityError as error:
                raise ssl.SSLCertVerificationError(str(error)) from error
            if (found.cluster, found.name) != (cluster, wanted):
                raise ssl.SSLCertVerificationError(f"{found.uri} answered where {wanted} was expected")

    context = client_context(*pems)
    context.sslobject_class = IdentityCheckedObject
    return context


def _tokens(nbytes: int) -> int:
    return max(1, nbytes // LAYOUT.bytes_per_token)
