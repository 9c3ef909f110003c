"""How many connections a link needs, from its congestion control, loss and what more of them brought. Pure.

With BBR a few fill any line, and more only fill its queue. A loss-based algorithm (CUBIC, Reno) on a lossy path moves
about `1.22 × segment / (RTT × √loss)` per connection (Mathis et al., 1997), whatever the line could carry: there the
number is raised step by step while that pays. Loss of a full line is told apart by what comes with it: the round trip
grows with the queue, and loss grows with the number of connections.
"""

from __future__ import annotations

from dataclasses import dataclass

FEW = 4
# 1 Gbit/s at 30 ms and 0.1 % loss takes 64 on average, and some always have just lost their window. More than this only
# makes the windows of short transfers smaller.
MANY = 96
STEP = 5
# A step must bring this much more goodput, unless loss and round trip stay what they were.
WORTHWHILE = 1.1
LOSS_THAT_LIMITS = 2e-5
LOSS_GREW = 2.0
ROUND_TRIP_GREW = 1.5
ROUND_TRIP_SLACK_S = 0.002
# Slow start, and dialling after a step, tell nothing about the rate to come.
SETTLE_S = 0.3
SETTLE_ROUND_TRIPS = 10
MIN_WINDOW_S = 0.25
WINDOW_ROUND_TRIPS = 8
# Transfers may all be too short to measure a rate: after so much of them, loss and round trip are evidence enough.
SHORT_TRANSFERS_S = 0.5
HOLD_FIRST_S = 2.0
HOLD_MAX_S = 60.0
_NOT_LOSS_BASED = frozenset({"bbr", "bbr2", "bbr3"})


class ConnectionTuner:
    """`wanted` is the number of connections to keep. `fixed`: always that many."""

    def __init__(self, fixed: int | None = None) -> None:
        self.wanted = fixed or FEW
        self._fixed = fixed is not None
        self._settled_s: float | None = None
        self._window_start_s: float | None = None
        self._observed_s: float | None = None
        self._window = _Window()
        self._short = _Window()
        self._base_rtt_s = float("inf")
        self._before_step: tuple[int, float, float] | None = None
        self._hold_s = HOLD_FIRST_S
        self._hold_until_s = float("-inf")

    def observe(
        self,
        now_s: float,
        *,
        congestion: str,
        rtt_s: float,
        acked_bytes: int,
        segments_sent: int,
        segments_resent: int,
        busy: bool,
    ) -> None:
        """What happened since the last call. `busy`: chunks were waiting for the link all the time."""
        self._base_rtt_s = min(self._base_rtt_s, rtt_s)
        since_s, self._observed_s = self._observed_s, now_s
        if self._fixed or congestion in _NOT_LOSS_BASED or not busy or now_s < self._hold_until_s:
            self._settled_s = self._window_start_s = self._observed_s = None
            return
        elapsed_s = 0.0 if since_s is None else now_s - since_s
        self._short.add(elapsed_s, acked_bytes, segments_sent, segments_resent)
        if self._settled_s is None:
            self._settled_s = now_s + max(SETTLE_S, SETTLE_ROUND_TRIPS * rtt_s)
        if self._window_start_s is None:
            if now_s >= self._settled_s:
                self._window_start_s, self._window, self._short = now_s, _Window(), _Window()
            elif self._short.seconds >= SHORT_TRANSFERS_S and not self._queueing(rtt_s):
                self._step(self._short.loss, None)
            return
        self._window.add(elapsed_s, acked_bytes, segments_sent, segments_resent)
        if self._window.seconds >= max(MIN_WINDOW_S, WINDOW_ROUND_TRIPS * rtt_s) and self._window.segments:
            self._window_start_s = None
            self._decide(now_s, rtt_s)

    def _decide(self, now_s: float, rtt_s: float) -> None:
        rate_bytes_per_s, loss = self._window.acked_bytes / self._window.seconds, self._window.loss
        if self._before_step is not None:
            number, rate_before, loss_before = self._before_step
            self._before_step = None
            worse = loss > LOSS_GREW * loss_before or self._queueing(rtt_s)
            if rate_bytes_per_s < WORTHWHILE * rate_before and worse:
                self.wanted, self._short = number, _Window()
                self._hold_until_s = now_s + self._hold_s
                self._hold_s = min(HOLD_MAX_S, 2 * self._hold_s)
                return
            self._hold_s = HOLD_FIRST_S
        self._step(loss, rate_bytes_per_s)

    def _step(self, loss: float, rate_bytes_per_s: float | None) -> None:
        self._short = _Window()
        if loss < LOSS_THAT_LIMITS or self.wanted >= MANY:
            return
        self._before_step = None if rate_bytes_per_s is None else (self.wanted, rate_bytes_per_s, loss)
        self.wanted = min(MANY, self.wanted * STEP)
        self._settled_s = None

    def _queueing(self, rtt_s: float) -> bool:
        return rtt_s > ROUND_TRIP_GREW * self._base_rtt_s + ROUND_TRIP_SLACK_S


@dataclass(slots=True)
class _Window:
    """Sums of what was observed while chunks were waiting."""

    seconds: float = 0.0
    acked_bytes: int = 0
    segments: int = 0
    resent: int = 0

    @property
    def loss(self) -> float:
        return self.resent / self.segments if self.segments else 0.0

    def add(self, seconds: float, acked_bytes: int, segments: int, resent: int) -> None:
        self.seconds += seconds
        self.acked_bytes += acked_bytes
        self.segments += segments
        self.resent += resent
