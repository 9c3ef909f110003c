"""Client and instant upstream of `gateway.py`, in one process on one core: raw protocols on uvloop, canned answers.

Two upstreams: one speaks the OpenAI API (for routers that forward it), one the control protocol of Farfill's workers.
Both answer the same tokens, and neither parses what it need not: what they take comes off the rates of both sides. A
stream's next token leaves when the client has got the last one, as an engine sends them one by one, only without an
engine's time in between. `seed` tells the upstream which stream it is.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import msgspec

from farfill.wire.control import DecodeCommand, EndEvent, StartEvent, TokensEvent
from farfill.wire.events import encode_event

MODEL = "bench"
TOKENS = 8
"""Of an answer that is not streamed."""
TEXT = " word"

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_SEED = re.compile(rb'"seed": ?(\d+)')
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
_CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """`data` as a chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass(slots=True)
class Streams:
    """Open streams of the upstream by their number, and how the client asks for the next token of one."""

    tokens: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    ends: dict[int, Callable[[], None]] = field(default_factory=dict[int, Callable[[], None]])
    held: bool = False
    """Whether streams stay open after their first token, until they are ended."""

    def next(self, number: int) -> None:
        """The client got a token of stream `number`."""
        if not self.held and number in self.tokens:
            self.tokens[number]()


class Upstream(asyncio.Protocol):
    """One connection to an instant upstream."""

    stream_head = _CHUNKED % b"text/event-stream"

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(_HEAD_END)) >= 0:
            found = _LENGTH.search(self._buffer, 0, end)
            length, begin = (int(found[1]) if found else 0), end + 4
            if len(self._buffer) < begin + length:
                return
            head, body = self._buffer[:end], self._buffer[begin : begin + length]
            self._buffer = self._buffer[begin + length :]
            self.asked(head, body)

    def asked(self, head: bytes, body: bytes) -> None:
        """A request is complete."""
        if not head.startswith(b"POST"):
            answer = b'{"status": "ok", "object": "list", "data": [{"id": "bench", "object": "model"}]}'
            self._transport.write(_OK % (len(answer), answer))
        elif b'"stream":true' in body or b'"stream": true' in body:
            found = _SEED.search(body)
            assert found is not None
            self.stream(int(found[1]))
        else:
            self._transport.write(_OPENAI_WHOLE)

    def stream(self, number: int) -> None:
        """Begin a stream with its first token."""
        write = self._transport.write
        self._streams.tokens[number] = lambda: write(self.next_token)
        self._streams.ends[number] = lambda: write(self.last_tokens)
        write(self.stream_head + self.first_tokens)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc

    @property
    def first_tokens(self) -> bytes:
        return _OPENAI_FIRST

    next_token = chunk(b"")
    last_tokens = b""


def _openai_event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    """As vLLM writes it."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "token_ids": None}
    event = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [choice],
    }
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def _openai_whole() -> bytes:
    message = {"role": "assistant", "content": TEXT * TOKENS, "refusal": None}
    answer = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {"prompt_tokens": 50, "completion_tokens": TOKENS, "total_tokens": 50 + TOKENS},
    }
    body = json.dumps(answer, separators=(",", ":")).encode()
    return _OK % (len(body), body)


def _start() -> StartEvent:
    return StartEvent(
        prefilled_at="local", fallback="none", prompt_tokens=50, cached_tokens=0, received_tokens=0, computed_tokens=50,
        kv_wait_s=0.0, transfer_s=0.0, raw_bytes=0, wire_bytes=0, queued_s=0.0, prefill_s=0.001, first_token_s=0.002,
    )  # fmt: skip


def _frame(finish_reason: str | None = None) -> bytes:
    return chunk(encode_event(TokensEvent(index=0, token_ids=[1234], text=TEXT, finish_reason=finish_reason)))


_OPENAI_WHOLE = _openai_whole()
_OPENAI_FIRST = chunk(_openai_event({"role": "assistant", "content": ""})) + chunk(_openai_event({"content": TEXT}))
_WORKER_END = chunk(encode_event(EndEvent(completion_tokens=TOKENS))) + _END
_WORKER_WHOLE = (
    _CHUNKED % b"application/msgpack"
    + chunk(encode_event(_start()))
    + _frame() * (TOKENS - 1)
    + _frame("length")
    + _WORKER_END
)
_command = msgspec.msgpack.Decoder(DecodeCommand)


class OpenAIUpstream(Upstream):
    """What a router forwards to."""

    next_token = chunk(_openai_event({"content": TEXT}))
    last_tokens = chunk(_openai_event({"content": TEXT}, "length")) + chunk(b"data: [DONE]\n\n") + _END


class WorkerUpstream(Upstream):
    """A decode worker."""

    stream_head = _CHUNKED % b"application/msgpack"
    next_token = _frame()
    last_tokens = _frame("length") + _WORKER_END

    @property
    def first_tokens(self) -> bytes:
        return chunk(encode_event(_start())) + _frame()

    def asked(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST"):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        if b"\xa4seed\xc0" in body or b"\xa4seed" not in body:  # nil or left out: cheaper to see than to decode
            self._transport.write(_WORKER_WHOLE)
            return
        seed = _command.decode(body).sampling.seed
        assert seed is not None
        self.stream(seed)


PROMPT = "Tell me a story about a gateway that was always on time. " * 4


def request(stream: int | None = None) -> bytes:
    """A short chat; number `stream` of those that stream."""
    body: dict[str, object] = {
        "model": MODEL,
        "max_tokens": TOKENS if stream is None else 100_000,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    if stream is not None:
        body |= {"stream": True, "seed": stream}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer none\r\n"
        "Accept: application/json\r\nUser-Agent: bench/1.0\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class WholeClient(asyncio.Protocol):
    """One connection; `done` hears of each whole answer."""

    def __init__(self, done: Callable[[WholeClient], None]) -> None:
        self._done = done
        self._buffer = b""
        self.sent_s = 0.0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, data: bytes, due_s: float | None = None) -> None:
        """`due_s`: since when it is late."""
        self.sent_s = time.perf_counter() if due_s is None else due_s
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        end = self._buffer.find(_HEAD_END)
        if end < 0:
            return
        found = _LENGTH.search(self._buffer, 0, end)
        if found is None:
            if not self._buffer.endswith(_END):
                return
        elif len(self._buffer) < end + 4 + int(found[1]):
            return
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(self._buffer[:2000].decode(errors="replace"))
        self._buffer = b""
        self._done(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc


class StreamClient(asyncio.Protocol):
    """One stream; counts its tokens and asks for more."""

    def __init__(self, number: int, streams: Streams) -> None:
        self.number = number
        self.tokens = 0
        self.failed = ""
        self._began = False
        self._streams = streams
        self._tail = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(request(self.number))

    def data_received(self, data: bytes) -> None:
        # One that is cut in two counts with its end.
        came = (self._tail + data).count(b'"content":"' + TEXT.encode())
        self._tail = data[-len(TEXT) - 12 :] if not data.endswith(b"\n") else b""
        if not self._began:
            self._began = True
            if not data.startswith(b"HTTP/1.1 200"):
                self.failed = data[:2000].decode(errors="replace")
        self.tokens += came
        for _ in range(came):
            self._streams.next(self.number)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc


async def connect_whole(address: tuple[str, int], count: int, done: Callable[[WholeClient], None]) -> list[WholeClient]:
    """`count` connections."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(lambda: WholeClient(done), *address))[1] for _ in range(count)]


async def peak_rate(address: tuple[str, int], data: bytes, connections: int, seconds: float) -> tuple[float, int]:
    """(answers a second, answers in all) with one request in flight on each connection; the first fifth is warm-up."""
    count, over = 0, False

    def done(client: WholeClient) -> None:
        nonlocal count
        count += 1
        if not over:
            client.ask(data)

    clients = await connect_whole(address, connections, done)
    for client in clients:
        client.ask(data)
    await asyncio.sleep(seconds / 5)
    before, began_s = count, time.perf_counter()
    await asyncio.sleep(seconds * 4 / 5)
    rate = (count - before) / (time.perf_counter() - began_s)
    over = True
    await asyncio.sleep(0.2)
    for client in clients:
        client.transport.close()
    return rate, count


async def latencies(address: tuple[str, int], data: bytes, rate: float, seconds: float) -> list[float]:
    """Seconds of each request, sorted; they come at random moments, `rate` a second, whether or not others wait."""
    idle: list[WholeClient] = []
    took_s: list[float] = []

    def done(client: WholeClient) -> None:
        took_s.append(time.perf_counter() - client.sent_s)
        idle.append(client)

    idle += await connect_whole(address, 64, done)
    clients, rng = list(idle), random.Random(1)
    due_s, end_s = time.perf_counter() + 0.1, time.perf_counter() + seconds
    while due_s < end_s:
        now_s = time.perf_counter()
        if now_s < due_s:
            await asyncio.sleep(due_s - now_s if due_s - now_s > 0.0015 else 0)
            continue
        if not idle:  # what is due waits, and its time counts
            if now_s > end_s + 5:
                raise RuntimeError(f"no answers at {rate:.0f} requests a second")
            await asyncio.sleep(0.001)
            continue
        idle.pop().ask(data, due_s)
        due_s += rng.expovariate(rate)
    await asyncio.sleep(0.3)
    for client in clients:
        client.transport.close()
    return sorted(took_s[len(took_s) // 5 :])


async def open_streams(address: tuple[str, int], streams: Streams, count: int) -> list[StreamClient]:
    """`count` streams, each with its first token; raises RuntimeError with what a failed one was told."""
    loop, clients = asyncio.get_running_loop(), list[StreamClient]()
    for number in range(count):
        _, client = await loop.create_connection(lambda n=number: StreamClient(n, streams), *address)
        clients.append(client)
    deadline_s = time.perf_counter() + 20
    while any(not client.tokens for client in clients):
        failed = [client.failed for client in clients if client.failed]
        if failed or time.perf_counter() > deadline_s:
            raise RuntimeError(failed[0] if failed else "streams did not begin")
        await asyncio.sleep(0.05)
    return clients


async def close_streams(clients: list[StreamClient], streams: Streams) -> None:
    """End all in order."""
    for number in list(streams.ends):
        del streams.tokens[number]
        streams.ends.pop(number)()
    await asyncio.sleep(0.5)
    for client in clients:
        client.transport.close()


async def stream_rate(address: tuple[str, int], streams: Streams, count: int, seconds: float) -> tuple[float, int]:
    """(tokens a second, tokens in all) over `count` streams; each gets its next token when the last one came."""
    streams.held = True
    clients = await open_streams(address, streams, count)
    streams.held = False
    for client in clients:
        streams.next(client.number)
    await asyncio.sleep(seconds / 5)
    before, began_s = sum(client.tokens for client in clients), time.perf_counter()
    await asyncio.sleep(seconds * 4 / 5)
    rate = (sum(client.tokens for client in clients) - before) / (time.perf_counter() - began_s)
    await close_streams(clients, streams)
    return rate, sum(client.tokens for client in clients)
