"""Chunks of a link that works, however slowly, are never sent twice; those of a connection that is stuck are.

The real link, transfers and machines on a virtual clock; the network is a line of one rate that the connections share.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from farfill.clock import VirtualClock
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.core.ticket import Ticket
from farfill.kv.codec import ChunkCodec
from farfill.kv.manifest import build_manifest
from farfill.transfer.limits import limits_of
from farfill.transfer.link import PeerLink
from farfill.transfer.outgoing import PushedTransfer, SendOptions
from farfill.transport.memory import MemoryNetwork
from farfill.transport.protocol import OutgoingFrame, PathSample
from farfill.transport.reactor import Reactor
from farfill.transport.tls import PeerIdentity
from farfill.wire.frames import AcceptPayload, FrameHeader, FrameType, HelloPayload, unpack_header
from support.transfer_harness import FINGERPRINT, CountingObserver, config

MIB = 1024 * 1024
STEP_S = 0.01
RTT_S = 0.02
LAYOUT = KVLayout((TensorLayout(0, "k", TensorKind.FULL, "float32", (1024, 256)),), prefill_chunk_tokens=8)
TOKENS = 24  # of 1 MiB


@dataclass
class Line:
    """What was written is delivered at the line's rate, the connections in turn; answers come a round trip later."""

    connections: int
    unsent_bytes: int
    stuck: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.seen = CountingObserver()
        me = HelloPayload(1, FINGERPRINT, "prefill", "g")
        transport = MemoryNetwork().transport(PeerIdentity("t", "s", "prefill", "prefill"))
        self.link = PeerLink(
            "", "decode", me, transport, Reactor("test"), config=config(), clock=self.clock, observer=self.seen
        )
        self.codec = ChunkCodec()
        self.queues: list[deque[tuple[PushedTransfer, OutgoingFrame]]] = [deque() for _ in range(self.connections)]
        self.left = [0.0] * self.connections
        self.confirmed = [0] * self.connections
        self.answers: deque[tuple[float, PushedTransfer, FrameHeader, int]] = deque()

    def send(self, chunk_bytes: int) -> PushedTransfer:
        ticket = Ticket(
            transfer_id="t",
            fingerprint=FINGERPRINT,
            tenant="tenant",
            prefill="prefill",
            decode="decode",
            num_tokens=TOKENS,
            issued_unix_s=0.0,
            expires_unix_s=1e9,
        )
        manifest = build_manifest(LAYOUT, TOKENS)
        options = SendOptions(limits=limits_of(config(), 600), chunk_bytes=chunk_bytes, checksum=False)
        transfer = PushedTransfer(
            ticket, "token", manifest, options, link=self.link, clock=self.clock, observer=self.seen
        )
        self.link.add(transfer)
        transfer.offer([(piece.index, memoryview(bytes(piece.nbytes))) for piece in manifest.pieces])
        chunks = sum(-(-piece.nbytes // chunk_bytes) for piece in manifest.pieces)
        transfer.accepted(AcceptPayload(chunk_bytes, bytes(-(-chunks // 8))), "g")
        transfer.finish()
        return transfer

    def run(self, transfer: PushedTransfer, rate_at: Callable[[float], float]) -> None:
        """Until every chunk is acknowledged."""
        chunks = transfer.stats
        wanted = TOKENS * MIB
        acknowledged: set[tuple[int, int]] = set()
        nbytes = 0
        for step in itertools.count():
            assert step * STEP_S < 300, "it never ended"
            self._write()
            self._deliver(rate_at(self.clock.now_s()) * STEP_S)
            self.clock.advance(STEP_S)
            while self.answers and self.answers[0][0] <= self.clock.now_s():
                _, owner, header, connection = self.answers.popleft()
                if (header.piece, header.offset) not in acknowledged:
                    acknowledged.add((header.piece, header.offset))
                    nbytes += header.raw_bytes
                owner.chunk_answered(
                    FrameHeader(FrameType.ACK, piece=header.piece, offset=header.offset), memoryview(b""), connection
                )
            if step % 10 == 0:
                for connection in range(self.connections):
                    sample = PathSample(RTT_S, 1, 0, 1.0, 0.0, "cubic", self.confirmed[connection])
                    self.link.sampled(connection, sample)
                self.link.round_trip(RTT_S)
            if nbytes == wanted:
                assert chunks().raw_bytes == wanted
                return

    def _write(self) -> None:
        for connection, queue in enumerate(self.queues):
            while self.left[connection] + sum(frame.size for _, frame in list(queue)[1:]) < self.unsent_bytes:
                taken = self.link.next_chunk(connection, self.codec, early=False)
                if taken is None:
                    break
                if not queue:
                    self.left[connection] = taken[1].size
                queue.append(taken)
                taken[0].frame_sent(taken[1])

    def _deliver(self, budget: float) -> None:
        busy = [c for c in range(self.connections) if self.queues[c] and c not in self.stuck]
        for place, connection in enumerate(busy):
            share = budget / (len(busy) - place)
            queue = self.queues[connection]
            while queue and share > 0:
                moved = min(share, self.left[connection])
                self.left[connection] -= moved
                self.confirmed[connection] += int(moved)
                share -= moved
                budget -= moved
                if self.left[connection] <= 0:
                    owner, frame = queue.popleft()
                    head: list[bytes] = []
                    frame.send(0, 64, lambda data, head=head: head.append(bytes(data)) or len(data))
                    self.answers.append((self.clock.now_s() + RTT_S, owner, unpack_header(head[0]), connection))
                    self.left[connection] = queue[0][1].size if queue else 0.0


RATES: dict[str, Callable[[float], float]] = {
    "slow": lambda _: 1.5 * MIB,
    "middling": lambda _: 9 * MIB,
    "becomes slow": lambda now_s: (40 if now_s < 0.3 else 2) * MIB,
    "unsteady": lambda now_s: (12 if int(now_s) % 2 else 1.5) * MIB,
    "stands still now and then": lambda now_s: 0.0 if int(now_s * 10) % 30 > 24 else 8 * MIB,
}


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("connections", [1, 4, 8])
@pytest.mark.parametrize("chunk_bytes", [256 * 1024, 4 * MIB])
def test_working_link_carries_each_chunk_once(rate: str, connections: int, chunk_bytes: int) -> None:
    line = Line(connections, unsent_bytes=512 * 1024)
    line.run(line.send(chunk_bytes), RATES[rate])
    assert line.seen.counts["resent:overdue"] == 0


@pytest.mark.parametrize("chunk_bytes", [256 * 1024, 4 * MIB])
def test_chunks_of_a_stuck_connection_go_out_on_another(chunk_bytes: int) -> None:
    line = Line(4, unsent_bytes=512 * 1024, stuck={2})
    line.run(line.send(chunk_bytes), lambda _: 9 * MIB)
    assert 0 < line.seen.counts["resent:overdue"] <= 1 + 512 * 1024 // chunk_bytes
