"""Prompts in turns, as the embedded engine computes them: chunk by chunk, cached chunk by chunk, each at its pace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import Instance, InstanceState, Role
from farfill.planner.curves import QuadraticCurve
from farfill.simulator.cache import BlockCache
from farfill.simulator.kernel import Kernel
from farfill.simulator.request import Listeners, Request
from farfill.simulator.times import PrefillTimes
from farfill.simulator.turns import TurnLimits, TurnsPrefill
from unit.simulator.scenes import read

CHUNK = 100
S_PER_TOKEN = 0.01


def nobody(*_: Any) -> None:
    """Is told."""


@pytest.fixture
def make(tmp_path: Path) -> Callable[[Kernel], TurnsPrefill]:
    profile = replace(read(tmp_path).problem.near.profile, prefill=QuadraticCurve(0.0, S_PER_TOKEN, 0.0))
    instance = Instance(
        name="p",
        role=Role.PREFILL,
        site="far",
        url="",
        transfer_address="",
        model="m",
        fingerprint="f",
        generation="1",
        state=InstanceState.READY,
        max_context_tokens=1 << 20,
    )

    def server(kernel: Kernel) -> TurnsPrefill:
        return TurnsPrefill(
            kernel,
            instance,
            PrefillTimes(profile, 10_000),
            Listeners(nobody, nobody, nobody, nobody, nobody, nobody),
            cache=BlockCache(1000),
            block_tokens=CHUNK,
            limits=TurnLimits(chunk_tokens=CHUNK, step_tokens=CHUNK, max_rows=8),
        )

    return server


def asked(name: str, at_s: float, tokens: int, *, begins: str, pace: float = 1.0) -> Request:
    keys = [f"{begins}{i}".encode() for i in range((tokens - 1) // CHUNK)]
    request = Request(name, at_s, tokens, 1, keys=keys)
    request.uncached, request.pace = tokens - 1, pace
    return request


def served(make: Callable[[Kernel], TurnsPrefill], *requests: Request) -> None:
    kernel = Kernel()
    server = make(kernel)
    for request in requests:
        kernel.at(request.arrival_s, server.submit, (request, 0))
    kernel.run()


def test_a_chunk_is_in_the_cache_as_soon_as_it_is_computed(make: Callable[[Kernel], TurnsPrefill]):
    first, second = asked("a", 0.0, 401, begins="x"), asked("b", 2.5, 401, begins="x")
    served(make, first, second)
    # The third chunk is being computed as it comes, and done when it gets its place.
    assert (first.cached, second.cached) == (0, 300)
    assert max(first.prefill_to_s, second.prefill_to_s) == pytest.approx(5.0)


def test_nothing_of_a_prompt_that_begins_otherwise_is_there(make: Callable[[Kernel], TurnsPrefill]):
    first, second = asked("a", 0.0, 401, begins="x"), asked("b", 2.5, 401, begins="y")
    served(make, first, second)
    assert (first.cached, second.cached) == (0, 0)
    assert max(first.prefill_to_s, second.prefill_to_s) == pytest.approx(8.0)


def test_a_slow_prompt_holds_up_the_next_one(make: Callable[[Kernel], TurnsPrefill]):
    usual, after_usual = asked("a", 0.0, 101, begins="x"), asked("b", 0.1, 101, begins="y")
    slow, after_slow = asked("a", 0.0, 101, begins="x", pace=3.0), asked("b", 0.1, 101, begins="y")
    served(make, usual, after_usual)
    served(make, slow, after_slow)
    assert (usual.prefill_to_s, after_usual.prefill_to_s) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (slow.prefill_to_s, after_slow.prefill_to_s) == (pytest.approx(3.0), pytest.approx(4.0))
