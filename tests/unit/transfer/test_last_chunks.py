"""The last chunks go to connections that are not much slower than the others, and are never left to nobody."""

from __future__ import annotations

from farfill.transfer.last_chunks import LastChunks

RTT_S = 0.03
NOW_S = 100.0


def lanes(*windows: float) -> LastChunks:
    last = LastChunks()
    for connection, window in enumerate(windows):
        last.sampled(connection, window)
    last.taken(NOW_S)
    return last


def leaving(last: LastChunks, count: int, *, waiting: int = 1, now_s: float = NOW_S) -> list[int]:
    return [connection for connection in range(count) if last.leaves(connection, waiting, RTT_S, now_s)]


def test_slow_ones_leave_the_last_chunks_to_the_others() -> None:
    assert leaving(lanes(2e6, 0.2e6, 1.8e6, 0.9e6, 3e6), 5) == [1]


def test_nobody_leaves_anything_while_there_is_enough_for_all() -> None:
    assert leaving(lanes(2e6, 0.2e6, 2e6), 3, waiting=4) == []


def test_there_is_always_somebody_to_take_them() -> None:
    for windows in ((1.0,), (1.0, 9.0), (1.0, 9.0, 9.0), (5.0, 5.0), (0.0, 0.0), (0.0, 3.0)):
        assert len(leaving(lanes(*windows), len(windows))) < len(windows)


def test_they_are_not_left_when_nobody_took_one_for_a_round_trip() -> None:
    last = lanes(2e6, 0.2e6, 2e6)
    assert leaving(last, 3, now_s=NOW_S + RTT_S * 0.9) == [1]
    assert leaving(last, 3, now_s=NOW_S + RTT_S * 1.1) == []


def test_connections_nothing_is_known_of_take_what_they_can() -> None:
    last = lanes(2e6, 0.0, 2e6)
    assert leaving(last, 4) == []


def test_those_that_are_gone_set_no_measure() -> None:
    last = lanes(2e6, 0.2e6, 2e6)
    last.gone(0)
    last.gone(2)
    assert leaving(last, 3) == []
    last.gone(1)
    assert leaving(last, 3) == []
