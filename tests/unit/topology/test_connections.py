"""The number of connections: few with BBR, more where loss limits each of them, and no more than pays."""

from __future__ import annotations

from collections.abc import Callable

from farfill.topology.connections import FEW, HOLD_FIRST_S, MANY, STEP, ConnectionTuner

LINE = 125e6
SEGMENT = 1448
SOME = FEW * STEP


def run(
    tuner: ConnectionTuner,
    seconds: float,
    rate_of: Callable[[int], float],
    *,
    loss: float | Callable[[int], float],
    rtt_of: Callable[[int], float] = lambda _: 0.03,
    congestion: str = "cubic",
    busy: bool | Callable[[int], bool] = True,
    start_s: float = 0.0,
) -> list[int]:
    """Every 0.1 s an observation of a link on which so many connections have that goodput; all numbers wanted."""
    wanted = [tuner.wanted]
    for step in range(int(seconds * 10)):
        lost = loss(tuner.wanted) if callable(loss) else loss
        acked = int(rate_of(tuner.wanted) / 10)
        segments = max(1, acked // SEGMENT)
        tuner.observe(
            start_s + step / 10,
            congestion=congestion,
            rtt_s=rtt_of(tuner.wanted),
            acked_bytes=acked,
            segments_sent=segments,
            segments_resent=round(segments * lost) if segments * lost >= 1 else int(lost > 0),
            busy=busy(step) if callable(busy) else busy,
        )
        if tuner.wanted != wanted[-1]:
            wanted.append(tuner.wanted)
    return wanted


def lossy(connections: int) -> float:
    return min(LINE, connections * 2.5e6)


def test_loss_limited_link_gets_many_connections_within_seconds() -> None:
    assert run(ConnectionTuner(), 3, lossy, loss=0.001) == [FEW, SOME, MANY]


def crowded(connections: int) -> float:
    """Loss of a full line without a queue (Mathis)."""
    return 0.001 * (connections / FEW) ** 2


def test_bbr_stays_with_few() -> None:
    assert run(ConnectionTuner(), 5, lossy, loss=0.01, congestion="bbr") == [FEW]


def test_clean_link_stays_with_few() -> None:
    assert run(ConnectionTuner(), 5, lossy, loss=0.0) == [FEW]


def test_full_line_takes_the_step_back_and_asks_again_ever_more_rarely() -> None:
    tuner = ConnectionTuner()
    assert run(tuner, 2, lambda _: LINE, loss=crowded) == [FEW, SOME, FEW]
    assert run(tuner, HOLD_FIRST_S - 0.8, lambda _: LINE, loss=crowded, start_s=2) == [FEW]
    steps = run(tuner, 200, lambda _: LINE, loss=crowded, start_s=4).count(SOME)
    assert 4 <= steps <= 8, "the path may be another one now, but most likely is not"


def test_rate_of_slow_start_is_no_measure() -> None:
    """The first moments are fast: nothing was lost yet."""
    tuner = ConnectionTuner()
    moments = iter([LINE] * 2)
    assert run(tuner, 3, lambda n: next(moments, lossy(n)), loss=0.001) == [FEW, SOME, MANY]


def test_loss_and_round_trip_that_stay_are_no_reason_to_step_back() -> None:
    """The rate is noisy where other work takes the CPU."""
    assert run(ConnectionTuner(), 3, lambda _: LINE / 10, loss=0.001) == [FEW, SOME, MANY]


def test_full_queue_takes_the_step_back() -> None:
    """It has its depth whatever the number of connections; the loss needed to share the line is small."""
    tuner = ConnectionTuner()
    run(tuner, 0.2, lossy, loss=0.0)
    assert run(tuner, 3, lambda _: LINE, loss=1e-4, rtt_of=lambda _: 0.06) == [FEW, SOME, FEW]


def test_transfers_too_short_to_measure_a_rate_are_evidence_together() -> None:
    assert run(ConnectionTuner(), 6, lossy, loss=0.001, busy=lambda step: step % 4 < 3) == [FEW, SOME, MANY]


def test_idle_link_tells_nothing() -> None:
    assert run(ConnectionTuner(), 5, lossy, loss=0.01, busy=False) == [FEW]


def test_fixed_number_never_changes() -> None:
    assert run(ConnectionTuner(7), 5, lossy, loss=0.01) == [7]
