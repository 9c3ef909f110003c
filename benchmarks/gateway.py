"""What one gateway process on one core does, beside vllm-router (Rust) on the same core, upstream answering at once.

    make bench-peers; python benchmarks/gateway.py
    python benchmarks/gateway.py --only latency  # half a minute, without the router

Gateway and router run on core 0, in turns; client and upstreams (`_gateway_load.py`) on core 1. The gateway is complete
but for the registry and TLS (`_gateway_process.py`); the router runs as it does by default. It forwards text: it
tokenizes nothing, knows no prefix, tenant or link, and reads no token it passes on.

Must stay: requests/s and streamed tokens/s at least the router's; at half of its own peak, at most 0.5 ms (p50) and
3 ms (p99) more than the upstream alone; at most 60 KB of memory a stream. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

import _gateway_load as load
from _common import Figures, note, note_machine
from _transfer_lab import cache_folder
from farfill.cli.model_store import fetch, find_source

CONNECTIONS = 32
STREAMS = 256
OPEN_STREAMS = 1000
START_S = 60.0
MEASURES = ("rate", "streams", "latency", "memory")

Address = tuple[str, int]


def main() -> int:
    """Run and print; 1 when something falls short."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, in turns; the best counts")
    parser.add_argument("--only", choices=MEASURES, nargs="+", default=MEASURES)
    args = parser.parse_args()
    note_machine()
    folder = fetch(find_source("smollm2"), accept_terms=False, report=note)
    os.sched_setaffinity(0, {1})
    figures = Figures()
    uvloop.run(measure(folder, args, figures))
    return figures.exit_code


@dataclass(frozen=True)
class Side:
    """One of the two that are compared."""

    name: str
    address: Address
    process: psutil.Process

    def cpu_s(self) -> tuple[float, float]:
        """CPU time used so far, and how much of it in the kernel."""
        times = self.process.cpu_times()
        return times.user + times.system, times.system


async def measure(folder: Path, args: argparse.Namespace, figures: Figures) -> None:
    """Start all and take what is asked for."""
    loop, streams = asyncio.get_running_loop(), load.Streams()
    openai = await loop.create_server(lambda: load.OpenAIUpstream(streams), "127.0.0.1", 0, backlog=2048)
    worker = await loop.create_server(lambda: load.WorkerUpstream(streams), "127.0.0.1", 0, backlog=2048)
    async with contextlib.AsyncExitStack() as stack:
        ours = await stack.enter_async_context(farfill(folder, port(worker)))
        compared = "rate" in args.only or "streams" in args.only
        theirs = await stack.enter_async_context(router(port(openai))) if compared else None
        sides = [side for side in (ours, theirs) if side is not None]

        async def rate(side: Side) -> tuple[float, int]:
            return await load.peak_rate(side.address, load.request(), CONNECTIONS, args.seconds)

        peak = 0.0
        if "rate" in args.only:
            peak = await compare("requests", sides, rate, args.rounds, figures)
        elif "latency" in args.only:
            peak = max([(await rate(ours))[0] for _ in range(args.rounds)])
        if "streams" in args.only:

            async def tokens(side: Side) -> tuple[float, int]:
                return await load.stream_rate(side.address, streams, STREAMS, args.seconds)

            await compare("streamed_tokens", sides, tokens, args.rounds, figures)
        if "latency" in args.only:
            await added_latency(ours, ("127.0.0.1", port(openai)), peak / 2, args.seconds, args.rounds, figures)
        if "memory" in args.only:
            await memory(ours, streams, figures)


async def compare(
    what: str,
    sides: Sequence[Side],
    once: Callable[[Side], Awaitable[tuple[float, int]]],
    rounds: int,
    figures: Figures,
) -> float:
    """`once` for each side in turns: (a second, how many in all). Returns ours; the best round of each counts.

    CPU time is told beside: on a machine with other work, or when client and upstreams are what is slow, it says more.
    """
    best, least_us = {side.name: 0.0 for side in sides}, {side.name: math.inf for side in sides}
    for _ in range(rounds):
        for side in sides:
            before_s = side.cpu_s()
            a_second, count = await once(side)
            cpu_us, kernel_us = (
                (after - before) / max(1, count) * 1e6 for before, after in zip(before_s, side.cpu_s(), strict=True)
            )
            cost = f"{cpu_us:.1f} us of CPU each, {kernel_us:.1f} in the kernel"
            note(f"{side.name}: {a_second:.0f} {what} a second, {cost}")
            best[side.name] = max(best[side.name], a_second)
            least_us[side.name] = min(least_us[side.name], cpu_us)
    name = f"{what}_per_s_over_vllm_router"
    if len(sides) < 2:
        figures.not_measured(name, ">= 1")
    else:
        figures.at_least(name, best["farfill"] / best["vllm-router"], 1.0)
        figures.reported(f"{what}_cpu_over_vllm_router", least_us["farfill"] / least_us["vllm-router"])
    return best["farfill"]


async def added_latency(
    ours: Side, upstream: Address, rate: float, seconds: float, rounds: int, figures: Figures
) -> None:
    """Latency through the gateway over that of an upstream asked directly, at random moments; the best round counts."""
    least_ms = {"p50": math.inf, "p99": math.inf}
    for _ in range(rounds):
        alone_s = await load.latencies(upstream, load.request(), rate, seconds)
        through_s = await load.latencies(ours.address, load.request(), rate, seconds)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            alone, through = (values[int(len(values) * share)] * 1000 for values in (alone_s, through_s))
            note(f"{name} at {rate:.0f} requests a second: upstream alone {alone:.3f} ms, through us {through:.3f} ms")
            least_ms[name] = min(least_ms[name], through - alone)
    for name, limit_ms in (("p50", 0.5), ("p99", 3.0)):
        figures.at_most(f"added_latency_ms_{name}", least_ms[name], limit_ms)


async def memory(ours: Side, streams: load.Streams, figures: Figures) -> None:
    """What open streams take, once their first tokens went through."""
    streams.held = True
    before = ours.process.memory_info().rss
    clients = await load.open_streams(ours.address, streams, OPEN_STREAMS)
    figures.at_most("kb_per_open_stream", (ours.process.memory_info().rss - before) / OPEN_STREAMS / 1000, 60)
    await load.close_streams(clients, streams)


def port(server: asyncio.Server) -> int:
    """Where it listens."""
    return server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def farfill(folder: Path, worker_port: int) -> AsyncIterator[Side]:
    """Our gateway on core 0."""
    script = str(Path(__file__).parent / "_gateway_process.py")
    command = ["taskset", "-c", "0", sys.executable, script, str(folder), str(worker_port)]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as child,  # noqa: ASYNC220
    ):
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            line = await asyncio.to_thread(child.stdout.readline)
            if not line:
                log.seek(0)
                raise RuntimeError(log.read().decode())
            yield Side("farfill", ("127.0.0.1", int(line)), psutil.Process(child.pid))
        finally:
            child.stdin.close()
            child.wait(30)


@contextlib.asynccontextmanager
async def router(upstream_port: int) -> AsyncIterator[Side | None]:
    """vllm-router on core 0 in front of one upstream; None when it is not installed."""
    program = cache_folder() / "bench-peers-router" / "bin" / "vllm-router"
    if not program.exists():
        note(f"{program} is not there: run make bench-peers")
        yield None
        return
    own_port, metrics_port = free_port(), free_port()
    command = ["taskset", "-c", "0", str(program), "--host", "127.0.0.1", "--port", str(own_port)]
    command += ["--prometheus-port", str(metrics_port), "--worker-startup-check-interval", "1"]
    command += ["--worker-urls", f"http://127.0.0.1:{upstream_port}"]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as child,  # noqa: ASYNC220
    ):
        try:
            await listens(own_port)
            yield Side("vllm-router", ("127.0.0.1", own_port), psutil.Process(child.pid))
        finally:
            child.kill()  # asked to stop it waits for its streams, also for those whose clients are gone
            child.wait(30)


async def listens(number: int) -> None:
    """Wait until somebody listens at that port. Raises TimeoutError."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", number)
        except OSError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nobody listens at {number}") from None
            await asyncio.sleep(0.1)
        else:
            transport.close()
            return


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
