"""A TCP relay that behaves like a bad link: rate, delay, cut, blackhole and heal, changeable while it runs.

For tests and benchmarks on one machine. It works on byte streams, not packets: no loss or reordering. Runs in
its own thread; all methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

READ_BYTES = 64 * 1024
# Bytes on the way per connection and direction beyond what rate and delay imply: a router's queue.
QUEUE_BYTES = 1024 * 1024


@dataclass(slots=True)
class Direction:
    """One way through the relay. `bytes` counts what was delivered."""

    rate_bytes_per_s: float | None = None
    bytes: int = 0
    free_at_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Pipe:
    """One connection, one way: bytes with the time they may leave."""

    direction: Direction
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    waiting_bytes: int = 0
    ended: bool = False
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Relay:
    """Forwards `address` to `target` ("host:port"). Use as a context manager.

    `rate_bytes_per_s` is shared by all connections of a direction; `delay_s` is one way.
    """

    def __init__(
        self, target: str, *, rate_bytes_per_s: float | None = None, delay_s: float = 0.0, listen: str = "127.0.0.1:0"
    ) -> None:
        self._target = _split(target)
        self._listen = _split(listen)
        self.delay_s = delay_s
        self.up = Direction(rate_bytes_per_s)
        self.down = Direction(rate_bytes_per_s)
        self.connections_accepted = 0
        self.address = ""
        self._cut = False
        self._open = threading.Event()
        self._flowing: asyncio.Event | None = None
        self._writers: dict[asyncio.StreamWriter, None] = {}  # a set that keeps the order of arrival
        self._pipes: dict[asyncio.StreamWriter, tuple[_Pipe, _Pipe]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="farfill-relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        self._open.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop everything and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def set_rate(self, rate_bytes_per_s: float | None) -> None:
        """Limit each direction from now on; None: no limit."""
        self.up.rate_bytes_per_s = self.down.rate_bytes_per_s = rate_bytes_per_s

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._cut = True
        self._call(self._reset_all)

    def reset_one(self) -> None:
        """Reset the oldest connection only."""
        self._call(self._reset_oldest)

    def freeze_one(self) -> None:
        """Nothing more passes on the oldest connection; it stands."""
        self._call(self._freeze_oldest)

    def blackhole(self) -> None:
        """Connections stand and are accepted, but nothing passes."""
        self._call(self._stop_flow)

    def heal(self) -> None:
        """Undo `cut` and `blackhole`; what a blackhole swallowed is delivered, as TCP would."""
        self._cut = False
        self._call(self._start_flow)

    def _call(self, function: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._flowing = asyncio.Event()
        self._flowing.set()
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, *self._listen))
        host, port = server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        self._open.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._reset_all()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.run_until_complete(self._drain())
            self._loop.close()

    async def _drain(self) -> None:
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled by `close` only; asyncio of Python 3.11 logs an error about a handler that ends cancelled.
        with contextlib.suppress(asyncio.CancelledError):
            await self._forward(reader, writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._flowing is not None
        self.connections_accepted += 1
        self._writers[writer] = None
        far: asyncio.StreamWriter | None = None
        try:
            if self._cut:
                return
            far_reader, far = await asyncio.open_connection(*self._target)
            self._writers[far] = None
            pipes = (_Pipe(self.up), _Pipe(self.down))
            self._pipes[writer] = pipes
            for pipe in pipes:
                pipe.flowing.set()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(reader, pipes[0]))
                group.create_task(self._write(far, pipes[0]))
                group.create_task(self._read(far_reader, pipes[1]))
                group.create_task(self._write(writer, pipes[1]))
        except* (OSError, asyncio.IncompleteReadError):
            # One side is gone: so is the other, once it can hear of it. A reset does not pass a blackhole either.
            await self._flowing.wait()
        finally:
            self._pipes.pop(writer, None)
            for end in (writer, far):
                if end is not None:
                    self._writers.pop(end, None)
                    _reset(end)

    async def _read(self, reader: asyncio.StreamReader, pipe: _Pipe) -> None:
        assert self._flowing is not None
        while True:
            data = await reader.read(READ_BYTES)
            await self._flowing.wait()
            if not data:
                break
            sent_s = await self._pass(pipe.direction, len(data))
            pipe.waiting.append((sent_s + self.delay_s, data))
            pipe.waiting_bytes += len(data)
            pipe.changed.set()
            while pipe.waiting_bytes > self._room(pipe.direction):
                pipe.changed.clear()
                await pipe.changed.wait()
        pipe.ended = True
        pipe.changed.set()

    async def _pass(self, direction: Direction, nbytes: int) -> float:
        """Wait until the shared line has taken `nbytes`; when that was, in loop time."""
        if direction.rate_bytes_per_s is None:
            return self._loop.time()
        start_s = max(self._loop.time(), direction.free_at_s)
        direction.free_at_s = start_s + nbytes / direction.rate_bytes_per_s
        await asyncio.sleep(max(0.0, direction.free_at_s - self._loop.time()))
        return direction.free_at_s

    def _room(self, direction: Direction) -> float:
        return QUEUE_BYTES + (direction.rate_bytes_per_s or QUEUE_BYTES) * self.delay_s

    async def _write(self, writer: asyncio.StreamWriter, pipe: _Pipe) -> None:
        assert self._flowing is not None
        while True:
            while not pipe.waiting:
                if pipe.ended:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                    return
                pipe.changed.clear()
                await pipe.changed.wait()
            due_s, data = pipe.waiting.popleft()
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            await self._flowing.wait()
            await pipe.flowing.wait()
            pipe.waiting_bytes -= len(data)
            pipe.changed.set()
            writer.write(data)
            await writer.drain()
            pipe.direction.bytes += len(data)

    def _stop_flow(self) -> None:
        assert self._flowing is not None
        self._flowing.clear()

    def _start_flow(self) -> None:
        assert self._flowing is not None
        self._flowing.set()

    def _reset_all(self) -> None:
        for writer in list(self._writers):
            _reset(writer)

    def _reset_oldest(self) -> None:
        for writer in list(self._pipes)[:1]:
            del self._pipes[writer]  # the next call means the next connection
            _reset(writer)

    def _freeze_oldest(self) -> None:
        for pipes in list(self._pipes.values())[:1]:
            for pipe in pipes:
                pipe.flowing.clear()


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
