"""Filter, score, pick: each plugin by itself, and what must hold for any profile."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.cluster import Instance, InstanceState, Role
from farfill.core.errors import ConfigError
from farfill.policy.candidates import Candidate, PlacementRequest, candidate
from farfill.policy.pick import DecodeCandidate, pick_decode
from farfill.policy.placement import (
    DECODE_FILTERS,
    DECODE_WEIGHTS,
    PREFILL_FILTERS,
    PREFILL_WEIGHTS,
    PlacementProfile,
    ProfileSettings,
)
from farfill.policy.plugins import FILTERS, PICKERS, SCORERS

PAGES = Path(__file__).parents[3] / "docs" / "policies"
BASE = Instance(
    name="d0",
    role=Role.DECODE,
    site="near",
    url="",
    transfer_address="",
    model="m",
    fingerprint="f",
    generation="g",
    state=InstanceState.READY,
    max_context_tokens=10_000,
)
REQUEST = PlacementRequest(model="m", role=Role.DECODE, prompt_tokens=1000, total_tokens=2000)


def instance(name: str, **changes) -> Instance:
    return dataclasses.replace(BASE, name=name, **changes)


def passes(name: str, c: Candidate, request: PlacementRequest = REQUEST) -> bool:
    return FILTERS[name](request, [c])[0]


def scores(name: str, *cs: Candidate, request: PlacementRequest = REQUEST) -> list[float]:
    return SCORERS[name](request, cs)


@pytest.mark.parametrize(
    ("name", "c", "expected"),
    [
        ("health", candidate(BASE), True),
        ("health", candidate(instance("d", state=InstanceState.DRAINING)), False),
        ("health", candidate(BASE, allowed=False), False),
        ("health", candidate(BASE, reachable=False), False),
        ("role", candidate(instance("d", role=Role.MIXED)), True),
        ("role", candidate(instance("d", role=Role.PREFILL)), False),
        ("model", candidate(instance("d", model="other")), False),
        ("model", candidate(instance("d", model="other"), models=("m",)), True),
        ("capacity", candidate(instance("d", max_context_tokens=2000)), True),
        ("capacity", candidate(instance("d", max_context_tokens=1999)), False),
        ("exclude", candidate(BASE), True),
        ("capability", candidate(BASE), True),
        ("fingerprint", candidate(BASE), True),
        ("tenant_share", candidate(BASE, tenant_tokens=9999, outstanding_tokens=9999), True),
    ],
)
def test_filter(name: str, c: Candidate, expected: bool):
    assert passes(name, c) is expected


def test_filters_that_look_at_the_request():
    replaced = dataclasses.replace
    assert not passes("exclude", candidate(BASE), replace_request(exclude=("d0",)))
    assert not passes("fingerprint", candidate(BASE), replace_request(fingerprint="other"))
    vision = replace_request(capabilities=("tools", "vision"))
    assert not passes("capability", candidate(BASE, capabilities=("tools",)), vision)
    assert passes("capability", candidate(BASE, capabilities=("vision", "tools", "x")), vision)
    small = candidate(replaced(BASE, kv_total_bytes=100))
    assert not passes("capacity", small, replace_request(kv_bytes=101))
    assert passes("capacity", candidate(BASE), replace_request(kv_bytes=101))  # size not known
    half = replace_request(tenant_share=0.5, tenant="t")
    assert passes("tenant_share", candidate(BASE, tenant_tokens=4000, outstanding_tokens=4000), half)
    assert not passes("tenant_share", candidate(BASE, tenant_tokens=4001, outstanding_tokens=4001), half)
    assert passes("tenant_share", candidate(BASE, outstanding_tokens=50_000), half)


def replace_request(**changes) -> PlacementRequest:
    return msgspec.structs.replace(REQUEST, **changes)


def test_scorers():
    idle, busy = candidate(instance("a")), candidate(instance("b", queued_tokens=8192, running_requests=8))
    warm = candidate(instance("c"), hit_tokens=500)
    assert scores("prefix_affinity", idle, warm) == [0.0, 0.5]
    assert scores("queue_depth", idle, busy) == [1.0, 0.5]
    assert scores("outstanding_tokens", idle, busy) == [1.0, 0.5]
    assert scores("least_work", idle, busy, warm) == [1 - 500 / 8692, 0.0, 1.0]
    assert scores("least_work", idle, idle) == [1.0, 1.0]
    assert scores("least_work", idle, candidate(instance("b", queued_tokens=2048))) == [1.0, 0.75]
    full = candidate(instance("d", kv_total_bytes=100, kv_used_bytes=75))
    assert scores("kv_bytes", idle, full, request=replace_request(kv_bytes=5)) == [1.0, pytest.approx(0.2)]
    assert scores("kv_bytes", full, request=replace_request(kv_bytes=500)) == [0.0]
    mine = candidate(instance("e"), outstanding_tokens=100, tenant_tokens=75)
    assert scores("tenant_share", idle, mine) == [1.0, 0.25]


def test_session_stays_where_it_is_when_others_leave():
    instances = [candidate(instance(f"d{i}")) for i in range(8)]
    homes: dict[str, str] = {}
    for n in range(400):
        request = replace_request(session=f"session-{n}")
        row = scores("session_affinity", *instances, request=request)
        assert sorted(row) == [0.0] * 7 + [1.0]
        homes[request.session] = instances[row.index(1.0)].instance.name
    spread = Counter(homes.values())
    assert min(spread.values()) > 25
    left = instances[1:]
    for session, home in homes.items():
        row = scores("session_affinity", *left, request=replace_request(session=session))
        if home != "d0":
            assert left[row.index(1.0)].instance.name == home
    assert scores("session_affinity", *instances) == [0.0] * 8


def test_spread_picks_among_the_close_ones_only():
    cs = [candidate(instance(f"d{i}")) for i in range(4)]
    totals = [1.0, 0.99, 0.5, 1.0]
    picked = {PICKERS["spread"](replace_request(spread=str(n)), cs, totals) for n in range(100)}
    assert picked == {0, 1, 3}
    assert PICKERS["best"](REQUEST, cs, totals) == 0


@st.composite
def some_candidates(draw: st.DrawFn) -> list[Candidate]:
    return [
        candidate(
            instance(
                f"d{i:02}",
                role=draw(st.sampled_from(list(Role))),
                state=draw(st.sampled_from([InstanceState.READY, InstanceState.READY, InstanceState.DRAINING])),
                model=draw(st.sampled_from(["m", "m", "n"])),
                queued_tokens=draw(st.integers(0, 50_000)),
                running_requests=draw(st.integers(0, 40)),
                max_context_tokens=draw(st.sampled_from([1000, 10_000])),
            ),
            hit_tokens=draw(st.integers(0, 999)),
            outstanding_tokens=draw(st.integers(0, 50_000)),
            allowed=draw(st.booleans()),
        )
        for i in range(draw(st.integers(0, 8)))
    ]


candidates = some_candidates()


@given(candidates, st.sampled_from(sorted(PICKERS)), st.text(max_size=4))
def test_any_choice_is_allowed_and_every_candidate_is_accounted_for(cs: list[Candidate], picker: str, session: str):
    profile = PlacementProfile(ProfileSettings(picker=picker))
    request = replace_request(session=session, spread=session)
    choice = profile.choose(request, cs)
    scored = [index for index, _, _ in choice.scores]
    assert sorted(scored + [index for index, _ in choice.rejected]) == list(range(len(cs)))
    for index, name in choice.rejected:
        assert not passes(name, cs[index], request)
    for index in scored:
        assert all(passes(name, cs[index], request) for name in DECODE_FILTERS)
    assert (choice.index is None) == (not scored)
    assert sum(choice.refusals().values()) == len(choice.rejected)
    if choice.index is not None:
        total = {index: value for index, value, _ in choice.scores}
        assert total[choice.index] >= max(total.values()) * 0.98
        for _, value, row in choice.scores:
            assert value == pytest.approx(sum(DECODE_WEIGHTS[n] * s for n, s in zip(profile.scorers, row, strict=True)))
            assert all(0 <= s <= 1 for s in row)
    assert profile.choose(request, tuple(cs)) == choice


@given(candidates, st.randoms())
def test_order_of_candidates_does_not_matter(cs: list[Candidate], rng):
    profile = PlacementProfile(ProfileSettings())
    shuffled = list(cs)
    rng.shuffle(shuffled)
    first, second = profile.choose(REQUEST, cs).index, profile.choose(REQUEST, shuffled).index
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert cs[first].instance.name == shuffled[second].instance.name


@given(candidates)
def test_least_work_alone_picks_as_the_simple_policy_does(cs: list[Candidate]):
    profile = PlacementProfile(ProfileSettings(filters=("role", "model", "health"), weights={"least_work": 1.0}))
    usable = [c for c in cs if all(passes(n, c) for n in ("role", "model", "health"))]
    simple = pick_decode(
        [
            DecodeCandidate(
                instance=c.instance,
                outstanding_tokens=c.waiting_tokens,
                outstanding_requests=c.running,
                hit_tokens=c.hit_tokens,
            )
            for c in usable
        ],
        REQUEST.prompt_tokens,
    )
    index = profile.choose(REQUEST, cs).index
    assert (None if index is None else cs[index].instance) == (None if simple is None else simple.instance)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ProfileSettings(filters=("helth",)), "no filter is named 'helth'; did you mean health?"),
        (ProfileSettings(weights={"zzz": 1.0}), "no scorer is named 'zzz'; there are: kv_bytes, least_work"),
        (ProfileSettings(picker="bst"), "did you mean best?"),
        (ProfileSettings(weights={"least_work": -1.0}), "must not be negative"),
    ],
)
def test_unknown_plugin_is_refused_with_a_fix(settings: ProfileSettings, message: str):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        PlacementProfile(settings)


def test_default_profiles_exist():
    PlacementProfile(ProfileSettings(filters=PREFILL_FILTERS, weights=dict(PREFILL_WEIGHTS)))
    assert PlacementProfile(ProfileSettings(weights={"least_work": 0.0})).scorers == ()
    assert PlacementProfile(ProfileSettings(weights={})).choose(REQUEST, [candidate(BASE)]).index == 0


@pytest.mark.parametrize(
    "page",
    sorted({f"filter-{n}" for n in FILTERS} | {f"scorer-{n}" for n in SCORERS} | {f"picker-{n}" for n in PICKERS}),
)
def test_every_plugin_has_its_page(page: str):
    text = (PAGES / f"{page.replace('_', '-')}.md").read_text()
    kind, _, name = page.partition("-")
    assert f"`{name}`" in text
    assert (
        f"[{kind} {name}]" in (PAGES / "README.md").read_text()
        or f"{page.replace('_', '-')}.md" in (PAGES / "README.md").read_text()
    )
