"""What the gateway measures of links, and the threshold it searches on that."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from farfill.clock import VirtualClock
from farfill.config.routing import RoutingConfig
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.gateway.adapt import Threshold
from farfill.gateway.decisions import DecisionTrail
from farfill.gateway.links import WINDOW_S, LinkView
from farfill.gateway.observe import SilentPolicyObserver
from farfill.policy.regime import Bandwidth
from farfill.policy.replay import replay
from farfill.wire.control import PrefillReport
from support.gateway_harness import running_gateway
from support.stub_worker import REPORT, start_event

FAR = Instance(
    name="p1", role=Role.PREFILL, site="far", url="u", transfer_address="", model="tiny", fingerprint="f",
    generation="g", state=InstanceState.READY, max_context_tokens=1_000_000,
)  # fmt: skip
NEAR = dataclasses.replace(FAR, name="d1", role=Role.DECODE, site="near")


class Observer(SilentPolicyObserver):
    def __init__(self) -> None:
        self.searches: list[tuple[int, str]] = []

    def threshold_set(self, tokens: int, reason: str, model: str) -> None:
        self.searches.append((tokens, reason))


def report(wire_bytes: int, computed_tokens: int = 1000, rate: float = 1e6) -> PrefillReport:
    """Far prefill at 1 ms a token."""
    return msgspec.structs.replace(
        REPORT, wire_bytes=wire_bytes, computed_tokens=computed_tokens, prefill_s=computed_tokens / 1000,
        link_bytes_per_s=rate, link_rtt_s=0.03,
    )  # fmt: skip


def test_utilisation_is_what_was_sent_lately_over_what_the_link_carries():
    clock = VirtualClock()
    links = LinkView(RoutingConfig(), clock)
    assert (links.utilisation("far"), links.bytes_per_token) == (0.0, 0.0)
    links.far_ended(FAR, 1001, report(4_000_000))
    assert links.utilisation("far") == pytest.approx(0.4)
    assert links.bytes_per_token == pytest.approx(4000)
    assert links.bandwidth("far") is Bandwidth.ABUNDANT
    clock.advance(5)
    links.far_ended(FAR, 1001, report(5_000_000))
    assert links.utilisation("far") == pytest.approx(0.9)
    assert links.bandwidth("far") is Bandwidth.ABUNDANT, "no change within 10 s of the last one"
    clock.advance(WINDOW_S - 4)
    assert links.utilisation("far") == pytest.approx(0.5)


def test_a_link_nobody_measured_is_not_full():
    links = LinkView(RoutingConfig(), VirtualClock())
    links.far_ended(FAR, 1001, report(10**12, rate=0.0))
    assert links.utilisation("far") == 0.0


def threshold(clock: VirtualClock, **settings: object) -> tuple[Threshold, LinkView, Observer]:
    routing = RoutingConfig.model_validate({"remote_prefill_threshold_tokens": 4000, "threshold": "auto", **settings})
    links, observer = LinkView(routing, clock), Observer()
    return Threshold(routing, links, clock, observer), links, observer


def test_auto_searches_on_the_latest_lengths_and_its_answer_replays():
    clock = VirtualClock()
    found, links, observer = threshold(clock)
    trail = DecisionTrail("", 0.0)
    for _ in range(100):
        found.seen(1000)
        found.seen(2000)
    found.search_if_due([FAR, NEAR], 0.0, trail)
    assert trail.decisions == [], "nothing was measured yet"
    links.far_ended(FAR, 1001, report(1000))  # 1 byte a token: the link limits nothing
    near = start_event(1000, "local", "none", 0)
    near.prefill_s = 2.0  # near is half as fast
    links.near_ended(near)
    found.search_if_due([FAR, NEAR], 0.0, trail)
    assert 1000 < found.tokens <= 2000, "the longer half goes far"
    assert observer.searches[-1] == (found.tokens, "capacity"), "a link that was not known is there now"
    assert [replay(decision.line()).same for decision in trail.decisions] == [True]
    assert trail.decisions[0].policy == "threshold"


def test_auto_searches_at_once_under_pressure_and_not_twice_in_a_period():
    clock = VirtualClock()
    found, links, observer = threshold(clock)
    near = start_event(1000, "local", "none", 0)
    near.prefill_s = 1.0
    links.near_ended(near)
    for _ in range(64):
        found.seen(8000)
    links.far_ended(FAR, 1001, report(9_000_000))
    for _ in range(3):
        found.search_if_due([FAR, NEAR], 0.0, DecisionTrail("", 0.0))
    assert [reason for _, reason in observer.searches] == ["", "egress_pressure"]
    clock.advance(WINDOW_S + 1)
    found.search_if_due([FAR, NEAR], 0.0, DecisionTrail("", 0.0))
    assert observer.searches[-1][1] == "relief"


def measured(links: LinkView) -> None:
    """Far twice as fast as near; the link limits nothing."""
    links.far_ended(FAR, 1001, report(1000))
    near = start_event(1000, "local", "none", 0)
    near.prefill_s = 2.0
    links.near_ended(near)


def searched(found: Threshold, usable: bool = True, near: Instance = NEAR) -> None:
    found.search_if_due([FAR, near], 0.0, DecisionTrail("", 0.0), lambda _: usable)


def test_a_cut_link_raises_the_threshold_and_its_return_brings_it_down_again():
    clock = VirtualClock()
    found, links, observer = threshold(clock)
    measured(links)
    for _ in range(100):
        found.seen(1000)
        found.seen(2000)
    searched(found)
    whole = found.tokens
    for _ in range(6):
        clock.advance(10)
        searched(found, usable=False)
    assert found.tokens > 2000, "nothing goes far over a cut link"
    for _ in range(3):
        clock.advance(10)
        searched(found)
    assert found.tokens == whole
    assert [reason for _, reason in observer.searches] == [
        "", "new_lengths", "capacity", "relief", "capacity", "relief",
    ]  # fmt: skip


def test_an_overloaded_near_pool_asks_for_a_search():
    clock = VirtualClock()
    found, links, observer = threshold(clock)
    measured(links)
    for _ in range(100):
        found.seen(1000)
        found.seen(2000)
    searched(found)
    clock.advance(10)
    searched(found, near=dataclasses.replace(NEAR, queued_tokens=5000))
    assert observer.searches[-1] == (found.tokens, "near_surge")


def test_static_threshold_never_moves():
    clock = VirtualClock()
    found, _, observer = threshold(clock, threshold="static")
    for _ in range(1000):
        found.seen(100_000)
    found.search_if_due([FAR, NEAR], 100.0, DecisionTrail("", 0.0))
    assert (found.tokens, observer.searches) == (4000, [(4000, "")])


async def test_full_link_keeps_prompts_near_with_its_reason(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        links = gateway.service.links
        links.far_ended(gateway.prefill.instance, 101, report(10**12, rate=1e9))
        status, _, response = await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x" * 100})
        assert (status, response.headers["x-farfill-reason"]) == (200, "link_busy")
        _, shown, _ = await gateway.get("/v1/farfill/instances")
        assert shown["sites"]["far"]["link_utilisation"] == 1.0
        assert shown["threshold_tokens"] == 32
