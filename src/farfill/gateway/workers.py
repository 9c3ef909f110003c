"""The gateway's side of the workers' control API: msgpack over (mutual TLS) HTTP, one session for all.

Closing a `DecodeStream`, or cancelling a call, closes its connection, which is how a worker learns that its
work is no longer wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
import structlog

from farfill.core.cluster import FallbackReason, Instance
from farfill.core.errors import (
    CapacityError,
    FarfillError,
    InvalidRequestError,
    ProtocolError,
    TicketError,
    UnavailableError,
)
from farfill.gateway.worker_http import Answer, BrokenError, Endpoint, UnreachedError, WorkerConnections
from farfill.wire.control import (
    CONTENT_TYPE,
    PROTOCOL_VERSION,
    VERSION_HEADER,
    ContinueCommand,
    ContinueReply,
    DecodeCommand,
    ErrorBody,
    FailTransferCommand,
    GenerationEvent,
    KeepPrefixCommand,
    KeepPrefixReply,
    PrefillCommand,
    PrefillReport,
    RenderCommand,
    RenderReply,
    TransferStatus,
)
from farfill.wire.events import EventReader

log = structlog.get_logger("farfill.gateway")

MAX_ERROR_BYTES = 64 * 1024

_encode = msgspec.msgpack.Encoder().encode
_HEAD = (
    "{method} {path} HTTP/1.1\r\nHost: {authority}\r\n"
    f"Content-Type: {CONTENT_TYPE}\r\n{VERSION_HEADER}: {PROTOCOL_VERSION}\r\nContent-Length: "
)

Reply = TypeVar("Reply", bound=msgspec.Struct)
ServerName = Callable[[Instance], str | None]


class WorkerConnectionError(UnavailableError):
    """No answer from a worker. `reached`: the connection had been made, so the work may have begun."""

    reason = "worker_unreachable"

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message, reason="worker_lost" if reached else "worker_unreachable")
        self.reached = reached


class WorkerAnswerError(FarfillError):
    """A worker answered with an error; `body` is what it said."""

    def __init__(self, instance: Instance, status: int, body: ErrorBody) -> None:
        super().__init__(f"{instance.name}: {body.message}", reason=body.reason, retryable=body.retryable)
        self.status = status
        self.body = body

    def as_request_error(self) -> FarfillError:
        """The error the client of the API should get for it."""
        text = self.body.message
        if self.status == 400:
            return InvalidRequestError(text, reason=self.body.reason)
        if self.status == 403 and self.body.reason.startswith("ticket"):
            return TicketError(text, reason=self.body.reason)
        if self.status == 503 and self.body.retry_after_s > 0:
            return CapacityError(text, reason=self.body.reason, retry_after_s=self.body.retry_after_s)
        if self.body.retryable:
            return UnavailableError(text, reason=self.body.reason)
        return FarfillError(text, reason=self.body.reason)


class DecodeStream:
    """The events of one generation as a decode worker sends them."""

    def __init__(self, instance: Instance, response: Answer) -> None:
        self._instance = instance
        self._response = response
        self._reader = EventReader()

    async def next_batch(self) -> list[GenerationEvent]:
        """All events that are there, waiting for at least one; empty when the body ended.

        Raises WorkerConnectionError when the connection broke, ProtocolError on a malformed frame.
        """
        while True:
            try:
                data = await self._response.readany()
            except BrokenError as error:
                raise _unanswered(self._instance, "the stream broke off", error, reached=True) from error
            if not data:
                return []
            events = self._reader.take(data)
            if events:
                return events

    async def flow(self, take: Callable[[list[GenerationEvent]], bool]) -> bool:
        """Hand events to `take` where they are read, as `worker_http.Answer.flow` does. False: the body ended.

        Raises as `next_batch` does, and what `take` raises.
        """
        events_of = self._reader.take

        def came(data: bytes) -> bool:
            events = events_of(data)
            return not events or take(events)

        try:
            return await self._response.flow(came)
        except BrokenError as error:
            raise _unanswered(self._instance, "the stream broke off", error, reached=True) from error

    async def drain(self, timeout_s: float) -> None:
        """After the last event: read the end of the body, which gives the connection back for another request."""
        if self._response.over:
            return
        with contextlib.suppress(FarfillError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.next_batch()

    def close(self) -> None:
        """Withdraw the work. Idempotent; without effect when the body was read to its end."""
        self._response.close()


class WorkerClient:
    """HTTP client to all workers. `start` and `close` it inside the running loop."""

    def __init__(
        self, *, tls: ssl.SSLContext | None, connect_timeout_s: float, server_name: ServerName = lambda _: None
    ) -> None:
        self._tls = tls
        self._server_name = server_name
        # Answers take as long as prefill takes; deadlines belong to whoever awaits them.
        self._connections = WorkerConnections(connect_timeout_s)
        self.on_timeout: Callable[[Instance], None] = lambda _: None
        """Hears of instances to which connecting took as long as it may."""

    async def start(self) -> None:
        """Connections are made as they are needed."""

    def use_context(self, tls: ssl.SSLContext) -> None:
        """New certificates or CAs for connections to come; running work keeps its connections."""
        self._tls = tls

    async def close(self) -> None:
        """Close all connections."""
        self._connections.close()

    async def reach(self, instance: Instance) -> bool:
        """Whether a connection can be made to it now."""
        return await self._connections.reach(self._endpoint(instance))

    async def gone(self, instance: Instance) -> bool:
        """Whether its process is no more; False also when nothing at all is heard from there."""
        return await self._connections.gone(self._endpoint(instance))

    async def decode(self, instance: Instance, command: DecodeCommand) -> DecodeStream:
        """Start a generation; returns when the worker committed to it (its first token is there)."""
        response = await self._send(instance, "/v1/decode", command)
        return DecodeStream(instance, response)

    async def prefill(self, instance: Instance, command: PrefillCommand) -> PrefillReport:
        """Prefill there and push; returns when the transfer is complete."""
        return await self._call(instance, "/v1/prefill", command, PrefillReport)

    async def render(self, instance: Instance, command: RenderCommand) -> RenderReply:
        """Token ids of a prompt with images."""
        return await self._call(instance, "/v1/render", command, RenderReply)

    async def keep_prefix(self, instance: Instance, command: KeepPrefixCommand) -> KeepPrefixReply:
        """Have it keep KV of a prompt's beginning."""
        return await self._call(instance, "/v1/prefixes", command, KeepPrefixReply)

    async def fail_transfer(self, instance: Instance, transfer_id: str, reason: FallbackReason, detail: str) -> None:
        """Tell a decode worker not to wait for a transfer."""
        command = FailTransferCommand(reason=str(reason), detail=detail[:500])
        await self._call(instance, f"/v1/transfers/{transfer_id}/fail", command, FailTransferCommand)

    async def continue_transfer(self, instance: Instance, transfer_id: str, command: ContinueCommand) -> ContinueReply:
        """Name the sender that takes the place of a failed one. WorkerAnswerError 409: the transfer is over."""
        return await self._call(instance, f"/v1/transfers/{transfer_id}/continue", command, ContinueReply)

    async def transfer_status(self, instance: Instance, transfer_id: str, wait_s: float) -> TransferStatus:
        """How decode sees the transfer, once it does not listen to the sender any more or `wait_s` are over."""
        return await self._call(instance, f"/v1/transfers/{transfer_id}?wait_s={wait_s:g}", None, TransferStatus)

    async def _call(self, instance: Instance, path: str, command: msgspec.Struct | None, kind: type[Reply]) -> Reply:
        response = await self._send(instance, path, command)
        try:
            return msgspec.msgpack.decode(await response.read(), type=kind)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{instance.name}: malformed {kind.__name__}: {error}") from error
        except BrokenError as error:
            raise _unanswered(instance, "the answer broke off", error, reached=True) from error
        finally:
            response.close()  # without effect when it was read to its end

    async def _send(self, instance: Instance, path: str, command: msgspec.Struct | None) -> Answer:
        """POST `command`, or GET without one."""
        body = b"" if command is None else _encode(command)
        head = _head("GET" if command is None else "POST", path, _address(instance.url)[3], len(body))
        try:
            response = await self._connections.request(self._endpoint(instance), head, body)
        except UnreachedError as error:
            if error.timed_out:
                self.on_timeout(instance)
            raise _unanswered(instance, "cannot be reached", error, reached=False) from error
        except BrokenError as error:
            raise _unanswered(instance, "the connection was lost", error, reached=True) from error
        if response.status == 200:
            return response
        raise await _answer_error(instance, response)

    def _endpoint(self, instance: Instance) -> Endpoint:
        secure, host, port, _ = _address(instance.url)
        return Endpoint(host, port, self._tls if secure else None, self._server_name(instance) if secure else None)


@lru_cache(1024)
def _address(url: str) -> tuple[bool, str, int, str]:
    """(with TLS, host, port, authority) of a worker's URL."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    return secure, parts.hostname or "", parts.port or (443 if secure else 80), parts.netloc


def _head(method: str, path: str, authority: str, length: int) -> bytes:
    if any(character in path for character in "\r\n "):
        raise ValueError("a path has no blanks")
    return f"{_HEAD.format(method=method, path=path, authority=authority)}{length}\r\n\r\n".encode("ascii")


def _unanswered(instance: Instance, what: str, error: Exception, *, reached: bool) -> WorkerConnectionError:
    """Addresses and system errors belong in the log, not in what a client of the API reads."""
    log.warning("worker_unanswered", instance=instance.name, url=instance.url, what=what, error=repr(error))
    return WorkerConnectionError(f"{instance.name}: {what}", reached=reached)


async def _answer_error(instance: Instance, response: Answer) -> WorkerAnswerError:
    try:
        body = msgspec.msgpack.decode(await response.read(MAX_ERROR_BYTES), type=ErrorBody)
    except (msgspec.DecodeError, BrokenError):
        body = ErrorBody(
            reason="worker_error",
            message=f"status {response.status} without a reason",
            retryable=response.status >= 500,
        )
    finally:
        response.close()
    return WorkerAnswerError(instance, response.status, body)
