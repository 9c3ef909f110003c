"""The registry's clients: `Announcer` keeps a worker registered, `InstanceWatcher` knows all workers.

Both live through a registry that is away: the watcher keeps the last known state, the announcer tries again
with growing pauses, and both say so once in the log and on every call in the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
import msgspec
import structlog

from farfill.core.cluster import Instance, InstanceState
from farfill.core.errors import FarfillError, ProtocolError
from farfill.registry.grace import Grace
from farfill.registry.messages import encode, error_of, from_message, to_message
from farfill.transport.call_errors import call_error_text
from farfill.wire.control import CONTENT_TYPE, PROTOCOL_VERSION, VERSION_HEADER, InstancesReply, LeaseReply

log = structlog.get_logger()

# Every prefix that is followed holds one with its long poll; a call that finds none free looks like a registry away.
MAX_CONNECTIONS = 32
CALL_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 2.0
POLL_WAIT_S = 20.0
LOAD_PERIOD_S = 0.5
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0


class RegistryObserver(Protocol):
    """Hears how each call to the registry ended: "ok" or a stable reason."""

    def registry_answered(self, outcome: str) -> None: ...


class RegistryCalls:
    """One HTTP session to the registry; every failure becomes a FarfillError and is told once per outage."""

    def __init__(self, url: str, context: ssl.SSLContext | None, observer: RegistryObserver | None) -> None:
        self._url = url.rstrip("/")
        self._context = context
        self._observer = observer
        self._session: aiohttp.ClientSession | None = None
        self._away_since_s: float | None = None
        self.backoff_s = FIRST_BACKOFF_S

    @property
    def away_s(self) -> float:
        """For how long the registry has not answered; 0 while it does."""
        return 0.0 if self._away_since_s is None else asyncio.get_running_loop().time() - self._away_since_s

    def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
            headers={VERSION_HEADER: str(PROTOCOL_VERSION), "Content-Type": CONTENT_TYPE},
        )

    def use_context(self, context: ssl.SSLContext) -> None:
        """Connections to come use it; a call that runs is left alone."""
        self._context = context

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self, method: str, path: str, *, timeout_s: float = CALL_TIMEOUT_S, body: bytes | None = None, **query: str
    ) -> bytes:
        """The body of a 200. Raises FarfillError otherwise."""
        assert self._session is not None, "use the client as a context manager"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self._url + path, data=body, params=query, ssl=self._context or True
                ) as response,
            ):
                answer = await response.read()
                if response.status != 200:
                    raise error_of(response.status, answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = "timeout" if isinstance(error, TimeoutError) else "unreachable"
            text = call_error_text(error, timeout_s)
            raise FarfillError(
                f"registry {self._url}: {text}", reason=reason, retryable=True, side="registry"
            ) from error
        return answer

    def succeeded(self) -> None:
        self._tell("ok")
        if self._away_since_s is not None:
            log.info("registry_back", url=self._url, away_s=round(self.away_s, 1))
        self._away_since_s = None
        self.backoff_s = FIRST_BACKOFF_S

    def failed(self, error: FarfillError) -> float:
        """Note a failed call; returns the seconds to pause before the next."""
        self._tell(error.reason)
        if self._away_since_s is None:
            log.warning("registry_away", url=self._url, reason=error.reason, error=str(error))
            self._away_since_s = asyncio.get_running_loop().time()
        pause_s = self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, LAST_BACKOFF_S)
        return pause_s

    def _tell(self, outcome: str) -> None:
        if self._observer is not None:
            self._observer.registry_answered(outcome)


class Announcer:
    """Keeps one instance registered while the context is open, and takes it off at the end.

    Renews every third of a lease, at once when the state changes, within half a second when the load does.
    """

    def __init__(
        self,
        *,
        registry_url: str,
        ssl_context: ssl.SSLContext | None,
        instance: Instance,
        observer: RegistryObserver | None = None,
    ) -> None:
        self._calls = RegistryCalls(registry_url, ssl_context, observer)
        self._instance = instance
        self._sent: Instance | None = None
        self._sent_at_s = 0.0
        self._lease_s = 0.0
        self._due_s = 0.0
        self._wake = asyncio.Event()
        self._renewed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def registered(self) -> bool:
        """Whether the registry lists us now: the last renewal is younger than the lease."""
        return self._sent is not None and self._now_s() - self._sent_at_s < self._lease_s

    def use_context(self, context: ssl.SSLContext) -> None:
        """New certificates or CAs for connections to come."""
        self._calls.use_context(context)

    async def announce(self, **changes: Any) -> None:
        """Change fields of the instance. After a change of `state` it returns when the registry knows it,
        or cannot be told now (renewals go on)."""
        before, self._instance = self._instance, dataclasses.replace(self._instance, **changes)
        if self._instance == before:
            return
        urgent = self._instance.state is not before.state
        self._due_s = self._now_s() if urgent else min(self._due_s, self._sent_at_s + LOAD_PERIOD_S)
        self._wake.set()
        if urgent:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT_S), self._renewed:
                    await self._renewed.wait_for(lambda: self._knows(self._instance.state))

    async def __aenter__(self) -> Self:
        self._calls.open()
        self._task = asyncio.create_task(self._keep(), name="registry-announcer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _end(self._task)
        try:
            if self._sent is not None:
                await self._calls.call(
                    "DELETE", self._path(), timeout_s=LEAVE_TIMEOUT_S, generation=self._instance.generation
                )
        except FarfillError as left:
            log.warning("deregister_failed", reason=left.reason, error=str(left))
        finally:
            self._sent = None
            await self._calls.close()

    def _knows(self, state: InstanceState) -> bool:
        return self._sent is not None and self._sent.state is state

    def _path(self) -> str:
        return f"/v1/instances/{self._instance.name}"

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def _keep(self) -> None:
        while True:
            try:
                await self._renew()
                self._calls.succeeded()
                if self._instance == self._sent:  # otherwise `announce` has set when the news is due
                    self._due_s = self._now_s() + self._lease_s / 3
            except FarfillError as error:
                self._due_s = self._now_s() + self._calls.failed(error)
            async with self._renewed:
                self._renewed.notify_all()
            await self._until_due()

    async def _renew(self) -> None:
        instance = self._instance
        body = encode(to_message(instance))
        answer = await self._calls.call("PUT", self._path(), body=body)
        try:
            reply = msgspec.msgpack.decode(answer, type=LeaseReply)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the registry's answer makes no sense: {error}", side="registry") from error
        self._sent, self._sent_at_s, self._lease_s = instance, self._now_s(), reply.lease_s

    async def _until_due(self) -> None:
        while (left_s := self._due_s - self._now_s()) > 0:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._wake.wait()


class InstanceWatcher:
    """Knows all live instances while the context is open, from one long poll after another.

    The context opens with the registry's first answer, or without it after `first_answer_s`. Whoever is missing after
    an outage stays for `grace_s`.
    """

    def __init__(
        self,
        *,
        registry_url: str,
        ssl_context: ssl.SSLContext | None,
        observer: RegistryObserver | None = None,
        on_change: Callable[[tuple[Instance, ...]], None] | None = None,
        first_answer_s: float = 0.0,
        grace_s: float = 0.0,
    ) -> None:
        self._calls = RegistryCalls(registry_url, ssl_context, observer)
        self._on_change = on_change
        self._first_answer_s = first_answer_s
        self._grace = Grace(grace_s)
        self._instances: tuple[Instance, ...] = ()
        self._revision = 0
        self._store_away = False
        self._known = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def use_context(self, context: ssl.SSLContext) -> None:
        """New certificates or CAs for connections to come."""
        self._calls.use_context(context)

    def instances(self) -> tuple[Instance, ...]:
        """The last known state; it stays while the registry is away."""
        return self._instances

    @property
    def stale_s(self) -> float:
        """For how long the registry has been away, so that `instances` may be out of date; 0 while it answers."""
        return self._calls.away_s

    @property
    def known(self) -> bool:
        """Whether the registry has answered at least once."""
        return self._known.is_set()

    async def __aenter__(self) -> Self:
        self._calls.open()
        self._task = asyncio.create_task(self._watch(), name="registry-watcher")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._first_answer_s):
                await self._known.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _end(self._task)
        await self._calls.close()

    async def _watch(self) -> None:
        while True:
            try:
                await self._poll()
            except FarfillError as error:
                await asyncio.sleep(self._calls.failed(error))

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._grace.left_s(loop.time()) or POLL_WAIT_S
        answer = await self._calls.call(
            "GET",
            "/v1/instances",
            timeout_s=wait_s + CALL_TIMEOUT_S,
            after=str(self._revision),
            wait_s=str(wait_s),
            store_away="1" if self._store_away else "0",
        )
        try:
            reply = msgspec.msgpack.decode(answer, type=InstancesReply)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the registry's answer makes no sense: {error}", side="registry") from error
        found = tuple(from_message(message) for message in reply.instances)
        if self._calls.away_s > 0:
            self._grace.outage_ended(loop.time())
        instances = self._grace.merge(self._instances, found, loop.time())
        self._store_away = reply.store_away_s > 0
        if self._store_away:  # it answers, and knows no more than we do
            text = "the registry's store does not answer it"
            self._calls.failed(FarfillError(text, reason="store_unavailable", retryable=True, side="registry"))
        else:
            self._calls.succeeded()
        self._revision = reply.revision
        if instances != self._instances or not self.known:
            self._instances = instances
            self._known.set()
            if self._on_change is not None:
                self._on_change(instances)


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
