"""The sum of connections: counters add up over their lives, gauges are of now."""

from __future__ import annotations

from farfill.transfer.path_watch import PERIOD_S, PathWatch
from farfill.transport.protocol import PathSample


def sample(sent: int, resent: int, *, rtt_s: float = 0.03) -> PathSample:
    return PathSample(rtt_s, sent, resent, 1e6, 0.0, "cubic")


def test_counters_add_up_over_connections_and_their_successors() -> None:
    watch = PathWatch()
    assert watch.take(0.0) is None
    watch.sampled(0, sample(100, 1))
    watch.sampled(1, sample(50, 0, rtt_s=0.05))
    watch.acked(1000)
    change = watch.take(0.0)
    assert change is not None
    assert (change.segments_sent, change.segments_resent, change.acked_bytes) == (150, 1, 1000)
    assert (change.rtt_s, change.delivery_bytes_per_s) == (0.04, 2e6)
    watch.sampled(0, sample(120, 3))
    watch.gone(0)
    watch.sampled(0, sample(10, 1))
    assert watch.take(PERIOD_S / 2) is None, "too early"
    change = watch.take(PERIOD_S)
    assert change is not None
    assert (change.segments_sent, change.segments_resent, change.acked_bytes) == (30, 3, 0)


def test_link_without_connections_says_nothing() -> None:
    watch = PathWatch()
    watch.sampled(0, sample(1, 0))
    watch.gone(0)
    assert watch.take(1.0) is None
