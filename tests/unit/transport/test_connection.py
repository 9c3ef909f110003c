"""One connection: frames whole and in order both ways, over TLS and in memory; every call on one thread at a time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farfill.clock import WallClock
from farfill.core.errors import FarfillError
from farfill.transport.connection import Connection
from farfill.transport.errors import IdentityError, TransportError, TransportTimeoutError
from farfill.transport.memory import MemoryNetwork
from farfill.transport.protocol import UNSENT_BYTES, Channel, OutgoingFrame, PathSample, Receive, Transport
from farfill.transport.reactor import Reactor
from farfill.transport.tcp import TlsTcpTransport, join_address, split_address
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker
from farfill.wire.frames import FrameHeader, FrameType, encode_frame, pack_header
from support.pki import make_pki
from support.transfer_harness import eventually

MIB = 1024 * 1024
REACTOR = Reactor("test", lanes=2)


class Recorder:
    """A session that sends what is queued and keeps what arrives."""

    def __init__(self, waker: Waker) -> None:
        self.waker = waker
        self.outgoing: deque[OutgoingFrame] = deque()
        self.controls: list[tuple[FrameHeader, bytes]] = []
        self.chunks: list[bytes] = []
        self.sent = 0
        self.finishing = False
        self.room = True
        self.asked = 0
        self.unsent_bytes = UNSENT_BYTES
        self.errors: list[Exception | None] = []
        self.violations: list[FarfillError] = []
        self.abandoned = 0
        self.threads: set[int] = set()

    def queue(self, frame: OutgoingFrame) -> None:
        self.outgoing.append(frame)
        self.waker.wake()

    def next_frame(self, now_s: float) -> OutgoingFrame | None:
        self.threads.add(threading.get_ident())
        return self.outgoing.popleft() if self.outgoing else None

    def frame_sent(self, frame: OutgoingFrame, now_s: float) -> None:
        self.sent += 1

    def control(self, header: FrameHeader, payload: memoryview, now_s: float) -> None:
        self.threads.add(threading.get_ident())
        self.controls.append((header, bytes(payload)))

    def chunk(self, header: FrameHeader, now_s: float) -> Collecting | None:
        self.asked += 1
        return Collecting(self, header.wire_bytes) if self.room else None

    def tick(self, now_s: float, path: Callable[[], PathSample | None]) -> float:
        return 10.0

    def violated(self, error: FarfillError) -> None:
        self.violations.append(error)
        self.outgoing.append(OutgoingFrame(encode_frame(FrameHeader(FrameType.REFUSE))))

    def closed(self, error: Exception | None) -> None:
        self.errors.append(error)


class Collecting:
    def __init__(self, recorder: Recorder, nbytes: int) -> None:
        self.recorder = recorder
        self.data = bytearray(nbytes)
        self.filled = 0

    @property
    def remaining(self) -> int:
        return len(self.data) - self.filled

    def fill(self, receive: Receive) -> int | None:
        received = receive(memoryview(self.data)[self.filled :])
        self.filled += received or 0
        return received

    def complete(self) -> None:
        self.recorder.chunks.append(bytes(self.data))

    def abandon(self) -> None:
        self.recorder.abandoned += 1


class Side:
    """A channel with its session and thread."""

    def __init__(self, channel: Channel) -> None:
        self.waker = Waker()
        self.session = Recorder(self.waker)
        self.channel = channel
        connection = Connection(channel, self.session, self.waker, WallClock())
        self.thread = threading.Thread(target=connection.run, args=(REACTOR,))

    def stop(self) -> None:
        self.waker.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.waker.close()


Pair = tuple[Side, Side]


def connect(listening: Transport, dialling: Transport, address: str) -> tuple[Channel, Channel]:
    listener = listening.listen(address)
    interrupt = Waker()
    accepted: list[Channel] = []

    def accept() -> None:
        pending = listener.accept(interrupt)
        assert pending is not None
        accepted.append(pending.handshake(timeout_s=5, interrupt=interrupt))

    thread = threading.Thread(target=accept)
    thread.start()
    dialled = dialling.dial(listener.address, timeout_s=5, interrupt=interrupt)
    thread.join(5)
    listener.close()
    interrupt.close()
    return dialled, accepted[0]


@pytest.fixture(params=["tls", "sealed", "memory"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    if request.param != "memory":
        pki, sealed = make_pki(tmp_path), request.param == "sealed"
        channels = connect(
            TlsTcpTransport(server=pki.name("decode").server(), sealed=sealed),
            TlsTcpTransport(client=pki.name("prefill", role="prefill").client(), sealed=sealed),
            "127.0.0.1:0",
        )
    else:
        network = MemoryNetwork()
        hosts = [network.transport(PeerIdentity("test", "near", role, role)) for role in ("decode", "prefill")]
        channels = connect(hosts[0], hosts[1], "a")
    sides = (Side(channels[0]), Side(channels[1]))
    for side in sides:
        side.thread.start()
    yield sides
    for side in sides:
        side.stop()


def chunk_frame(data: bytes) -> OutgoingFrame:
    return OutgoingFrame(
        pack_header(FrameHeader(FrameType.CHUNK, raw_bytes=len(data), wire_bytes=len(data))), memoryview(data)
    )


def test_peers_know_each_other(pair: Pair) -> None:
    assert [side.channel.peer.name for side in pair] == ["decode", "prefill"]


def test_bulk_passes_both_ways_at_once_whole_and_in_order(pair: Pair) -> None:
    sent = {side: [os.urandom(size) for size in (1, 64, 3 * MIB, 100_000, 2 * MIB)] for side in range(2)}
    for number, side in enumerate(pair):
        for data in sent[number]:
            side.session.queue(chunk_frame(data))
            side.session.queue(OutgoingFrame(encode_frame(FrameHeader(FrameType.PING, offset=len(data)))))
    eventually(lambda: all(len(side.session.chunks) == 5 and len(side.session.controls) == 5 for side in pair))
    for number, side in enumerate(pair):
        assert side.session.chunks == sent[1 - number]
        assert [header.offset for header, _ in side.session.controls] == [len(data) for data in sent[1 - number]]
        assert side.session.sent == 10
        assert len(side.session.threads) == 1, "calls came from one thread"


def test_detached_frame_no_longer_reads_its_memory(pair: Pair) -> None:
    """The rest of a frame on its way survives its memory being reused."""
    data = bytearray(os.urandom(32 * MIB))
    original = bytes(data)
    frame = OutgoingFrame(
        pack_header(FrameHeader(FrameType.CHUNK, raw_bytes=len(data), wire_bytes=len(data))), memoryview(data)
    )
    pair[0].session.queue(frame)
    frame.detach()
    data[:] = bytes(len(data))
    eventually(lambda: len(pair[1].session.chunks) == 1)
    assert pair[1].session.chunks[0] == original


def test_end_between_frames_and_inside_a_frame_are_told_apart(pair: Pair) -> None:
    pair[0].session.finishing = True
    pair[0].waker.wake()
    eventually(lambda: all(side.session.errors for side in pair))
    assert isinstance(pair[1].session.errors[0], TransportError)
    assert pair[1].session.errors[0].reason == "connection_lost"
    assert pair[0].session.errors == [None]


def test_truncated_frame_abandons_its_chunk(pair: Pair) -> None:
    pair[0].session.queue(OutgoingFrame(chunk_frame(bytes(MIB))._head.tobytes() + bytes(1000)))
    eventually(lambda: pair[0].session.sent == 1)
    pair[0].session.finishing = True
    pair[0].waker.wake()
    eventually(lambda: bool(pair[1].session.errors))
    error = pair[1].session.errors[0]
    assert isinstance(error, TransportError)
    assert error.reason == "truncated"
    assert pair[1].session.abandoned == 1


def test_violation_gets_a_last_word_before_the_end(pair: Pair) -> None:
    pair[0].session.queue(OutgoingFrame(os.urandom(64)))
    eventually(lambda: bool(pair[0].session.controls))
    assert pair[0].session.controls[0][0].type is FrameType.REFUSE
    eventually(lambda: bool(pair[1].session.errors))
    assert len(pair[1].session.violations) == 1


def test_crash_in_the_session_ends_the_connection_only(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    def crash(header: FrameHeader, payload: memoryview, now_s: float) -> None:
        raise ZeroDivisionError

    pair[1].session.control = crash
    pair[0].session.queue(OutgoingFrame(encode_frame(FrameHeader(FrameType.PING))))
    eventually(lambda: all(side.session.errors for side in pair))
    assert isinstance(pair[1].session.errors[0], ZeroDivisionError)
    assert "connection_crashed" in caplog.text
    caplog.clear()  # elsewhere no test may see one


def test_chunk_without_a_place_is_not_read_until_there_is_one(pair: Pair) -> None:
    sender, receiver = pair
    receiver.session.room = False
    data = os.urandom(5 * MIB)  # more than the sockets hold
    sender.session.queue(chunk_frame(data))
    sender.session.queue(OutgoingFrame(encode_frame(FrameHeader(FrameType.PING))))
    eventually(lambda: receiver.session.asked > 0)
    receiver.session.queue(OutgoingFrame(encode_frame(FrameHeader(FrameType.PING))))  # the other direction goes on
    eventually(lambda: len(sender.session.controls) == 1)
    assert sender.session.sent == 0
    assert not receiver.session.chunks
    receiver.session.room = True
    receiver.waker.wake()
    eventually(lambda: len(receiver.session.controls) == 1)
    assert receiver.session.chunks == [data]


def test_addresses_round_trip() -> None:
    for address in ("127.0.0.1:80", "host.example:1", "[::1]:9"):
        assert join_address(*split_address(address)) == address


@pytest.fixture
def interrupt() -> Iterator[Waker]:
    waker = Waker()
    yield waker
    waker.close()


def in_background(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_silent_peer_runs_into_the_handshake_deadline(tmp_path: Path, interrupt: Waker) -> None:
    transport = TlsTcpTransport(client=make_pki(tmp_path).name("prefill").client())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = join_address(*silent.getsockname()[:2])
        started_s = time.monotonic()
        with pytest.raises(TransportTimeoutError):
            transport.dial(address, timeout_s=0.2, interrupt=interrupt)
        assert time.monotonic() - started_s < 2


def test_dripping_peer_runs_into_the_handshake_deadline(tmp_path: Path, interrupt: Waker) -> None:
    """One byte now and then does not prolong it."""
    listener = TlsTcpTransport(server=make_pki(tmp_path).name("decode").server()).listen("127.0.0.1:0")
    errors: list[Exception] = []

    def accept() -> None:
        pending = listener.accept(interrupt)
        assert pending is not None
        try:
            pending.handshake(timeout_s=0.3, interrupt=interrupt)
        except TransportError as error:
            errors.append(error)

    thread = in_background(accept)
    with socket.create_connection(split_address(listener.address)) as sock:
        for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200):
            if errors:
                break
            try:
                sock.sendall(bytes([byte]))
            except ConnectionError:
                break
            thread.join(0.05)
    thread.join(5)
    listener.close()
    assert isinstance(errors[0], TransportTimeoutError)


def test_dial_is_interrupted(tmp_path: Path, interrupt: Waker) -> None:
    transport = TlsTcpTransport(client=make_pki(tmp_path).name("prefill").client())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        errors: list[Exception] = []

        def dial() -> None:
            try:
                transport.dial(join_address(*silent.getsockname()[:2]), timeout_s=60, interrupt=interrupt)
            except TransportError as error:
                errors.append(error)

        thread = in_background(dial)
        interrupt.stop()
        thread.join(5)
        assert not thread.is_alive()
    assert errors[0].reason in ("closed_here", "connection_lost")


def test_plain_text_is_no_handshake(tmp_path: Path, interrupt: Waker) -> None:
    listener = TlsTcpTransport(server=make_pki(tmp_path).name("decode").server()).listen("127.0.0.1:0")
    with socket.create_connection(split_address(listener.address)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        pending = listener.accept(interrupt)
        assert pending is not None
        with pytest.raises(IdentityError, match="tls: "):
            pending.handshake(timeout_s=5, interrupt=interrupt)
    listener.close()


def test_one_sided_transports_say_so(interrupt: Waker) -> None:
    with pytest.raises(TransportError, match="only dials"):
        TlsTcpTransport().listen("127.0.0.1:0")
    with pytest.raises(TransportError, match="only listens"):
        TlsTcpTransport().dial("127.0.0.1:1", timeout_s=1, interrupt=interrupt)


def test_taken_address_is_a_typed_error(tmp_path: Path) -> None:
    transport = TlsTcpTransport(server=make_pki(tmp_path).name("decode").server())
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(TransportError) as caught:
        transport.listen(join_address(*taken.getsockname()[:2]))
    assert caught.value.reason == "bind_failed"
