"""Links act as set: round trip, jitter, rate, loss, queue, cut and heal, each direction on its own, while in use."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time

import pytest

from farfill.testing.lab import Lab, LabError
from lab.wan import DEADLINE_S, Reading, connection, flood, handled, wait_for

pytestmark = pytest.mark.lab

# TCP payload per byte on an Ethernet line: 1500 - 52 of 1500 + 38.
PAYLOAD_SHARE = 1448 / 1538


def round_trips(lab: Lab, count: int) -> list[float]:
    """Seconds from `far` to `near` and back, one byte each."""
    times = []
    with connection(lab, "far", "near") as joined:
        joined.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        joined.server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            before = time.monotonic()
            joined.client.send(b"?")
            joined.server.send(joined.server.recv(1))
            joined.client.recv(1)
            times.append(time.monotonic() - before)
    return times


def goodput(lab: Lab, source: str, target: str, *, size: int) -> float:
    """Payload bits/s of one TCP transfer, without its start and end."""
    with connection(lab, source, target) as joined:
        reading = Reading.of(joined.server)
        sending = threading.Thread(target=joined.client.sendall, args=(bytes(size),), daemon=True)
        sending.start()
        wait_for(lambda: reading.received_bytes >= size // 4, "a quarter of the transfer")
        first_bytes, first = reading.received_bytes, time.monotonic()
        wait_for(lambda: reading.received_bytes >= size * 3 // 4, "three quarters of the transfer")
        last_bytes, last = reading.received_bytes, time.monotonic()
        sending.join(DEADLINE_S)
        joined.client.shutdown(socket.SHUT_WR)
        assert reading.finished().received_bytes == size
    return (last_bytes - first_bytes) * 8 / (last - first)


def test_a_round_trip_takes_as_long_as_set_and_follows_a_change(lab: Lab) -> None:
    lab.link("near", "far").set(rtt_s=0.03)
    first = min(round_trips(lab, 15))
    lab.link("near", "far").set(rtt_s=0.08)
    second = min(round_trips(lab, 5))
    # The fastest of several: a busy machine delays some.
    assert 0.03 <= first < 0.034
    assert 0.08 <= second < 0.084


def test_one_direction_may_be_slower_than_the_other(lab: Lab) -> None:
    lab.direction("near", "far").set(delay_s=0.02)
    assert lab.link("near", "far").forward.wire.delay_s == 0.02
    assert lab.link("near", "far").backward.wire.delay_s == 0
    assert 0.02 <= min(round_trips(lab, 5)) < 0.024


def test_jitter_varies_the_round_trip_within_its_bounds(lab: Lab) -> None:
    lab.link("near", "far").set(rtt_s=0.02, jitter_s=0.01)
    times = sorted(round_trips(lab, 60))
    assert times[0] >= 0.01
    assert times[len(times) // 2] < 0.03
    assert times[-len(times) // 5] - times[len(times) // 5] > 0.001


@pytest.mark.parametrize("rate", [20e6, 200e6])
def test_tcp_fills_the_rate_that_was_set(lab: Lab, rate: float) -> None:
    lab.link("near", "far").set(rate_bits_per_s=rate, rtt_s=0.01)
    measured = goodput(lab, "far", "near", size=int(rate / 8 * 1.5))
    assert measured == pytest.approx(rate * PAYLOAD_SHARE, rel=0.1)
    assert lab.device_drops("far") == 0


def test_each_direction_has_its_own_rate(lab: Lab) -> None:
    lab.direction("near", "far").set(rate_bits_per_s=20e6)
    assert goodput(lab, "near", "far", size=3_000_000) == pytest.approx(20e6 * PAYLOAD_SHARE, rel=0.1)
    assert goodput(lab, "far", "near", size=30_000_000) > 60e6


def test_a_full_queue_drops_its_tail(lab: Lab) -> None:
    lab.direction("far", "near").set(rate_bits_per_s=1e6, queue_bytes=15_380)
    with lab.inside("far"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(50):
            sender.sendto(bytes(1472), (lab.address("near"), 9))
    way = lab.direction("far", "near")
    wait_for(lambda: handled(lab, "far", "near") == 50, "the queue to run empty")
    seen = way.counters()
    # Ten packets of 1538 bytes fit; one more for each 12.3 ms that sending took.
    assert 10 <= seen.packets <= 14
    assert seen.overflowed == 50 - seen.packets
    assert seen.bytes == seen.packets * 1538


def test_loss_is_as_set_and_the_same_for_the_same_seed() -> None:
    arrived = []
    for _ in range(2):
        with Lab(seed=7) as lab:
            lab.link("near", "far").set(loss=0.05)
            arrived.append(flood(lab, "far", "near", count=4000))
            seen = lab.direction("far", "near").counters()
    assert seen.lost / 4000 == pytest.approx(0.05, rel=0.25)
    assert arrived[0] == arrived[1] == 4000 - seen.lost


def test_loss_counts_wire_packets_inside_super_packets(lab: Lab) -> None:
    lab.link("near", "far").set(rate_bits_per_s=500e6, rtt_s=0.004)
    lab.direction("far", "near").set(loss=0.01)
    goodput(lab, "far", "near", size=30_000_000)
    seen = lab.direction("far", "near").counters()
    assert seen.packets > 30_000_000 / 1448
    assert seen.lost / (seen.packets + seen.lost) == pytest.approx(0.01, rel=0.3)


def test_bytes_arrive_whole_and_in_order_under_loss_and_jitter(lab: Lab) -> None:
    lab.link("near", "far").set(rate_bits_per_s=1e9, rtt_s=0.01, jitter_s=0.004, loss=0.01)
    data = os.urandom(64 * 1024 * 1024)
    with connection(lab, "far", "near") as joined:
        reading = Reading.of(joined.server)
        joined.client.sendall(data)
        joined.client.shutdown(socket.SHUT_WR)
        assert reading.finished().digest == hashlib.sha256(data).hexdigest()
    assert lab.direction("far", "near").counters().lost > 200


def test_a_connection_survives_a_cut_that_heals(lab: Lab) -> None:
    link = lab.link("near", "far")
    link.set(rate_bits_per_s=100e6, rtt_s=0.02)
    data = os.urandom(8 * 1024 * 1024)
    with connection(lab, "far", "near") as joined:
        reading = Reading.of(joined.server)
        sending = threading.Thread(target=joined.client.sendall, args=(data,), daemon=True)
        sending.start()
        wait_for(lambda: reading.received_bytes > 2**20, "a part of the transfer")
        link.cut()
        assert link.forward.is_cut
        assert link.backward.is_cut
        at_cut = lab.direction("far", "near").counters()
        assert at_cut.in_flight_packets == 0
        wait_for(lambda: lab.direction("far", "near").counters().severed > at_cut.severed, "a retransmission")
        assert lab.direction("far", "near").counters().packets == at_cut.packets
        assert reading.received_bytes < len(data)
        link.heal()
        sending.join(DEADLINE_S)
        joined.client.shutdown(socket.SHUT_WR)
        assert reading.finished().digest == hashlib.sha256(data).hexdigest()


def test_a_half_cut_link_still_carries_the_other_way(lab: Lab) -> None:
    lab.direction("near", "far").cut()
    assert flood(lab, "far", "near", count=10) == 10
    assert flood(lab, "near", "far", count=10) == 0
    assert lab.direction("near", "far").counters().severed == 10
    lab.direction("near", "far").heal()
    assert flood(lab, "near", "far", count=0) == 0
    assert round_trips(lab, 1)


@pytest.mark.parametrize(
    "setting",
    [{"rate_bits_per_s": 0.0}, {"rtt_s": -1.0}, {"jitter_s": 0.1}, {"loss": 1.5}, {"queue_bytes": -1}],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_that_no_link_can_have_is_refused(lab: Lab, setting: dict[str, float]) -> None:
    before = lab.link("near", "far").forward.wire
    with pytest.raises(LabError):
        lab.link("near", "far").set(**setting)
    assert lab.link("near", "far").forward.wire == before
