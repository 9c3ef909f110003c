"""Lines that strangers cause are limited by reason, and what was left out is told."""

from __future__ import annotations

import structlog

from farfill.clock import VirtualClock
from farfill.telemetry.log_limit import MOST, WINDOW_S, LimitedWarnings, LogLimit


def test_first_lines_of_each_reason_are_admitted_and_the_rest_counted() -> None:
    limit = LogLimit(VirtualClock().now_s, most=2)
    assert [limit.admit("bad_frame") for _ in range(5)] == [True, True, False, False, False]
    assert limit.admit("identity_refused"), "another reason has its own count"
    assert limit.left_out() == [], "the window is not over"
    assert limit.left_out(at_once=True) == [("bad_frame", 3)]


def test_new_window_admits_again_and_the_former_is_told_once() -> None:
    clock = VirtualClock()
    limit = LogLimit(clock.now_s, most=1, window_s=10)
    assert [limit.admit("bad_frame") for _ in range(3)] == [True, False, False]
    clock.advance(9.9)
    assert not limit.admit("bad_frame")
    clock.advance(0.1)
    assert limit.left_out() == [("bad_frame", 3)]
    assert limit.left_out() == []
    assert [limit.admit("bad_frame") for _ in range(2)] == [True, False]


def test_what_a_former_window_left_out_is_not_forgotten_when_nobody_asked() -> None:
    clock = VirtualClock()
    limit = LogLimit(clock.now_s, most=1, window_s=10)
    assert [limit.admit("bad_frame") for _ in range(3)] == [True, False, False]
    clock.advance(10)
    assert limit.admit("bad_frame")
    assert limit.left_out(at_once=True) == [("bad_frame", 2)]


def test_flood_of_refusals_is_ten_lines_and_one_that_counts_the_rest() -> None:
    clock = VirtualClock()
    with structlog.testing.capture_logs() as logged:
        warnings = LimitedWarnings(structlog.get_logger(), "connection_refused", clock.now_s)
        for number in range(500):
            warnings.warning("identity_refused", remote=str(number))
        assert len(logged) == MOST == 10
        clock.advance(WINDOW_S)
        warnings.tell_left_out()
        warnings.tell_left_out(at_once=True)
        warnings.warning("identity_refused", remote="later")
    assert [entry["remote"] for entry in logged[:MOST]] == [str(number) for number in range(MOST)]
    (told, later) = logged[MOST:]
    assert told["event"] == "connection_refused_left_out"
    assert (told["reason"], told["count"]) == ("identity_refused", 490)
    assert later["remote"] == "later"
