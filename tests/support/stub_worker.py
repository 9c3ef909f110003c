"""Workers without an engine: aiohttp servers that speak the control protocol and do what a test tells them.

A ticket is its transfer id here (`sign_stub_ticket`), which is how a stub decode worker finds the transfer the
stub prefill worker completed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from farfill.core.cluster import Instance, InstanceState, Role
from farfill.core.ticket import Ticket
from farfill.engine.blocks import BlockLedger
from farfill.wire.blocks import BLOCKS_PATH
from farfill.wire.control import (
    CONTENT_TYPE,
    PROTOCOL_VERSION,
    ContinueCommand,
    ContinueReply,
    DecodeCommand,
    EndEvent,
    ErrorBody,
    FailedEvent,
    FailTransferCommand,
    GenerationEvent,
    KeepPrefixCommand,
    KeepPrefixReply,
    LogprobMessage,
    PrefillCommand,
    PrefillReport,
    RenderCommand,
    RenderReply,
    StartEvent,
    TokensEvent,
    TransferStatus,
)
from farfill.wire.events import encode_event
from farfill.worker.blocks import BlockService

encode = msgspec.msgpack.encode
REPORT = PrefillReport(
    queued_s=0.0,
    prefill_s=0.5,
    cached_tokens=0,
    computed_tokens=0,
    transfer_s=0.25,
    after_prefill_s=0.125,
    raw_bytes=2000,
    wire_bytes=1000,
    chunks=2,
    resent_chunks=0,
    codec="none",
)


HELD_BYTES = 1234


def sign_stub_ticket(ticket: Ticket) -> str:
    """What stubs take for a signed ticket."""
    return ticket.transfer_id


@dataclass
class Transfers:
    """Transfers both stubs know of: None when complete, else the reason they failed."""

    outcomes: dict[str, asyncio.Future[str | None]] = field(default_factory=dict)
    decisions: dict[str, asyncio.Future[str | None]] = field(default_factory=dict)

    def of(self, transfer_id: str) -> asyncio.Future[str | None]:
        if transfer_id not in self.outcomes:
            self.outcomes[transfer_id] = asyncio.get_running_loop().create_future()
        return self.outcomes[transfer_id]

    def decision(self, transfer_id: str) -> asyncio.Future[str | None]:
        """The transfer that takes over from this failed one; None: no other will."""
        if transfer_id not in self.decisions:
            self.decisions[transfer_id] = asyncio.get_running_loop().create_future()
        return self.decisions[transfer_id]

    def decide(self, transfer_id: str, following: str | None) -> None:
        if not self.decision(transfer_id).done():
            self.decision(transfer_id).set_result(following)

    def end(self, transfer_id: str, reason: str | None) -> None:
        outcome = self.of(transfer_id)
        if not outcome.done():
            outcome.set_result(reason)


@dataclass
class StubWorker:
    """One worker. Set the knobs before the request; read `decodes`, `prefills`, `withdrawn` after it."""

    name: str
    role: Role
    transfers: Transfers
    site: str = "near"
    model: str = "tiny"
    fingerprint: str = "fp"
    max_context_tokens: int = 1_000_000
    state: InstanceState = InstanceState.READY
    tls: ssl.SSLContext | None = None
    # knobs
    refuse: tuple[int, ErrorBody] | None = None
    refuse_tickets: bool = False
    refuse_continuation: bool = False
    drop_connections: int = 0
    cached_tokens: int = 0
    lossy: str = ""
    texts: list[str] | None = None
    finish_reason: str = "length"
    fail_after_events: int | None = None
    cut_after_events: int | None = None
    hold_before_start: asyncio.Event | None = None
    hold_after_first: asyncio.Event | None = None
    hold_prefill: asyncio.Event | None = None
    dies: bool = False
    """It dies of the next command: nothing listens there any more, and all its connections are reset."""
    blocks: BlockLedger | None = None
    generation: str = "1"
    version: str = "old"
    protocol: int = PROTOCOL_VERSION
    takes_text: bool = False
    """A token a byte, as the gateways of tests count."""
    # what happened
    decodes: list[DecodeCommand] = field(default_factory=list)
    prefills: list[PrefillCommand] = field(default_factory=list)
    failures_told: list[tuple[str, FailTransferCommand]] = field(default_factory=list)
    continued: list[tuple[str, ContinueCommand]] = field(default_factory=list)
    renders: list[RenderCommand] = field(default_factory=list)
    kept: list[KeepPrefixCommand] = field(default_factory=list)
    events_sent: int = 0
    asked_from: set[tuple[str, int]] = field(default_factory=set)
    withdrawn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    received: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    _runner: web.AppRunner | None = None
    _site: web.TCPSite | None = None
    _port: int = 0

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/decode", self._decode)
        app.router.add_post("/v1/render", self._render)
        app.router.add_post("/v1/prefixes", self._keep_prefix)
        app.router.add_post("/v1/prefill", self._prefill)
        app.router.add_post("/v1/transfers/{transfer_id}/fail", self._fail_transfer)
        app.router.add_post("/v1/transfers/{transfer_id}/continue", self._continue_transfer)
        app.router.add_get("/v1/transfers/{transfer_id}", self._transfer_status)
        app.router.add_get(BLOCKS_PATH, self._blocks)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self.tls)
        await site.start()
        self._site = site
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def listen_at(self, url: str) -> None:
        """Stand for a stub that listens at `url` in another process."""
        self._port = int(url.rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self._port}"

    @property
    def instance(self) -> Instance:
        return Instance(
            name=self.name,
            role=self.role,
            site=self.site,
            url=self.url,
            transfer_address="" if self.role is Role.PREFILL else "127.0.0.1:9",
            model=self.model,
            fingerprint=self.fingerprint,
            generation=self.generation,
            state=self.state,
            max_context_tokens=self.max_context_tokens,
            version=self.version,
            protocol=self.protocol,
            takes_text=self.takes_text,
        )

    async def _blocks(self, request: web.Request) -> web.StreamResponse:
        if self.blocks is None:
            raise web.HTTPNotFound
        return await BlockService(self.blocks, self.generation).handle(request)

    async def _keep_prefix(self, request: web.Request) -> web.Response:
        command = msgspec.msgpack.decode(await request.read(), type=KeepPrefixCommand)
        if self.refuse is not None:
            return _error(*self.refuse)
        self.kept.append(command)
        reply = KeepPrefixReply(tokens=len(command.token_ids), there_tokens=0, pinned_bytes=7)
        return web.Response(body=msgspec.msgpack.encode(reply), content_type=CONTENT_TYPE)

    async def _render(self, request: web.Request) -> web.StreamResponse:
        """One token a byte, and 8 an image in place of its `<image>`."""
        command = msgspec.msgpack.decode(await request.read(), type=RenderCommand)
        self.renders.append(command)
        if self.refuse is not None:
            return _error(*self.refuse)
        texts = command.text.split("<image>")
        ids, spans = list(texts[0].encode()), []
        for text in texts[1:]:
            spans.append((len(ids), len(ids) + 8))
            ids += [7] * 8 + list(text.encode())
        if len(spans) != len(command.images):
            return _error(400, ErrorBody(reason="media_placeholder", message="placeholders and images differ"))
        reply = RenderReply(token_ids=ids, spans=spans, position_offset=-5 * len(spans))
        return web.Response(body=encode(reply), content_type=CONTENT_TYPE)

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        command = msgspec.msgpack.decode(await request.read(), type=DecodeCommand)
        self.decodes.append(command)
        self.asked_from.add(request.get_extra_info("peername"))
        self.received.release()
        try:
            return await self._answer_decode(request, command)
        except asyncio.CancelledError:
            self.withdrawn.release()
            raise

    async def _answer_decode(self, request: web.Request, command: DecodeCommand) -> web.StreamResponse:
        if self.drop_connections:
            self.drop_connections -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.dies:
            return await self._die(request)
        if self.refuse is not None:
            return _error(*self.refuse)
        if command.ticket and self.refuse_tickets:
            return _error(403, ErrorBody(reason="ticket_forged", message="not from our gateway"))
        failure = await self._await_transfer(command) if command.ticket else None
        if failure is not None and not command.allow_fallback:
            return _error(503, ErrorBody(reason=failure, message="no KV", retryable=True, side="link"))
        if self.hold_before_start is not None:
            await self.hold_before_start.wait()
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        await response.prepare(request)
        sent = 0
        async for event in self._events(command, failure):
            if sent == self.cut_after_events:
                assert request.transport is not None
                request.transport.abort()
                return response
            if sent == self.fail_after_events:
                await response.write(encode_event(FailedEvent(reason="engine_error", message="out of order")))
                break
            await response.write(encode_event(event))
            sent += 1
            self.events_sent += 1
        await response.write_eof()
        return response

    async def _await_transfer(self, command: DecodeCommand) -> str | None:
        transfer_id = command.ticket
        while True:
            try:
                async with asyncio.timeout(command.timeout_s):
                    failure = await asyncio.shield(self.transfers.of(transfer_id))
            except TimeoutError:
                failure = "transfer_timeout"
                self.transfers.end(transfer_id, failure)
            if failure is None or not command.hold_s:
                return failure
            try:
                async with asyncio.timeout(command.hold_s):
                    following = await asyncio.shield(self.transfers.decision(transfer_id))
            except TimeoutError:
                return failure
            if following is None:
                return failure
            transfer_id = following

    async def _events(self, command: DecodeCommand, failure: str | None) -> AsyncIterator[GenerationEvent]:
        remote = bool(command.ticket) and failure is None
        tokens = len(command.token_ids) or len(command.text.encode())
        start = start_event(tokens, "remote" if remote else "local", failure or "none", self.cached_tokens)
        start.lossy = self.lossy if remote else ""
        yield start
        texts = [f"w{i} " for i in range(command.sampling.max_tokens)] if self.texts is None else self.texts
        for i, text in enumerate(texts):
            for index in range(command.sampling.n):
                last = i == len(texts) - 1
                yield TokensEvent(
                    index=index,
                    token_ids=[65 + i % 26],
                    text=text,
                    finish_reason=self.finish_reason if last else None,
                    logprobs=_logprobs(text, command.sampling.logprobs),
                )
            if i == 0 and self.hold_after_first is not None:
                await self.hold_after_first.wait()
        yield EndEvent(completion_tokens=len(texts) * command.sampling.n)

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        command = msgspec.msgpack.decode(await request.read(), type=PrefillCommand)
        self.prefills.append(command)
        self.received.release()
        try:
            if self.drop_connections:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if self.dies:
                return await self._die(request)
            if self.refuse is not None:
                return _error(*self.refuse)
            if self.hold_prefill is not None:
                await self.hold_prefill.wait()
            self.transfers.end(command.ticket, None)
            return web.Response(body=encode(REPORT), content_type=CONTENT_TYPE)
        except asyncio.CancelledError:
            self.withdrawn.release()
            raise

    async def _die(self, request: web.Request) -> web.Response:
        assert self._site is not None
        assert request.transport is not None
        await self._site.stop()
        request.transport.abort()
        return web.Response()

    async def _fail_transfer(self, request: web.Request) -> web.Response:
        command = msgspec.msgpack.decode(await request.read(), type=FailTransferCommand)
        transfer_id = request.match_info["transfer_id"]
        self.failures_told.append((transfer_id, command))
        self.transfers.end(transfer_id, command.reason)
        self.transfers.decide(transfer_id, None)
        return web.Response(body=encode(command), content_type=CONTENT_TYPE)

    async def _continue_transfer(self, request: web.Request) -> web.Response:
        command = msgspec.msgpack.decode(await request.read(), type=ContinueCommand)
        transfer_id = request.match_info["transfer_id"]
        self.continued.append((transfer_id, command))
        if self.refuse_continuation:
            return _error(409, ErrorBody(reason="transfer_over", message="the transfer is over"))
        self.transfers.end(transfer_id, command.reason)
        self.transfers.decide(transfer_id, command.ticket)
        return web.Response(body=encode(ContinueReply(held_bytes=HELD_BYTES)), content_type=CONTENT_TYPE)

    async def _transfer_status(self, request: web.Request) -> web.Response:
        outcome = self.transfers.of(request.match_info["transfer_id"])
        await asyncio.wait([outcome], timeout=float(request.query["wait_s"]))
        if not outcome.done():
            status = TransferStatus(state="receiving")
        elif outcome.result() is None:
            status = TransferStatus(state="over")
        else:
            status = TransferStatus(state="orphaned", reason=outcome.result() or "", detail="no sign of life")
        return web.Response(body=encode(status), content_type=CONTENT_TYPE)


def start_event(prompt_tokens: int, prefilled_at: str, fallback: str, cached_tokens: int) -> StartEvent:
    """A plausible start event."""
    return StartEvent(
        prefilled_at=prefilled_at,
        fallback=fallback,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        received_tokens=0,
        computed_tokens=prompt_tokens - cached_tokens,
        kv_wait_s=0.0,
        transfer_s=0.0,
        raw_bytes=0,
        wire_bytes=0,
        queued_s=0.0,
        prefill_s=0.001,
        first_token_s=0.002,
    )


def _logprobs(text: str, wanted: int | None) -> list[tuple[LogprobMessage, list[LogprobMessage]]] | None:
    if wanted is None:
        return None
    chosen = LogprobMessage(65, -0.5, text.encode())
    return [(chosen, [LogprobMessage(65 + i, -0.5 - i, f"alt{i}".encode()) for i in range(wanted)])]


def _error(status: int, body: ErrorBody) -> web.Response:
    return web.Response(body=encode(body), status=status, content_type=CONTENT_TYPE)
