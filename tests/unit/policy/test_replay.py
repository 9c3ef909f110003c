"""A recorded decision, decided again from its line alone, is the same."""

from __future__ import annotations

import random

import pytest

from farfill.core.cluster import Instance, InstanceState, Role
from farfill.core.errors import ProtocolError
from farfill.policy.budget import BudgetInputs, decide_budget
from farfill.policy.candidates import PlacementRequest, candidate
from farfill.policy.decider import OffloadQuery, SiteInputs, decide_offload
from farfill.policy.placement import PlacementProfile, ProfileSettings
from farfill.policy.replay import POLICIES, PlacementInputs, ShareInputs, StepInputs, record, replay
from farfill.policy.rollout import GuardLimits, Share, ShareQuery, StepObservation, decide_step, in_share
from farfill.policy.threshold import Curve, ThresholdInputs, search_threshold


def an_hour(rng: random.Random) -> list[bytes]:
    """Random decisions of every policy, recorded."""
    lines: list[bytes] = []
    for number in range(60):
        request = str(number)
        cs = tuple(
            candidate(
                Instance(
                    name=f"d{i}",
                    role=rng.choice(list(Role)),
                    site="near",
                    url="https://h:1",
                    transfer_address="",
                    model="m",
                    fingerprint="f",
                    generation="g",
                    state=rng.choice(list(InstanceState)),
                    max_context_tokens=4096,
                    queued_tokens=rng.randrange(9999),
                ),
                hit_tokens=rng.randrange(900),
                allowed=rng.random() < 0.8,
            )
            for i in range(rng.randrange(12))
        )
        asked = PlacementRequest(
            model="m",
            role=Role.DECODE,
            prompt_tokens=1000,
            total_tokens=2000,
            session=str(rng.random()),
            spread=request,
        )
        settings = ProfileSettings(picker=rng.choice(["best", "spread"]))
        placed = PlacementInputs(settings, asked, cs)
        lines.append(record("placement", placed, PlacementProfile(settings).choose(asked, cs), request=request))
        query = OffloadQuery(
            prompt_tokens=rng.randrange(1, 9999),
            near_hit_tokens=rng.randrange(999),
            threshold_tokens=4096,
            sites=tuple(
                SiteInputs(
                    site=f"s{i}",
                    queue_s=rng.random(),
                    prefill_s_per_token=rng.choice([None, rng.random() / 1e4]),
                    link_bytes_per_s=rng.random() * 1e9 + 1,
                    kv_bytes_per_token=rng.random() * 1e5,
                )
                for i in range(rng.randrange(4))
            ),
        )
        lines.append(record("offload", query, decide_offload(query), request=request, unix_s=float(number)))
        share = ShareInputs(
            rng.choice([None, Share(percent=rng.random() * 100)]),
            ShareQuery(model="m", tenant="t", session="", request=request),
        )
        lines.append(record("rollout_share", share, in_share(share.share, share.query), request=request))
    search = ThresholdInputs(
        lengths=tuple(rng.randrange(1, 50_000) for _ in range(500)),
        far_instances=2,
        near_instances=3,
        far_prefill_s=Curve(((0, 0.1), (50_000, 3.0))),
        near_prefill_s=Curve(((0, 0.2), (50_000, 9.0))),
        kv_bytes=Curve(((0, 1e8), (50_000, 1e9))),
        egress_bytes_per_s=1e9,
    )
    lines.append(record("threshold", search, search_threshold(search)))
    budget = BudgetInputs(
        tokens_wait_s=1 / 3, running=1, max_concurrent=4, guarded=False, mean_s=1.0, guard_retry_s=2.0
    )
    lines.append(record("fallback_budget", budget, decide_budget(budget)))
    seen = StepObservation(
        percent=10,
        step_age_s=1e3,
        far_requests=500,
        far_failures=1,
        ttft_ratio=0.7,
        link_utilisation=0.1,
        parity_samples=0,
        parity_mismatches=0,
    )
    lines.append(record("rollout_step", StepInputs(GuardLimits(), seen), decide_step(GuardLimits(), seen)))
    return lines


def test_recorded_decisions_are_made_again_identically():
    lines = an_hour(random.Random(3))
    replayed = [replay(line) for line in lines]
    assert {r.policy for r in replayed} == set(POLICIES)
    assert all(r.same for r in replayed)
    assert all(b"\n" not in line for line in lines)


def test_change_of_a_decision_is_seen():
    line = an_hour(random.Random(4))[-2]
    assert not replay(line.replace(b'"fallback_tokens"', b'"granted"')).same


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}", "no recorded decision"),
        (b"\xff", "no recorded decision"),
        (b'{"v":2,"policy":"offload","inputs":{},"output":{}}', "version 2, this program reads 1"),
        (b'{"policy":"oflod","inputs":{},"output":{}}', "no policy is named 'oflod'; there are: fallback_budget"),
        (b'{"policy":"offload","inputs":{},"output":{}}', "no recorded decision: Object missing"),
    ],
)
def test_line_that_cannot_be_read_is_refused(line: bytes, message: str):
    with pytest.raises(ProtocolError, match=message):
        replay(line)
