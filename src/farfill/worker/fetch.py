"""Fetching KV that a prefill worker holds for a router's request: a ticket of our own, a push to us, a file for vLLM.

Whatever goes wrong, the request goes on with the longest prefix that arrived, or without any.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import structlog

from farfill.clock import Clock
from farfill.core.cluster import FallbackReason
from farfill.core.errors import FarfillError, TicketError, UnavailableError
from farfill.core.ticket import Ticket
from farfill.engine.protocol import KVSlot
from farfill.engine.vllm.engine import VllmEngine
from farfill.telemetry.metrics import WorkerMetrics
from farfill.transfer.handover import Handover, HandoverResult
from farfill.transfer.protocol import TransferReceiver
from farfill.transfer.tickets import TicketSigner
from farfill.wire.control import (
    CONTENT_TYPE,
    PROTOCOL_VERSION,
    VERSION_HEADER,
    ErrorBody,
)
from farfill.wire.held import HeldPrompt, PushCommand, PushReport

CONNECT_S = 5.0
_HEADERS = {"Content-Type": CONTENT_TYPE, VERSION_HEADER: str(PROTOCOL_VERSION)}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """`timeout_s`: longest silence of the far side; `lifetime_s`: of a ticket."""

    timeout_s: float
    lifetime_s: float
    allow_fallback: bool


@dataclass(slots=True, kw_only=True)
class FetchService:
    """One decode worker's. `target` is where prefill workers push to."""

    name: str
    engine: VllmEngine
    receiver: TransferReceiver
    signer: TicketSigner
    metrics: WorkerMetrics
    clock: Clock
    tls: ssl.SSLContext
    target: str
    limits: FetchLimits
    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _pushes: set[asyncio.Task[PushReport]] = field(default_factory=set[asyncio.Task[PushReport]], init=False)

    async def open(self) -> None:
        """Make the session."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def close(self) -> None:
        """Idempotent."""
        for pushing in self._pushes:
            pushing.cancel()
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def landed(self, raw: Any) -> AsyncIterator[dict[str, object] | None]:
        """`kv_transfer_params` for vLLM once the KV is here; None: it prefills the prompt. The KV lives as long.

        Raises UnavailableError where local prefill is not allowed.
        """
        slot, params = None, None
        try:
            held = msgspec.convert(raw, HeldPrompt)
            if held.fingerprint != self.engine.info.fingerprint:
                self._fall_back(held.transfer_id, FallbackReason.FINGERPRINT_MISMATCH, "another model fingerprint")
            else:
                slot = self._reserve(held)
                params = None if slot is None else await self._fetch(held, slot)
        except msgspec.ValidationError as error:
            self._fall_back("", FallbackReason.PROTOCOL, f"{error}")
        except BaseException:
            if slot is not None:
                slot.release()
            raise
        try:
            yield params
        finally:
            if slot is not None:
                slot.release()

    def _reserve(self, held: HeldPrompt) -> KVSlot | None:
        try:
            return self.engine.reserve_tokens(held.num_tokens)
        except FarfillError as error:
            self._fall_back(held.transfer_id, FallbackReason.KV_MEMORY, str(error))
            return None

    async def _fetch(self, held: HeldPrompt, slot: KVSlot) -> dict[str, object] | None:
        result = await self._receive(held, slot)
        if result is None:
            return None
        last = result.last
        reason = FallbackReason.NONE if last.complete else last.failure
        stats = last.stats
        outcome = "ok" if last.complete else "failed"
        self.metrics.transfer_finished(outcome, str(reason), stats.total_s, stats.raw_bytes, stats.wire_bytes)
        if not last.complete:
            self._fall_back(held.transfer_id, reason, last.detail)
        return self.engine.import_of(slot, last.prefix_tokens, held.digest) if last.prefix_tokens else None

    async def _receive(self, held: HeldPrompt, slot: KVSlot) -> HandoverResult | None:
        now_s = self.clock.unix_s()
        ticket = Ticket(
            transfer_id=held.transfer_id,
            fingerprint=held.fingerprint,
            tenant="",
            prefill=held.prefill,
            decode=self.name,
            num_tokens=held.num_tokens,
            issued_unix_s=now_s,
            expires_unix_s=now_s + self.limits.lifetime_s,
        )
        try:
            handover = Handover(
                self.receiver, ticket, slot, timeout_s=self.limits.timeout_s, hold_s=0.0, source=held.transfer_address
            )
        except FarfillError as error:  # most likely it was fetched before
            used = isinstance(error, TicketError)
            reason = FallbackReason.TICKET_INVALID if used else FallbackReason.PROTOCOL
            self._fall_back(held.transfer_id, reason, str(error))
            return None
        waiting = asyncio.ensure_future(handover.wait())
        pushing = asyncio.create_task(self._push(held, self.signer.sign(ticket)))
        try:
            await asyncio.wait([waiting, pushing], return_when=asyncio.FIRST_COMPLETED)
            if pushing.done() and pushing.exception() is not None:
                error = pushing.exception()
                reached = isinstance(error, _RefusedError)
                reason = FallbackReason.PREFILL_FAILED if reached else FallbackReason.PREFILL_UNREACHABLE
                handover.fail(reason, str(error))
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            handover.fail(FallbackReason.WITHDRAWN, "the client went away")
            await asyncio.wait([waiting])
            raise
        finally:
            self._leave(pushing, complete=waiting.done() and waiting.result().last.complete)

    def _leave(self, pushing: asyncio.Task[PushReport], *, complete: bool) -> None:
        """A sender that brought everything hears so in its own time; any other one is told that nobody waits."""
        self._pushes.add(pushing)
        pushing.add_done_callback(self._pushes.discard)
        pushing.add_done_callback(lambda done: done.cancelled() or done.exception())
        if not complete:
            pushing.cancel()

    async def _push(self, held: HeldPrompt, token: str) -> PushReport:
        assert self._session is not None
        command = PushCommand(ticket=token, target=self.target, timeout_s=self.limits.timeout_s)
        url = f"{held.url}/v1/exports/{held.transfer_id}/push"
        body = msgspec.msgpack.encode(command)
        async with self._session.post(url, data=body, headers=_HEADERS, ssl=self.tls) as answer:
            raw = await answer.read()
            if answer.status != 200:
                raise _RefusedError(f"{held.prefill} answered {answer.status}: {_reason(raw)}")
            return msgspec.msgpack.decode(raw, type=PushReport)

    def _fall_back(self, transfer_id: str, reason: FallbackReason, detail: str) -> None:
        self.metrics.fallback(str(reason))
        log.warning(
            "fallback", transfer_id=transfer_id, reason=str(reason), detail=detail, allowed=self.limits.allow_fallback
        )
        if not self.limits.allow_fallback:
            raise UnavailableError(
                f"far prefill failed ({reason}: {detail}) and fallback_to_local_prefill is off",
                reason=str(reason),
                side="link",
            )


class _RefusedError(FarfillError):
    """The prefill worker answered, and not with the KV."""

    reason = "prefill_failed"


def _reason(raw: bytes) -> str:
    try:
        return msgspec.msgpack.decode(raw, type=ErrorBody).message
    except msgspec.DecodeError:
        return "no reason given"
