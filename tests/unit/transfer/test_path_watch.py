"""The sum of connections: counters add up over their lives, gauges are of now."""

from __future__ import annotations

from farfill.transfer.path_watch import PERIOD_S, STUCK_S, PathWatch
from farfill.transport.protocol import PathSample


def sample(sent: int, resent: int, *, rtt_s: float = 0.03) -> PathSample:
    return PathSample(rtt_s, sent, resent, 1e6, 0.0, "cubic")


def test_counters_add_up_over_connections_and_their_successors() -> None:
    watch = PathWatch()
    assert watch.take(0.0) is None
    watch.sampled(0, sample(100, 1), 0.0)
    watch.sampled(1, sample(50, 0, rtt_s=0.05), 0.0)
    watch.acked(1000)
    change = watch.take(0.0)
    assert change is not None
    assert (change.segments_sent, change.segments_resent, change.acked_bytes) == (150, 1, 1000)
    assert (change.rtt_s, change.delivery_bytes_per_s) == (0.04, 2e6)
    watch.sampled(0, sample(120, 3), 0.0)
    watch.gone(0)
    watch.sampled(0, sample(10, 1), 0.0)
    assert watch.take(PERIOD_S / 2) is None, "too early"
    change = watch.take(PERIOD_S)
    assert change is not None
    assert (change.segments_sent, change.segments_resent, change.acked_bytes) == (30, 3, 0)


def test_link_without_connections_says_nothing() -> None:
    watch = PathWatch()
    watch.sampled(0, sample(1, 0), 0.0)
    watch.gone(0)
    assert watch.take(1.0) is None


def test_connection_moves_while_it_gets_its_share_through() -> None:
    watch = PathWatch()
    rate = 1e6
    for step in range(20):
        for connection, speed in enumerate((rate, rate / 4, rate / 100, 0.0)):
            watch.sampled(connection, progress(int(step * speed / 10)), step / 10)
    now_s = 1.9
    assert [watch.moves(connection, rate, now_s) for connection in range(5)] == [True, True, False, False, None]
    assert watch.moves(0, rate, now_s + 2 * STUCK_S) is None, "nothing was heard of it since"
    for step in range(20, 35):
        watch.sampled(0, progress(int(1.9e6)), step / 10)
    assert watch.moves(0, rate, 3.4) is False, "it was fast once"


def progress(confirmed_bytes: int) -> PathSample:
    return PathSample(0.03, 1, 0, 1e6, 0.0, "cubic", confirmed_bytes)
