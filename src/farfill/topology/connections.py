"""How many connections a link needs, from its congestion control, loss and what more of them brought. Pure.

With BBR a few fill any line, and more only fill its queue. A loss-based algorithm (CUBIC, Reno) on a lossy path moves
about `1.22 × segment / (RTT × √loss)` per connection (Mathis et al., 1997), whatever the line could carry: there the
number is raised step by step while that pays.
"""

from __future__ import annotations

FEW = 4
MANY = 64
STEP = 4
# A step must bring this much more goodput, or the loss was the line being full.
WORTHWHILE = 1.3
LOSS_THAT_LIMITS = 2e-5
# Slow start, and dialling after a step, tell nothing about the rate to come.
SETTLE_S = 0.3
SETTLE_ROUND_TRIPS = 10
MIN_WINDOW_S = 0.25
WINDOW_ROUND_TRIPS = 8
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
        self._acked_bytes = 0
        self._segments = self._resent = 0
        self._before_step: tuple[int, float] | None = None
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
        if self._fixed or congestion in _NOT_LOSS_BASED or not busy or now_s < self._hold_until_s:
            self._settled_s = self._window_start_s = None
            return
        if self._settled_s is None:
            self._settled_s = now_s + max(SETTLE_S, SETTLE_ROUND_TRIPS * rtt_s)
        if self._window_start_s is None:
            if now_s >= self._settled_s:
                self._window_start_s = now_s
                self._acked_bytes = self._segments = self._resent = 0
            return
        self._acked_bytes += acked_bytes
        self._segments += segments_sent
        self._resent += segments_resent
        elapsed_s = now_s - self._window_start_s
        if elapsed_s >= max(MIN_WINDOW_S, WINDOW_ROUND_TRIPS * rtt_s) and self._segments:
            self._window_start_s = None
            self._decide(now_s, self._acked_bytes / elapsed_s, self._resent / self._segments)

    def _decide(self, now_s: float, rate_bytes_per_s: float, loss: float) -> None:
        if self._before_step is not None:
            number, rate_before = self._before_step
            self._before_step = None
            if rate_bytes_per_s < WORTHWHILE * rate_before:
                self.wanted = number
                self._hold_until_s = now_s + self._hold_s
                self._hold_s = min(HOLD_MAX_S, 2 * self._hold_s)
                return
            self._hold_s = HOLD_FIRST_S
        if loss >= LOSS_THAT_LIMITS and self.wanted < MANY:
            self._before_step = (self.wanted, rate_bytes_per_s)
            self.wanted = min(MANY, self.wanted * STEP)
            self._settled_s = None
