"""A peer that makes us answer and does not read ends its connection, whatever it asks with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farfill.core.errors import ProtocolError
from farfill.transfer.limits import Liveness
from farfill.transfer.session import MAX_QUEUED_CONTROL, PeerSession
from farfill.transport.waker import Waker
from farfill.wire.frames import HEADER_BYTES, FrameHeader, FrameType, HelloPayload, unpack_header

ANSWERS = (FrameType.PONG, FrameType.ACK, FrameType.NACK, FrameType.FAIL, FrameType.COMPLETE, FrameType.ACCEPT)


@pytest.fixture
def session() -> Iterator[PeerSession]:
    waker = Waker()
    liveness = Liveness(handshake_s=1, ping_s=1, dead_s=1)
    made = PeerSession(HelloPayload(1, "me", "generation", "fingerprint"), "peer", waker, liveness, 0.0)
    made.welcomed = True
    yield made
    waker.close()


@pytest.mark.parametrize("answer", ANSWERS)
def test_queue_of_answers_is_bounded(session: PeerSession, answer: FrameType) -> None:
    for _ in range(MAX_QUEUED_CONTROL):
        session.send(FrameHeader(answer))
    session.tick(0.0, lambda: None)
    for _ in range(100):
        session.send(FrameHeader(answer))
    with pytest.raises(ProtocolError, match="does not read") as refused:
        session.tick(0.0, lambda: None)
    assert refused.value.reason == "flooded"
    session.violated(refused.value)
    frame = session.next_control()
    assert frame is not None
    assert session.next_control() is None
    sent = bytearray()

    def take(part: memoryview) -> int:
        sent.extend(part)
        return len(part)

    frame.send(0, 1 << 20, take)
    assert unpack_header(sent[:HEADER_BYTES]).type is FrameType.REFUSE


def test_answers_that_are_read_have_no_bound(session: PeerSession) -> None:
    for _ in range(2 * MAX_QUEUED_CONTROL):
        session.send(FrameHeader(FrameType.ACK))
        assert session.next_control() is not None
    session.tick(0.0, lambda: None)
