"""CPU time of the gateway's own code for a short request and for a streamed token: one process, no sockets.

Client and worker are `_gateway_load.py`'s bytes, handed to the gateway's protocols through transports in memory: what
sockets cost is left out. Rounds are short and the quickest counts, so this says what a change brings also on a machine
with other work. Nothing is required of it; `gateway.py` has what must hold.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Awaitable, Callable
from typing import cast

import uvloop
from aiohttp import web

import _gateway_load as load
from _common import Figures, median, note, note_machine
from _gateway_process import deps_of
from farfill.cli.model_store import fetch, find_source
from farfill.cli.run_role import spare_the_collector
from farfill.gateway.app import build_runner

CONNECTIONS = 32
STREAMS = 64


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--profile", choices=("request", "token"), help="also show where its calls are")
    args = parser.parse_args()
    note_machine()
    with asyncio.Runner(loop_factory=MemoryLoop) as loop:
        loop.run(measure(args.rounds, args.profile, Figures()))
    return 0


class MemoryTransport(asyncio.Transport):
    """Hands what is written to `written`; whoever has the other side calls the protocol."""

    def __init__(self, protocol: asyncio.Protocol, written: Callable[[bytes], object]) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self._protocol = protocol
        self._written = written
        self._closing = False
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._written(bytes(data))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


class MemoryLoop(uvloop.Loop):
    """Whoever connects, connects to a decode worker in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = load.Streams(held=True)

    async def create_connection(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, factory: Callable[[], asyncio.Protocol], *_: object, **__: object
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        made, upstream = factory(), load.WorkerUpstream(self.streams)
        MemoryTransport(upstream, lambda data: self.call_soon(made.data_received, data))
        return MemoryTransport(made, upstream.data_received), made


class Client:
    """One connection to the gateway."""

    def __init__(self, server: web.Server) -> None:
        self.got = bytearray()
        self.whole = asyncio.Event()
        self._protocol = server()
        MemoryTransport(self._protocol, self._came)

    def _came(self, data: bytes) -> None:
        self.got += data
        self.whole.set()

    async def ask(self, data: bytes) -> bytes:
        """Send a request; returns what comes first."""
        self.whole.clear()
        self.got.clear()
        self._protocol.data_received(data)
        await self.whole.wait()
        if not self.got.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(self.got[:2000].decode(errors="replace"))
        return bytes(self.got)


async def measure(rounds: int, profile: str | None, figures: Figures) -> None:
    """Start a gateway and take both."""
    folder = fetch(find_source("smollm2"), accept_terms=False, report=note)
    loop = cast(MemoryLoop, asyncio.get_running_loop())
    runner = build_runner(deps_of(folder, 1, log=open(os.devnull, "w")), shutdown_timeout_s=0.1)  # noqa: SIM115, ASYNC230
    await runner.setup()
    assert runner.server is not None
    askers = [Client(cast(web.Server, runner.server)) for _ in range(CONNECTIONS)]
    data = load.request()

    async def requests(count: int) -> None:
        for _ in range(count // CONNECTIONS):
            await asyncio.gather(*[client.ask(data) for client in askers])

    clients = [Client(cast(web.Server, runner.server)) for _ in range(STREAMS)]
    for number, streaming in enumerate(clients):
        await streaming.ask(load.request(number))

    async def tokens(count: int) -> None:
        for _ in range(count // STREAMS):
            for more in loop.streams.tokens.values():
                more()
            for _ in range(3):
                await asyncio.sleep(0)

    spare_the_collector()
    for name, work, count in (("request", requests, 4 * CONNECTIONS), ("token", tokens, 40 * STREAMS)):
        await work(count)
        took_s = [await cpu_s(work, count) for _ in range(rounds)]
        figures.reported(f"gateway_cpu_us_a_{name}", min(took_s) / count * 1e6)
        figures.reported(f"gateway_cpu_us_a_{name}_median", median(took_s) / count * 1e6)
        if profile == name:
            profiler = cProfile.Profile()
            profiler.enable()
            await work(count)
            profiler.disable()
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(60)
            note(f"{pstats.Stats(profiler).total_calls / count:.1f} calls each")  # pyright: ignore[reportAttributeAccessIssue]
    expected = 1 + 40 * (rounds + 1)
    if any(streaming.got.count(b'"content":" word"') < expected for streaming in clients):
        raise RuntimeError("tokens were lost")
    await runner.cleanup()


async def cpu_s(work: Callable[[int], Awaitable[None]], count: int) -> float:
    """CPU time of `work(count)`."""
    began_s = time.process_time()
    await work(count)
    return time.process_time() - began_s


if __name__ == "__main__":
    sys.exit(main())
