"""Two ends of the transfer plane on loopback or in memory, with slots of plain bytes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from farfill.clock import Clock, WallClock
from farfill.config.model import KVTransferConfig
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.core.ticket import Ticket
from farfill.kv.manifest import Manifest, build_manifest
from farfill.transfer.receiver import KVReceiver
from farfill.transfer.sender import KVSender
from farfill.transfer.tickets import TicketVerifier, sign_ticket
from farfill.transport.tls import PeerIdentity
from support.pki import Pki, make_pki, make_ticket_keys

FINGERPRINT = "f" * 64
PREFILL = "prefill-far"
DECODE = "decode-near"

LAYOUT = KVLayout(
    (
        TensorLayout(0, "k", TensorKind.FULL, "bfloat16", (2, 64)),
        TensorLayout(0, "v", TensorKind.FULL, "bfloat16", (2, 64)),
        TensorLayout(1, "k", TensorKind.FULL, "float32", (2, 64)),
        TensorLayout(1, "v", TensorKind.FULL, "float32", (2, 64)),
    ),
    prefill_chunk_tokens=512,
)
HYBRID = KVLayout(
    (
        *LAYOUT.tensors,
        TensorLayout(2, "k", TensorKind.WINDOW, "bfloat16", (1, 32), window_tokens=128),
        TensorLayout(3, "state", TensorKind.RECURRENT, "float32", (4, 32, 32)),
        TensorLayout(3, "conv", TensorKind.CONV, "bfloat16", (3, 96)),
    ),
    prefill_chunk_tokens=512,
)


class BytesSlot:
    """A `KVSlot` of bytearrays that counts its releases."""

    def __init__(self, manifest: Manifest, held: frozenset[int] = frozenset()) -> None:
        self.manifest = manifest
        self.held = held
        self.memory = [bytearray(piece.nbytes) for piece in manifest.pieces]
        self.released = 0

    def buffer(self, piece: int) -> memoryview:
        return memoryview(self.memory[piece])

    def release(self) -> None:
        self.released += 1


class CountingObserver:
    """Counts what the plane reports."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.standing: dict[str, int] = {}

    def chunk_sent(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        self.counts[f"sent:{codec}"] += 1
        self.counts[f"sent:{kind}"] += 1

    def chunk_confirmed(self, connection: int, wire_bytes: int) -> None:
        self.counts["confirmed"] += 1

    def chunk_received(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        self.counts[f"received:{codec}"] += 1

    def resent(self, reason: str) -> None:
        self.counts[f"resent:{reason}"] += 1

    def dropped(self, reason: str) -> None:
        self.counts[f"dropped:{reason}"] += 1

    def refused(self, reason: str) -> None:
        self.counts[f"refused:{reason}"] += 1

    def connections(self, peer: str, count: int) -> None:
        self.standing[peer] = count

    def path(
        self, peer: str, rtt_s: float, segments_sent: int, segments_resent: int, delivery_bytes_per_s: float
    ) -> None:
        self.counts["path"] += 1

    def link(self, peer: str, rate_bytes_per_s: float | None, rtt_s: float | None) -> None:
        self.counts["link"] += 1


def config(**values: Any) -> KVTransferConfig:
    """Small chunks and short deadlines unless told otherwise."""
    return KVTransferConfig(**{"chunk_size_mb": 1, "timeout_ms": 2000, "compression": "none", **values})


def make_pieces(manifest: Manifest, seed: int = 0) -> list[tuple[int, memoryview]]:
    """Bytes for every piece, not compressible."""
    rng = random.Random(seed)
    return [(p.index, memoryview(rng.randbytes(p.nbytes))) for p in manifest.pieces]


class Ends:
    """One sender and one receiver with everything they need; parts can be swapped before `start`."""

    def __init__(self, folder: Path, layout: KVLayout = LAYOUT, clock: Clock | None = None) -> None:
        self.layout = layout
        self.clock = clock or WallClock()
        self.pki: Pki = make_pki(folder / "pki")
        self.private_key, self.public_key = make_ticket_keys()
        self.sender_seen = CountingObserver()
        self.receiver_seen = CountingObserver()
        self._ids = itertools.count()
        self.receiver: KVReceiver
        self.sender: KVSender

    def identity(self, name: str, role: str) -> PeerIdentity:
        return PeerIdentity("test", "site", role, name)

    def make_receiver(self, *, listen: str | None = "127.0.0.1:0", name: str = DECODE, **options: Any) -> KVReceiver:
        verifier = TicketVerifier(options.pop("public_key", self.public_key), self.clock, 1.0)
        credentials = self.pki.name(name)
        return KVReceiver(
            listen,
            name,
            options.pop("fingerprint", FINGERPRINT),
            options.pop("layout", self.layout),
            None if options.get("transport") else credentials.server(),
            verifier,
            options.pop("config", config()),
            self.clock,
            self.receiver_seen,
            client_ctx=None if options.get("transport") else credentials.client(),
            **options,
        )

    def make_sender(self, *, name: str = PREFILL, **options: Any) -> KVSender:
        return KVSender(
            options.pop("identity_name", name),
            options.pop("fingerprint", FINGERPRINT),
            options.pop("client_ctx", None) or self.pki.name(name, role="prefill", site="far").client(),
            options.pop("config", config()),
            self.clock,
            self.sender_seen,
            server_ctx=self.pki.name(name, role="prefill", site="far").server(),
            **options,
        )

    async def start(self) -> None:
        if not hasattr(self, "receiver"):
            self.receiver = self.make_receiver()
        if not hasattr(self, "sender"):
            self.sender = self.make_sender()
        await self.receiver.start()
        await self.sender.start()

    async def close(self) -> None:
        await self.sender.close()
        await self.receiver.close()

    def ticket(self, num_tokens: int, **changes: Any) -> Ticket:
        now = self.clock.unix_s()
        values: dict[str, Any] = {
            "transfer_id": f"transfer-{next(self._ids)}",
            "fingerprint": FINGERPRINT,
            "tenant": "tenant",
            "prefill": PREFILL,
            "decode": DECODE,
            "num_tokens": num_tokens,
            "issued_unix_s": now,
            "expires_unix_s": now + 60,
        }
        return Ticket(**{**values, **changes})

    def sign(self, ticket: Ticket) -> str:
        return sign_ticket(ticket, self.private_key)

    def manifest(self, num_tokens: int) -> Manifest:
        return build_manifest(self.layout, num_tokens)


@contextlib.asynccontextmanager
async def two_ends(folder: Path, layout: KVLayout = LAYOUT, clock: Clock | None = None) -> AsyncIterator[Ends]:
    """Ends that are closed afterwards, and must have left no transfer, no memory and no thread."""
    ends = Ends(folder, layout, clock)
    yield ends
    await ends.close()
    assert ends.receiver.held_transfers() == 0
    assert ends.receiver.early.held_bytes == 0
    assert ends.receiver.budget.leased_bytes == 0
    assert ends.sender.active_transfers() == 0
    # A thread is on its way out for a moment after all it served is over.
    await asyncio.to_thread(eventually, lambda: transfer_threads() == [])


def prefill_context(ends: Ends) -> ssl.SSLContext:
    """What a raw peer needs to pass for the prefill worker."""
    return ends.pki.name(PREFILL, role="prefill", site="far").client()


def transfer_threads() -> list[str]:
    """Names of live threads of the transfer plane."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("farfill-kv")]


def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait on threads from a thread; fails at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.002)
