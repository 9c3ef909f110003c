"""What a link between two sites is worth: rate and round trip, smoothed from what transfers saw. Pure."""

from __future__ import annotations

SMOOTHING = 0.3
MIN_WINDOW_S = 0.05
MIN_WINDOW_BYTES = 256 * 1024


class SmoothedValue:
    """An exponentially weighted mean; None until the first sample."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self._smoothing = smoothing
        self._value: float | None = None

    @property
    def value(self) -> float | None:
        """The mean so far."""
        return self._value

    def add(self, sample: float) -> None:
        """Fold one sample in."""
        old = self._value
        self._value = sample if old is None else old + self._smoothing * (sample - old)


class LinkEstimate:
    """Rate and RTT of one link.

    The rate is goodput while the link was busy: bytes acknowledged over windows during which something was
    always outstanding. Idle time never lowers it. A window in which an encoder may have been the bottleneck,
    or prefill, is a lower bound only: it can raise the estimate, never lower it.
    """

    def __init__(self) -> None:
        self._rate = SmoothedValue()
        self._rtt = SmoothedValue()
        self._window_start_s: float | None = None
        self._window_bytes = 0
        self._full_rate = True

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Goodput of the busy link in wire bytes per second; None before the first full window."""
        return self._rate.value

    @property
    def rtt_s(self) -> float | None:
        """Round trip of a small message; None before the first."""
        return self._rtt.value

    def busy(self, now_s: float, *, at_full_rate: bool = True) -> None:
        """Bytes became outstanding; `at_full_rate`: nothing but the link slowed them down."""
        if self._window_start_s is None:
            self._start_window(now_s)
        self._full_rate = self._full_rate and at_full_rate

    def starved(self) -> None:
        """The link could have carried more than there was to send."""
        self._full_rate = False

    def acknowledged(self, wire_bytes: int, now_s: float, *, still_busy: bool) -> None:
        """`wire_bytes` arrived at the other side; `still_busy` tells whether more is outstanding."""
        if self._window_start_s is None:
            return
        self._window_bytes += wire_bytes
        elapsed = now_s - self._window_start_s
        if elapsed >= MIN_WINDOW_S and self._window_bytes >= MIN_WINDOW_BYTES:
            sample = self._window_bytes / elapsed
            if self._full_rate or self._rate.value is None or sample > self._rate.value:
                self._rate.add(sample)
            self._start_window(now_s)
        if not still_busy:
            self._window_start_s = None

    def interrupted(self) -> None:
        """A connection broke: the window under way measured the break, not the link."""
        self._window_start_s = None

    def round_trip(self, seconds: float) -> None:
        """One PING was answered after `seconds`."""
        if seconds > 0:
            self._rtt.add(seconds)

    def transfer_s(self, nbytes: int) -> float | None:
        """Estimated seconds to move `nbytes` and hear that they arrived; None while the rate is unknown."""
        if self._rate.value is None:
            return None
        return nbytes / self._rate.value + (self._rtt.value or 0.0)

    def _start_window(self, now_s: float) -> None:
        self._window_start_s, self._window_bytes, self._full_rate = now_s, 0, True
