"""One end of Farfill's transfer plane as a process of its own, told what to do by JSON lines on stdin.

Run as `_transfer_end.py receive|send OPTIONS`, OPTIONS being `EndOptions` in JSON. Each request `{"id", "do", ...}` is
answered by `{"id", ...}` on stdout as soon as it is done; several may be under way. All times are of the monotonic
clock, which the processes of one machine share. Sent bytes and slots exist before anything is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
import psutil
import xxhash

from _transfer_layout import FINGERPRINT, layout_of
from farfill.clock import WallClock
from farfill.config.model import KVTransferConfig
from farfill.core.ticket import Ticket
from farfill.kv.manifest import Manifest, build_manifest
from farfill.telemetry.logs import setup_logging
from farfill.transfer.observer import SilentObserver
from farfill.transfer.protocol import ExpectedTransfer
from farfill.transfer.receiver import KVReceiver
from farfill.transfer.sender import KVSender
from farfill.transfer.tickets import TicketVerifier
from farfill.transport.tls import client_context, server_context


class EndOptions(msgspec.Struct, kw_only=True, frozen=True):
    """`pki`: folder of `farfill pki init`; `content`: a file of KV bytes in manifest order, or none for noise."""

    name: str
    pki: str
    layout: str
    config: dict[str, Any]
    listen: str = ""
    content: str | None = None
    content_bytes: int = 0


class Seen(SilentObserver):
    """Counts what the plane reports."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.connections_to: dict[str, int] = {}

    def chunk_sent(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        self.counts["sent_bytes"] += raw_bytes
        self.counts[f"sent_{codec}"] += 1

    def chunk_received(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        self.counts["received_bytes"] += raw_bytes

    def resent(self, reason: str) -> None:
        self.counts[f"resent_{reason}"] += 1

    def connections(self, peer: str, count: int) -> None:
        self.connections_to[peer] = count


class Slot:
    """A `KVSlot` whose memory goes back to a pool."""

    def __init__(self, manifest: Manifest, pool: list[np.ndarray]) -> None:
        self.manifest = manifest
        self.held: frozenset[int] = frozenset()
        self.memory = pool.pop() if pool else np.empty(manifest.total_bytes, np.uint8)
        self.memory.fill(0)
        self._pool = pool
        self._views = views_of(manifest, memoryview(self.memory))
        self.digest: str | None = None

    def buffer(self, piece: int) -> memoryview:
        """Where the bytes of a piece go."""
        return self._views[piece]

    def release(self) -> None:
        """The plane will not write any more."""
        self.digest = xxhash.xxh3_128_hexdigest(self.memory)
        self._pool.append(self.memory)


@dataclass
class Expected:
    """An announced transfer."""

    transfer: ExpectedTransfer
    slot: Slot


def views_of(manifest: Manifest, data: memoryview) -> list[memoryview]:
    """One view per piece, in manifest order."""
    views, at = [], 0
    for piece in manifest.pieces:
        views.append(data[at : at + piece.nbytes])
        at += piece.nbytes
    return views


class End:
    """What both ends can do."""

    def __init__(self, options: EndOptions) -> None:
        self.options = options
        self.layout = layout_of(options.layout)
        self.seen = Seen()
        self.clock = WallClock()
        self.config = KVTransferConfig(**options.config)
        folder = Path(options.pki)
        self.pems = tuple(
            (folder / name).read_bytes() for name in (f"{options.name}.pem", f"{options.name}.key", "ca.pem")
        )
        self.ticket_key = (folder / "ticket.pub").read_bytes()
        self._process = psutil.Process()

    async def usage(self) -> dict[str, Any]:
        """CPU seconds of this process, memory now and at most, and what was counted."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "cpu_s": used.ru_utime + used.ru_stime,
            "rss_bytes": self._process.memory_info().rss,
            "peak_rss_bytes": used.ru_maxrss * 1024,
            "now_s": time.monotonic(),
            **self.seen.counts,
        }


class ReceivingEnd(End):
    """A decode worker's side."""

    async def start(self) -> dict[str, Any]:
        """Listen."""
        self._pools: dict[int, list[np.ndarray]] = {}
        self._expected: dict[str, Expected] = {}
        self.receiver = KVReceiver(
            self.options.listen,
            self.options.name,
            FINGERPRINT,
            self.layout,
            server_context(*self.pems),
            TicketVerifier(self.ticket_key, self.clock, 5.0),
            self.config,
            self.clock,
            self.seen,
        )
        await self.receiver.start()
        return {"address": self.receiver.address}

    async def expect(self, ticket: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Announce a transfer, with memory that has been touched."""
        announced = Ticket(**ticket)
        manifest = build_manifest(self.layout, announced.num_tokens)
        slot = Slot(manifest, self._pools.setdefault(manifest.total_bytes, []))
        transfer = self.receiver.expect(announced, slot, timeout_s=timeout_s)
        self._expected[announced.transfer_id] = Expected(transfer, slot)
        return {}

    async def result(self, transfer_id: str) -> dict[str, Any]:
        """Wait for the end of an announced transfer."""
        expected = self._expected.pop(transfer_id)
        result = await expected.transfer.wait()
        done_s = time.monotonic()
        if expected.slot.digest is None:
            expected.slot.release()
        return {
            "complete": result.complete,
            "detail": f"{result.failure}: {result.detail}",
            "done_s": done_s,
            "digest": expected.slot.digest,
        }

    async def close(self) -> dict[str, Any]:
        """Stop."""
        await self.receiver.close()
        return {"held": self.receiver.held_transfers()}


class SendingEnd(End):
    """A prefill worker's side."""

    async def start(self) -> dict[str, Any]:
        """Make the bytes to send."""
        options = self.options
        if options.content is not None:
            self._content = np.fromfile(options.content, np.uint8)
        else:
            self._content = np.random.default_rng(1).integers(0, 256, options.content_bytes, np.uint8)
        self.sender = KVSender(
            options.name, FINGERPRINT, client_context(*self.pems), self.config, self.clock, self.seen
        )
        await self.sender.start()
        return {}

    async def send(
        self, address: str, tickets: list[dict[str, Any]], tokens: list[str], timeout_s: float
    ) -> dict[str, Any]:
        """Send all at once; `seconds` of each, from its beginning to the confirmation of the complete set."""
        digests = {count: self._digest(count) for count in {ticket["num_tokens"] for ticket in tickets}}
        start_s = time.monotonic()
        results = await asyncio.gather(
            *(
                self._one(address, Ticket(**ticket), token, timeout_s)
                for ticket, token in zip(tickets, tokens, strict=True)
            )
        )
        for ticket, result in zip(tickets, results, strict=True):
            result["digest"] = digests[ticket["num_tokens"]]
        return {"start_s": start_s, "transfers": results, "connections": sum(self.seen.connections_to.values())}

    async def close(self) -> dict[str, Any]:
        """Stop."""
        await self.sender.close()
        return {"active": self.sender.active_transfers()}

    async def _one(self, address: str, ticket: Ticket, token: str, timeout_s: float) -> dict[str, Any]:
        manifest = build_manifest(self.layout, ticket.num_tokens)
        views = views_of(manifest, memoryview(self._content))
        start_s = time.monotonic()
        transfer = self.sender.begin(ticket, token, address, manifest, timeout_s=timeout_s)
        transfer.offer(list(enumerate(views)))
        transfer.finish()
        stats = await transfer.wait()
        return {"seconds": time.monotonic() - start_s, **asdict(stats)}

    def _digest(self, num_tokens: int) -> str:
        return xxhash.xxh3_128_hexdigest(self._content[: build_manifest(self.layout, num_tokens).total_bytes])


async def serve(end: End) -> None:
    """Answer requests until stdin closes. What anything else prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=16 * 1024 * 1024)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with asyncio.TaskGroup() as group:
        while line := await reader.readline():
            group.create_task(_answer(end, json.loads(line), answers))


async def _answer(end: End, request: dict[str, Any], answers: TextIO) -> None:
    number, verb = request.pop("id"), request.pop("do")
    try:
        answer = await getattr(end, verb)(**request)
    except Exception as error:  # whoever asked decides what it means
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps({"id": number, **answer}) + "\n")


if __name__ == "__main__":
    setup_logging(
        os.environ.get("FARFILL_BENCH_VERBOSE") or "error", "text", role=sys.argv[1], site="bench", name="bench"
    )
    given = msgspec.json.decode(sys.argv[2], type=EndOptions)
    asyncio.run(serve(ReceivingEnd(given) if sys.argv[1] == "receive" else SendingEnd(given)))
