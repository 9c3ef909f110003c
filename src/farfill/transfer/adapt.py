"""Picks the codecs of a link while it works, and never stays with one that is slower than sending plain. Pure.

A link is plain or coded. It begins plain until windows of steady sending told the plain rate, P. Samples of each
stream of chunks (kind of tensor and dtype) say what the codecs would make of P; once one pays, the link is coded, and
each stream has the codec that is best for it, or none. In windows of coded sending the receiver confirms C raw bytes
per second. When C does not beat P, or P is old (an encoder at its limit hides how fast the link is), chunks travel
plain for a few windows: the two rates, measured one after the other, decide. One such comparison may have measured
what else the machine did: coded sending has lost when it lost two in a row. What lost is not tried again for a while,
longer each time. Slower means in sum and in the window in the middle: a single stall, as of BBR looking for the least
round trip, takes much of a sum, and what a codec costs slows every window.

Windows begin with an acknowledgement, after everything sent the other way has arrived, so that each measures one
thing, and neither an idle link nor a first round trip.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from farfill.core.layout import TensorKind
from farfill.kv.codec import Codec, CodecSample, choose_codec
from farfill.topology.estimate import MIN_WINDOW_BYTES, MIN_WINDOW_S

SAMPLE_EVERY_S = 30.0
# Coded sending must confirm this much more than plain sending did.
MARGIN = 1.02
# Verdicts are on means of so many seconds of windows: single ones are noisy (queues, other work on the cores).
VERDICT_S = 0.4
# Enough of the plain rate for a first guess.
GUESS_S = 0.1
# Seconds of coded sending after which the plain rate is measured again; more each time it was confirmed.
FIRST_PROBE_S, PROBE_GROWTH, LAST_PROBE_S = 2.0, 4.0, 128.0
# Comparisons lost in a row before coded sending pauses.
LOSSES = 2
FIRST_PENALTY_S, PENALTY_GROWTH, LAST_PENALTY_S = 5.0, 4.0, 600.0
# With this much more encoding speed than is used, the link is what bounds coded sending. With less, probes come early.
ENCODER_SLACK = 2.0
EARLY = 0.1


@dataclass(frozen=True, slots=True)
class Stream:
    """Chunks that compress alike."""

    kind: TensorKind
    dtype: str


class CodecChooser:
    """Not locked: the owner serialises calls. `lanes` is how many cores may encode at once."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._samples: dict[Stream, Mapping[Codec, CodecSample]] = {}
        self._sampled_s: dict[Stream, float] = {}
        self._used: dict[Stream, Codec] = {}
        self._coded = False
        self._probing = False
        self._plain_windows = _Windows()
        self._coded_windows = _Windows()
        self._coded_s = 0.0
        self._probe_every_s = FIRST_PROBE_S
        self._retry_s = float("-inf")
        self._penalty_s = FIRST_PENALTY_S
        self._losses = 0
        self._outstanding = 0
        self._skip = 0
        self._window_start_s: float | None = None
        self._window_bytes = 0

    def wants_sample(self, stream: Stream, now_s: float) -> bool:
        """Whether the caller shall measure the codecs on a chunk of `stream`; asked once per period."""
        if now_s - self._sampled_s.get(stream, float("-inf")) < SAMPLE_EVERY_S:
            return False
        self._sampled_s[stream] = now_s
        return True

    def sampled(self, stream: Stream, samples: Mapping[Codec, CodecSample]) -> None:
        """What the codecs did to a chunk of `stream`."""
        self._samples[stream] = samples

    def choose(self, stream: Stream, now_s: float) -> Codec:
        """The codec of the next chunk of `stream`."""
        plain = self._plain_windows.mean(GUESS_S)
        samples = self._samples.get(stream)
        if plain is None or samples is None or self._probing or now_s < self._retry_s:
            return Codec.NONE
        codec = choose_codec(samples, plain, self._lanes, current=self._used.get(stream, Codec.NONE))
        self._used[stream] = codec
        if codec is not Codec.NONE and not self._coded:
            self._switch(coded=True)
        return codec

    @property
    def link_bound(self) -> bool:
        """Whether nothing but the link holds chunks back, as far as is known."""
        if not self._coded:
            return True
        used = [self._samples[stream][codec] for stream, codec in self._used.items() if codec is not Codec.NONE]
        expected = (self._plain_windows.mean(GUESS_S) or 0.0) * max((sample.ratio for sample in used), default=0.0)
        needed = self._coded_windows.mean(VERDICT_S) or expected
        return all(sample.encode_bytes_per_s * self._lanes >= ENCODER_SLACK * needed for sample in used)

    def sent(self, wire_bytes: int) -> None:
        """A chunk left."""
        self._outstanding += wire_bytes

    def settled(self, wire_bytes: int, raw_bytes: int, now_s: float) -> None:
        """`wire_bytes` of what was sent are not outstanding any more; the receiver holds `raw_bytes` of them."""
        self._outstanding -= wire_bytes
        if self._skip > 0:
            self._skip -= wire_bytes
        elif self._window_start_s is None:
            self._window_start_s, self._window_bytes = now_s, 0
        else:
            self._window_bytes += raw_bytes
            elapsed = now_s - self._window_start_s
            if elapsed >= MIN_WINDOW_S and self._window_bytes >= MIN_WINDOW_BYTES:
                window_bytes, self._window_bytes, self._window_start_s = self._window_bytes, 0, now_s
                self._measured(window_bytes, elapsed, now_s)
        if self._outstanding <= 0:
            self._outstanding, self._skip, self._window_start_s = 0, 0, None

    def interrupted(self) -> None:
        """A connection broke: the window under way measured the break."""
        self._window_start_s = None

    def _measured(self, window_bytes: int, elapsed: float, now_s: float) -> None:
        """A window of steady sending ended."""
        if self._coded:
            self._coded_windows.add(window_bytes, elapsed)
            self._coded_s += elapsed
            lost = self._coded_windows.seconds >= VERDICT_S and self._coded_windows.beaten_by(self._plain_windows)
            if lost or self._coded_s >= self._probe_every_s * (1.0 if self.link_bound else EARLY):
                self._probing, self._plain_windows = True, _Windows()
                self._switch(coded=False)
            return
        self._plain_windows.add(window_bytes, elapsed)
        if self._probing and self._plain_windows.seconds >= VERDICT_S:
            self._compare(now_s)

    def _compare(self, now_s: float) -> None:
        """Plain sending was measured again, right after coded sending."""
        lost = self._coded_windows.beaten_by(self._plain_windows)
        self._probing, self._coded_windows, self._coded_s = False, _Windows(), 0.0
        if not lost:
            self._probe_every_s = min(self._probe_every_s * PROBE_GROWTH, LAST_PROBE_S)
            self._penalty_s, self._losses = FIRST_PENALTY_S, 0
            return
        self._losses += 1
        self._probe_every_s = FIRST_PROBE_S
        if self._losses >= LOSSES:
            # After the pause one comparison is enough: it would be the third in a row.
            self._retry_s = now_s + self._penalty_s
            self._penalty_s = min(self._penalty_s * PENALTY_GROWTH, LAST_PENALTY_S)

    def _switch(self, *, coded: bool) -> None:
        """From now on chunks travel the other way; what is under way belongs to neither."""
        self._coded = coded
        self._skip = self._outstanding
        self._window_start_s = None


class _Windows:
    """The last windows, together about `VERDICT_S` long."""

    def __init__(self) -> None:
        self._windows: deque[tuple[int, float]] = deque()
        self._bytes = 0
        self.seconds = 0.0

    def add(self, window_bytes: int, seconds: float) -> None:
        """One window more."""
        self._windows.append((window_bytes, seconds))
        self._bytes, self.seconds = self._bytes + window_bytes, self.seconds + seconds
        while self.seconds - self._windows[0][1] >= VERDICT_S:
            old_bytes, old_s = self._windows.popleft()
            self._bytes, self.seconds = self._bytes - old_bytes, self.seconds - old_s

    def mean(self, least_s: float) -> float | None:
        """Bytes per second; None while they are shorter than `least_s` together."""
        return self._bytes / self.seconds if self.seconds >= least_s else None

    def beaten_by(self, plain: _Windows) -> bool:
        """Whether these, of coded sending, do not beat `plain`; False where either side says too little."""
        both = self.mean(GUESS_S), plain.mean(GUESS_S)
        if both[0] is None or both[1] is None:
            return False
        return both[0] < MARGIN * both[1] and self._middle() < MARGIN * plain._middle()

    def _middle(self) -> float:
        return median(window_bytes / seconds for window_bytes, seconds in self._windows)
