"""One connection of the sender: when it is given up, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest

from farfill.clock import VirtualClock
from farfill.transfer.limits import liveness_of
from farfill.transfer.sender_session import SenderSession
from farfill.transfer.session import SAMPLE_S, STALLED_MIN_S
from farfill.transport.errors import TransportTimeoutError
from farfill.transport.protocol import PathSample
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker
from farfill.wire.frames import EarlyGrant, FrameHeader, FrameType, HelloPayload, encode_frame
from support.transfer_harness import FINGERPRINT, config

PEER = PeerIdentity("test", "near", "decode", "decode-near")


class FakePool:
    def __init__(self) -> None:
        self.peer_name = PEER.name
        self.me = HelloPayload(1, FINGERPRINT, "prefill-far", "g")
        self.clock = VirtualClock()
        self.config = config()
        self.liveness = liveness_of(self.config)
        self.samples: list[PathSample] = []
        self.busy = False
        self.credits: list[tuple[int, EarlyGrant]] = []

    def connected(self, generation: str) -> None:
        pass

    def transfer(self, key: bytes) -> None:
        return None

    def sampled(self, connection: int, path: PathSample) -> None:
        self.samples.append(path)

    def credit(self, nbytes: int, grant: EarlyGrant) -> None:
        self.credits.append((nbytes, grant))


class FakeSlot:
    number = 0
    standing = failed = False

    def __init__(self) -> None:
        self.waker = Waker()


@pytest.fixture
def session() -> Any:
    slot = FakeSlot()
    session = SenderSession(FakePool(), slot, PEER)  # type: ignore[arg-type]
    hello = encode_frame(FrameHeader(FrameType.WELCOME), HelloPayload(1, FINGERPRINT, PEER.name, "g"))
    session.control(FrameHeader(FrameType.WELCOME), memoryview(hello)[64:], 0.0)
    yield session
    slot.waker.close()


def path(silent_s: float, rtt_s: float = 0.03) -> PathSample:
    return PathSample(rtt_s, 1, 0, 1e6, silent_s, "bbr")


def test_path_is_sampled_now_and_then(session: SenderSession) -> None:
    pool: Any = session._pool
    for step in range(10):
        session.tick(step * SAMPLE_S / 4, lambda: path(0.0))
    assert len(pool.samples) == 3


def test_host_that_confirms_nothing_is_given_up_before_tcp_does(session: SenderSession) -> None:
    session.tick(0.0, lambda: path(STALLED_MIN_S - 0.1))
    with pytest.raises(TransportTimeoutError, match="confirmed nothing"):
        session.tick(1.0, lambda: path(STALLED_MIN_S + 0.1))


def test_long_way_gets_more_patience(session: SenderSession) -> None:
    session.tick(0.0, lambda: path(STALLED_MIN_S + 0.1, rtt_s=0.5))
    with pytest.raises(TransportTimeoutError):
        session.tick(1.0, lambda: path(5.1, rtt_s=0.5))


def test_transport_that_knows_no_path_is_judged_by_silence_alone(session: SenderSession) -> None:
    session.heard(10.0)
    session.tick(10.0, lambda: None)
    with pytest.raises(TransportTimeoutError, match="nothing heard"):
        session.tick(10.0 + session._pool.liveness.dead_s, lambda: None)


def test_credit_is_passed_on(session: SenderSession) -> None:
    pool: Any = session._pool
    session.control(FrameHeader(FrameType.CREDIT, offset=12345), memoryview(b""), 0.0)
    grant = EarlyGrant(700, 70)
    frame = encode_frame(FrameHeader(FrameType.CREDIT), grant)
    session.control(FrameHeader(FrameType.CREDIT, offset=6), memoryview(frame)[64:], 0.0)
    assert pool.credits == [(12345, EarlyGrant()), (6, grant)]
