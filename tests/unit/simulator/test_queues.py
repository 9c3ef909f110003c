"""Simulated queues against what is known in closed form. Long runs are in benchmarks/simulator.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from farfill.planner.lengths import Lengths, observed, uniform
from farfill.planner.queueing import wait_in_pool
from farfill.simulator.kernel import Kernel
from farfill.simulator.link import SharedLink
from farfill.simulator.traffic import generator
from farfill.simulator.world import World
from farfill.testing.queues import controlled, known_wait_s, poisson_queue, recursion_waits
from unit.simulator.scenes import exponential_lengths, queue


@pytest.mark.parametrize(
    ("lengths", "scv"),
    [(exponential_lengths(10_000), 1.0), (observed([10_000.0]), 0.0), (uniform(1, 20_000), 1 / 3)],
    ids=["M/M/1", "M/D/1", "M/G/1"],
)
def test_one_server_waits_as_lindley_and_pollaczek_say(tmp_path: Path, lengths: Lengths, scv: float) -> None:
    world = World(queue(tmp_path, lengths, rate_per_s=0.5, servers=1, requests=8_000))
    world.run()
    records = world.records
    arrivals, prompts = records.column("arrival"), records.column("prompt")
    waits = records.column("wait")
    service = (prompts - 1) * 1e-4
    # Exactly: each request waits for what the one before it left (Lindley's recursion).
    expected = waits[0]
    for i in range(1, len(waits)):
        expected = max(0.0, expected + service[i - 1] - (arrivals[i] - arrivals[i - 1]))
        assert waits[i] == pytest.approx(expected, abs=1e-6)
    # On average: Pollaczek-Khinchine, as far as so few requests tell.
    assert waits.mean() == pytest.approx(wait_in_pool(0.5, 1, 1.0, scv).overall_s, rel=0.1)


@pytest.mark.parametrize(
    ("lengths", "form_off"),
    [(exponential_lengths(10_000), 0.0), (observed([10_000.0]), 0.0), (uniform(1, 20_000), 0.015)],
    ids=["M/M/4", "M/D/4", "M/G/4"],
)
def test_four_servers_wait_as_erlang_crommelin_and_kimura_say(
    tmp_path: Path, lengths: Lengths, form_off: float
) -> None:
    world = World(queue(tmp_path, lengths, rate_per_s=2.8, servers=4, requests=4_000))
    world.run()
    came = np.argsort(world.records.column("arrival"))  # records stand in the order of their ends
    arrivals, prompts, waits = (world.records.column(name)[came] for name in ("arrival", "prompt", "wait"))
    same = arrivals, (prompts - 1) * 1e-4
    assert waits.mean() == pytest.approx(recursion_waits(*same, 4).mean(), rel=0.01)
    found = controlled(waits, same, poisson_queue(lengths, 1e-4, 2.8, 600_000, seed=3), 4)
    told = known_wait_s(lengths, 1e-4, 2.8, 4)
    assert found.error_s < 0.025 * told, "else the next line proves little"
    assert abs(found.mean_s - told) < 4 * found.error_s + form_off * told


@pytest.mark.parametrize("sizes", ["exponential", "equal"])
def test_transfers_on_a_shared_link_take_what_processor_sharing_says(sizes: str) -> None:
    kernel, rng = Kernel(), generator(5, 1)
    link = SharedLink(kernel, bytes_per_s=1e6, rtt_s=0.0)
    took: list[float] = []
    load, count = 0.6, 20_000
    at_s = np.cumsum(rng.exponential(1 / load, count))
    size = rng.exponential(1e6, count) if sizes == "exponential" else np.full(count, 1e6)

    def begin(i: int) -> None:
        link.start(kernel.now_s, float(size[i]), lambda started_s: took.append(kernel.now_s - started_s))

    for i in range(count):
        kernel.at(float(at_s[i]), begin, i)
    kernel.run()
    assert len(took) == count
    assert np.mean(took) == pytest.approx(1 / (1 - load), rel=0.08)
    assert link.carried == pytest.approx(float(size.sum()), rel=1e-6)


def test_a_cut_link_carries_nothing_and_goes_on_where_it_stopped() -> None:
    kernel = Kernel()
    link = SharedLink(kernel, bytes_per_s=100.0, rtt_s=0.0)
    ended: list[float] = []
    link.start("a", 1000.0, lambda _: ended.append(kernel.now_s))
    kernel.at(4.0, lambda _: link.set_factor("event", 0.0))
    kernel.at(9.0, lambda _: link.set_factor("event", 0.5))
    kernel.run()
    assert ended == [pytest.approx(9.0 + 600 / 50)]


def test_two_transfers_share_and_a_longer_one_is_extended() -> None:
    kernel = Kernel()
    link = SharedLink(kernel, bytes_per_s=100.0, rtt_s=0.0)
    ended: dict[str, float] = {}

    def done(name: str) -> None:
        ended[name] = kernel.now_s

    first = link.start("a", 100.0, done)
    link.start("b", 100.0, done)
    kernel.at(1.0, lambda _: link.extend(first, 50.0))
    kernel.run()
    assert ended == {"b": pytest.approx(2.0), "a": pytest.approx(2.5)}
