"""Goodput from confirmations: what crossed when, however large the chunks are against the window."""

from __future__ import annotations

import pytest

from farfill.verify.link_confirmed import Confirmations


def confirmed(*chunks: tuple[int, int, float]) -> Confirmations:
    """(connection, bytes, when) in any number."""
    found = Confirmations()
    for chunk in chunks:
        found.heard(*chunk)
    return found


def steady(connections: int, chunk: int, every_s: float, until_s: float) -> Confirmations:
    """All connections end a chunk at the same time."""
    times = range(round(until_s / every_s) + 1)
    return confirmed(*((connection, chunk, number * every_s) for number in times for connection in range(connections)))


@pytest.mark.parametrize("start_s", [1.0, 1.1, 1.29, 1.31])
def test_window_counts_the_share_that_crossed_in_it_wherever_chunks_end(start_s: float) -> None:
    assert steady(8, 300, 0.3, 6.0).rates(start_s, start_s + 0.5) == [pytest.approx(8 * 300 / 0.3)]


def test_first_chunk_of_a_connection_is_left_out() -> None:
    found = confirmed((0, 10**9, 1.0), (1, 10**9, 1.5), (0, 100, 2.0))
    assert found.rates(0.0, 2.0) == [pytest.approx(50.0)]


def test_chunk_confirmed_after_the_window_counts_as_far_as_it_crossed_in_it() -> None:
    assert confirmed((0, 1, 0.0), (0, 400, 4.0)).rates(0.0, 1.0) == [pytest.approx(100.0)]


def test_windows_share_what_crosses_their_border() -> None:
    found = confirmed((0, 1, 0.5), (0, 100, 1.5), (0, 300, 1.5), (0, 100, 2.5))
    assert found.rates(0.0, 3.0, 3) == [pytest.approx(rate) for rate in (50.0, 400.0, 50.0)]


def test_what_is_confirmed_at_one_moment_is_counted_once() -> None:
    found = confirmed((0, 1, 1.0), (0, 100, 1.0), (0, 7, 3.0))
    assert found.rates(0.0, 2.0, 2) == [0.0, pytest.approx(103.5)]


def test_steady_rate_has_no_spread_and_a_swinging_one_has_that_of_its_windows() -> None:
    assert steady(4, 100, 0.3, 6.0).spread(1.0, 3.5) == pytest.approx(0.0)
    swinging = confirmed((0, 1, 0.0), *((0, 50 * (i + 1), 0.5 * (i + 1)) for i in range(5)))
    assert swinging.spread(0.0, 2.5) == pytest.approx(200.0)


def test_too_few_windows_tell_nothing() -> None:
    assert steady(4, 100, 0.3, 6.0).spread(1.0, 2.4) is None
