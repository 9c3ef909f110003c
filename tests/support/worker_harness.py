"""A prefill and a decode worker over real mutual TLS on loopback, with fake engines and a gateway's client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from farfill.clock import WallClock
from farfill.core.cluster import Role
from farfill.core.sampling import SamplingParams
from farfill.core.ticket import Ticket
from farfill.engine.fake import FakeEngine, FakeOptions
from farfill.engine.protocol import GenerateWork, TokenEvent
from farfill.telemetry.metrics import WorkerMetrics, exposition
from farfill.transfer.tickets import TicketVerifier
from farfill.transport.tls import http_server_context
from farfill.wire.control import (
    PROTOCOL_VERSION,
    VERSION_HEADER,
    DecodeCommand,
    ErrorBody,
    FailedEvent,
    GenerationEvent,
    PrefillCommand,
    PrefillReport,
    SamplingMessage,
    StartEvent,
    TokensEvent,
)
from farfill.wire.events import EventReader
from farfill.worker.app import WorkerDeps, build_worker_app
from farfill.worker.blocks import BlockService
from farfill.worker.decode import DecodeService
from farfill.worker.keep import KeepService
from farfill.worker.media import RenderService
from farfill.worker.prefill import PrefillService
from support.transfer_harness import DECODE, PREFILL, Ends, config

CHUNK = 16
DEADLINE_S = 20.0

Reply = TypeVar("Reply", bound=msgspec.Struct)


class Gate:
    """A `FakeExecutor.step` that lets engine steps of some kinds wait until they are let go."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._kinds: frozenset[str] = frozenset()
        self._after = 0
        self.entered = threading.Event()

    def hold(self, *kinds: str, after: int = 0) -> None:
        """Block every step of `kinds` but the first `after` ones."""
        self._kinds, self._after = frozenset(kinds), after
        self.entered.clear()
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def __call__(self, kind: str) -> None:
        if kind not in self._kinds:
            return
        if self._after > 0:
            self._after -= 1
            return
        self.entered.set()
        assert self._open.wait(DEADLINE_S), "the gate was never opened"


@dataclass
class Answer:
    """What a generation sent, in order."""

    start: StartEvent
    events: list[GenerationEvent] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, TokensEvent) for t in e.token_ids]

    @property
    def failed(self) -> FailedEvent | None:
        return next((e for e in self.events if isinstance(e, FailedEvent)), None)


class RefusedError(Exception):
    """A non-200 answer."""

    def __init__(self, status: int, body: ErrorBody, headers: dict[str, str]) -> None:
        super().__init__(f"{status} {body.reason}: {body.message}")
        self.status, self.body, self.headers = status, body, headers


class TwoWorkers:
    """`async with TwoWorkers.running(tmp_path) as two: ...`; plays the gateway's part."""

    def __init__(self, folder: Path, far_fingerprint: str = "f" * 64, **options: Any) -> None:
        self.gates = {PREFILL: Gate(), DECODE: Gate()}
        self.lossy: str = options.pop("lossy", "")
        self.prefill_engine = self._engine(PREFILL, fingerprint=far_fingerprint, **options)
        self.decode_engine = self._engine(DECODE, **options)
        self.ends = Ends(folder, layout=self.decode_engine.info.layout)
        self.metrics: dict[str, WorkerMetrics] = {}
        self.urls: dict[str, str] = {}
        self.session: aiohttp.ClientSession

    def _engine(self, name: str, **options: Any) -> FakeEngine:
        fields: dict[str, Any] = {"prefill_chunk_tokens": CHUNK, "fingerprint": "f" * 64, **options}
        return FakeEngine(FakeOptions(**fields), step=self.gates[name])

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, folder: Path, **options: Any) -> AsyncIterator[TwoWorkers]:
        """Two running workers; at the end everything must have been given back."""
        two = cls(folder, **options)
        async with contextlib.AsyncExitStack() as stack:
            await two._start(stack)
            yield two
            await two.idle()
        for engine in (two.prefill_engine, two.decode_engine):
            engine.close()
            engine.check_integrity()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        ends = self.ends
        ends.receiver = ends.make_receiver(layout=self.decode_engine.info.layout, config=config(timeout_ms=1000))
        ends.sender = ends.make_sender(config=config(timeout_ms=1000), fingerprint=self.prefill_engine.info.fingerprint)
        await ends.start()
        stack.push_async_callback(ends.close)
        for name, engine in ((PREFILL, self.prefill_engine), (DECODE, self.decode_engine)):
            engine.start()
            self.urls[name] = await self._serve(stack, name, engine)
        credentials = ends.pki.name("gateway-0", role="gateway")
        connector = aiohttp.TCPConnector(ssl=credentials.client(), force_close=True)
        headers = {VERSION_HEADER: str(PROTOCOL_VERSION)}
        self.session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, headers=headers))

    async def _serve(self, stack: contextlib.AsyncExitStack, name: str, engine: FakeEngine) -> str:
        role = Role.PREFILL if name == PREFILL else Role.DECODE
        verifier = TicketVerifier(self.ends.public_key, WallClock(), 1.0)
        metrics = self.metrics[name] = WorkerMetrics(site="test", role=str(role), model="fake")
        prefill = decode = None
        if role is Role.PREFILL:
            prefill = PrefillService(name, engine, self.ends.sender, verifier, metrics)
        else:
            decode = DecodeService(name, engine, self.ends.receiver, verifier, metrics, lossy=self.lossy)
        deps = WorkerDeps(
            cluster="test",
            name=name,
            role=role,
            site="test",
            info=engine.info,
            prefill=prefill,
            decode=decode,
            render=RenderService(engine),
            keep=KeepService(engine),
            blocks=BlockService(engine.blocks, "1"),
            is_ready=lambda: True,
            exposition=lambda: exposition(metrics.registry),
        )
        runner = web.AppRunner(build_worker_app(deps), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        credentials = self.ends.pki.name(name, role=str(role))
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=http_server_context(*credentials.pems))
        await site.start()
        return f"https://127.0.0.1:{runner.addresses[0][1]}"

    @staticmethod
    def prompt(length: int, seed: int = 1) -> list[int]:
        return [32 + (seed * 7919 + i * i * 31 + i * 17) % 95 for i in range(length)]

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes one token adds to all growing tensors, and to all windows."""
        tensors = self.decode_engine.info.layout.tensors
        return sum(t.row_bytes for t in tensors if t.kind.grows), sum(t.row_bytes for t in tensors if t.window_tokens)

    def ticket(self, prompt: list[int], **changes: Any) -> Ticket:
        return self.ends.ticket(changes.pop("num_tokens", len(prompt) - 1), **changes)

    def expected(self, prompt: list[int], max_tokens: int = 12) -> list[int]:
        """What the decode worker's own engine generates when it prefills by itself."""
        done = threading.Event()
        tokens: list[int] = []

        class Sink:
            def prefilled(self, stats: Any) -> None: ...

            def token(self, event: TokenEvent) -> None:
                tokens.extend(event.token_ids)
                if event.finish_reason is not None:
                    done.set()

            def failed(self, error: Exception) -> None:
                raise AssertionError("the reference run failed") from error

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        work = GenerateWork(request_id="reference", prompt=tuple(prompt), cache_salt="ref", sampling=params)
        self.decode_engine.generate(work, Sink())
        assert done.wait(DEADLINE_S)
        return tokens

    async def prefill(self, prompt: list[int], ticket: Ticket, **changes: Any) -> PrefillReport:
        """Ask the prefill worker. Raises RefusedError."""
        fields: dict[str, Any] = {
            "request_id": ticket.transfer_id,
            "ticket": self.ends.sign(ticket),
            "target": self.ends.receiver.address,
            "token_ids": prompt,
            "timeout_s": 1.0,
            **changes,
        }
        async with self._post(PREFILL, "/v1/prefill", PrefillCommand(**fields)) as response:
            return msgspec.msgpack.decode(await response.read(), type=PrefillReport)

    async def decode(
        self, prompt: list[int], ticket: Ticket | None = None, *, max_tokens: int = 12, n: int = 1, **changes: Any
    ) -> Answer:
        """Ask the decode worker and read to the end. Raises RefusedError."""
        fields: dict[str, Any] = {
            "request_id": "request",
            "token_ids": prompt,
            "sampling": SamplingMessage(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, n=n),
            "ticket": self.ends.sign(ticket) if ticket else "",
            "timeout_s": 1.0,
            **changes,
        }
        reader, events = EventReader(), []
        async with self._post(DECODE, "/v1/decode", DecodeCommand(**fields)) as response:
            async for data in response.content.iter_any():
                events.extend(reader.feed(data))
        assert reader.at_boundary
        assert isinstance(events[0], StartEvent)
        return Answer(events[0], events[1:])

    async def call(self, name: str, path: str, body: msgspec.Struct, reply: type[Reply]) -> Reply:
        """Any other call of a worker's control API. Raises RefusedError."""
        async with self._post(name, path, body) as response:
            return msgspec.msgpack.decode(await response.read(), type=reply)

    async def fail(self, transfer_id: str, body: msgspec.Struct) -> None:
        """Tell decode that the prefill leg failed."""
        async with self._post(DECODE, f"/v1/transfers/{transfer_id}/fail", body):
            pass

    @contextlib.asynccontextmanager
    async def _post(self, name: str, path: str, body: msgspec.Struct) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self.session.post(self.urls[name] + path, data=msgspec.msgpack.encode(body)) as response:
            if response.status != 200:
                error = msgspec.msgpack.decode(await response.read(), type=ErrorBody)
                raise RefusedError(response.status, error, dict(response.headers))
            yield response

    async def until(self, condition: Any) -> None:
        """Wait for `condition`, with a deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def idle(self) -> None:
        """Both engines run nothing and hold nothing, and no transfer is held."""
        for engine in (self.prefill_engine, self.decode_engine):
            await self.until(lambda engine=engine: engine.load().running_sequences == 0)
            await self.until(lambda engine=engine: engine.load().waiting_sequences == 0)
            await self.until(lambda engine=engine: engine.load().kv_used_bytes == 0)
        await self.until(lambda: self.ends.receiver.held_transfers() == 0)

    def metric(self, name: str, sample: str, **labels: str) -> float:
        """One sample of a worker's metrics; 0 when it was never set."""
        for family in self.metrics[name].registry.collect():
            for found in family.samples:
                if found.name == sample and labels.items() <= found.labels.items():
                    return found.value
        return 0.0
