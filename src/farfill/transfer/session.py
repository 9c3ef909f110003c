"""What both ends of a data connection do alike: say who they are, stay alive, answer, and part with a reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from farfill.core.errors import FarfillError, ProtocolError
from farfill.transfer.limits import Liveness
from farfill.transport.errors import TransportTimeoutError
from farfill.transport.protocol import UNSENT_BYTES, OutgoingFrame, PathSample
from farfill.transport.waker import Waker
from farfill.wire.frames import FrameHeader, FrameType, HelloPayload, Payload, ReasonPayload, encode_frame

_MICROSECONDS = 1_000_000
# A peer that makes us answer without reading the answers is no peer.
MAX_QUEUED_CONTROL = 65_536
SAMPLE_S = 0.05
# Nothing confirmed for so long although something is on its way: the connection is given up.
STALLED_MIN_S = 1.2
STALLED_ROUND_TRIPS = 10


class PeerSession:
    """Handshake, PING and PONG, and the queue of control frames. `send` and `finish` may be called on any thread."""

    def __init__(self, me: HelloPayload, peer_name: str, waker: Waker, liveness: Liveness, now_s: float) -> None:
        self.peer_name = peer_name
        self.peer_generation = ""
        self.welcomed = False
        self.finishing = False
        self.me = me
        self._waker = waker
        self._liveness = liveness
        self._control: deque[bytes] = deque()
        self._flooded = False
        self._opened_s = now_s
        self._heard_s = now_s
        self._sent_s = now_s
        self._sampled_s = float("-inf")

    def send(self, header: FrameHeader, payload: Payload | None = None) -> None:
        """Queue a control frame before anything else this connection sends.

        One that finds too many before it is lost, and the connection ends at its next step.
        """
        if len(self._control) < MAX_QUEUED_CONTROL:
            self._control.append(encode_frame(header, payload))
        else:
            self._flooded = True
        self._waker.wake()

    def wake(self) -> None:
        """There may be something to send."""
        self._waker.wake()

    def finish(self) -> None:
        """End the connection once the control frames are sent."""
        self.finishing = True
        self._waker.wake()

    def refuse(self, reason: str, detail: str) -> None:
        """Tell the peer why, then end the connection."""
        self.send(FrameHeader(FrameType.REFUSE), ReasonPayload(reason[:256], detail[:2048]))
        self.finish()

    def violated(self, error: FarfillError) -> None:
        """See `transport.protocol.Session`."""
        self.refuse(error.reason, str(error))

    def heard(self, now_s: float) -> None:
        """Bytes came from the peer."""
        self._heard_s = now_s

    def next_control(self) -> OutgoingFrame | None:
        """The next queued control frame."""
        return OutgoingFrame(self._control.popleft()) if self._control else None

    def frame_sent(self, frame: OutgoingFrame, now_s: float) -> None:
        """See `transport.protocol.Session`."""
        self._sent_s = now_s

    def answered(self, header: FrameHeader, now_s: float) -> float | None:
        """Handle PING and PONG: the round trip in seconds for a PONG. ProtocolError for any other frame."""
        if header.type is FrameType.PING:
            self.send(FrameHeader(FrameType.PONG, offset=header.offset))
            return None
        if header.type is FrameType.PONG:
            return max(0.0, now_s - header.offset / _MICROSECONDS)
        raise ProtocolError(f"{header.type.name} does not belong here", reason="bad_frame")

    @property
    def busy(self) -> bool:
        """Whether this end has bytes on their way."""
        return False

    @property
    def unsent_bytes(self) -> int:
        """See `transport.protocol.Session`."""
        return UNSENT_BYTES

    def sampled(self, path: PathSample) -> None:
        """What the kernel measured; called now and then."""

    def tick(self, now_s: float, path: Callable[[], PathSample | None]) -> float:
        """Deadlines of the connection itself. Raises TransportTimeoutError when the peer is silent, ProtocolError
        (flooded) when it asks and does not read the answers.
        """
        if self._flooded:
            self._flooded = False
            self._control.clear()  # room for the reason
            raise ProtocolError("the peer does not read our answers", reason="flooded")
        if not self.welcomed:
            left_s = self._opened_s + self._liveness.handshake_s - now_s
            if left_s <= 0 and not self.finishing:
                raise TransportTimeoutError("no HELLO in time", reason="handshake_timeout")
            return left_s
        self._look_at_path(now_s, path)
        if now_s - self._heard_s >= self._liveness.dead_s:
            raise TransportTimeoutError(f"nothing heard for {now_s - self._heard_s:.1f} s")
        if now_s - self._sent_s >= self._liveness.ping_s:
            self._sent_s = now_s
            self.send(FrameHeader(FrameType.PING, offset=max(0, int(now_s * _MICROSECONDS))))
        return min(self._liveness.ping_s - (now_s - self._sent_s), SAMPLE_S if self.busy else self._liveness.ping_s)

    def _look_at_path(self, now_s: float, path: Callable[[], PathSample | None]) -> None:
        """Raises TransportTimeoutError when the other host confirms nothing, long before TCP gives up."""
        if now_s - self._sampled_s < SAMPLE_S:
            return
        self._sampled_s = now_s
        sample = path()
        if sample is not None:
            self.sampled(sample)
            if sample.silent_s > max(STALLED_MIN_S, STALLED_ROUND_TRIPS * sample.rtt_s):
                raise TransportTimeoutError(f"the peer's host confirmed nothing for {sample.silent_s:.1f} s")
