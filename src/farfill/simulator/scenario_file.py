"""The scenario file: a plan file brought to life with traffic, events and policies."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from farfill.planner.inputs import Section
from farfill.planner.plan_file import InputLengths


class FleetSection(Section):
    near_prefill: int = Field(ge=0, examples=[3], description="Prefill instances at the near site.")
    near_decode: int = Field(ge=1, examples=[5], description="Decode instances at the near site.")
    far: dict[str, int] = Field(default={}, description="Prefill instances of each far site.")


class SessionsSection(Section):
    turns: float = Field(default=4.0, ge=1, description="Mean number of requests of one conversation (geometric).")
    share: float = Field(default=1.0, gt=0, le=1, description="Users who converse; the others ask once.")
    think_s: float = Field(default=30.0, ge=0, description="Mean pause between an answer and the next request.")


class SharedPrefixSection(Section):
    tokens: int = Field(ge=1, examples=[2048], description="Tokens that prompts of a group begin with.")
    groups: int = Field(default=1, ge=1, description="How many such prefixes; popular ones come more often (1/rank).")


class LoadPoint(Section):
    at_s: float = Field(ge=0, description="When.")
    factor: float = Field(gt=0, description="Times the mean rate; straight lines between points.")


class TrafficSection(Section):
    requests_per_s: float | None = Field(default=None, gt=0, description="Mean rate; unset: the baseline's or plan's.")
    arrivals: Literal["poisson", "gamma", "mmpp", "even"] | None = Field(
        default=None,
        description="Gaps: exponential; gamma with `scv`; Poisson in bursts and calms; all equal; unset: as uneven as"
        " the plan's arrival_scv.",
    )
    scv: float = Field(default=4.0, gt=0, le=1000, description="gamma: squared coefficient of variation of gaps.")
    burst_factor: float = Field(default=4.0, gt=1, le=1000, description="mmpp: rate in bursts over that in calms.")
    burst_s: float = Field(default=20.0, gt=0, description="mmpp: mean length of a burst.")
    calm_s: float = Field(default=80.0, gt=0, description="mmpp: mean length of a calm.")
    input: InputLengths | None = Field(default=None, description="New tokens of each prompt; unset: the plan's.")
    output: InputLengths | None = Field(default=None, description="Output tokens; unset: always the plan's mean.")
    sessions: SessionsSection | None = Field(default=None, description="Conversations; unset: single requests.")
    shared_prefix: SharedPrefixSection | None = Field(default=None, description="System prompts; unset: none.")
    tenants: int = Field(default=1, ge=1, le=10_000, description="Tenants, equally likely.")
    load: list[LoadPoint] = Field(default=[], description="How the rate swings; unset: not at all.")
    load_period_s: float | None = Field(default=None, gt=0, description="After so long the swing begins anew.")


class LinkShape(Section):
    loss: float = Field(default=0.0, ge=0, lt=1, description="Share of packets lost.")
    connections: int = Field(default=8, ge=1, description="TCP connections transfers are spread over.")
    congestion: Literal["bbr", "cubic"] = Field(default="bbr", description="cubic: loss also limits the rate.")
    fluctuation: float = Field(default=0.0, ge=0, lt=1, description="Standard deviation of the rate, as a share of it.")
    fluctuation_s: float = Field(default=10.0, gt=0, description="How often the rate is drawn anew.")


class EventSection(Section):
    at_s: float = Field(ge=0, examples=[60], description="When it happens.")
    for_s: float | None = Field(default=None, gt=0, description="When it is over; unset: never.")
    instance: str | None = Field(default=None, description="This instance dies (SITE-prefill-N, SITE-decode-N).")
    link: str | None = Field(default=None, description="The link from this site changes.")
    factor: float = Field(default=0.0, ge=0, le=10, description="link: carries so much of its rate; 0: cut.")


class FailuresSection(Section):
    mean_up_s: float = Field(gt=0, examples=[86400], description="Mean time until an instance dies.")
    repair_s: float = Field(default=120.0, gt=0, description="Mean time until it is back.")


class BreakerSection(Section):
    error_rate_limit: float = Field(default=0.1, gt=0, le=1, description="routing.circuit_breaker of the cluster.")
    latency_p99_limit_ms: float = Field(default=30_000.0, gt=0, description="How far p99 may exceed the estimate.")
    window_s: float = Field(default=60.0, gt=0, description="Window.")
    min_requests: int = Field(default=5, ge=1, description="Fewer requests open nothing.")
    open_s: float = Field(default=15.0, gt=0, description="How long it stays open.")


class BudgetSection(Section):
    tokens_per_s: float = Field(default=20_000.0, ge=0, description="Local prefill that may stand in for far.")
    max_concurrent: int = Field(default=8, ge=0, description="Of those at a time.")
    itl_limit_ms: float = Field(default=250.0, gt=0, description="While tokens come slower nothing falls back.")


class AdmissionSection(Section):
    max_running: int = Field(default=100_000, ge=1, description="Requests under way.")
    max_waiting: int = Field(default=10_000, ge=0, description="Requests in the queue.")
    kv_tokens: float | None = Field(default=None, gt=0, description="Outstanding prompt and output tokens.")
    deadline_s: float = Field(default=120.0, gt=0, description="Longest wait in the queue.")
    tenant_requests_per_s: float | None = Field(default=None, gt=0, description="Limit of each tenant.")


class RolloutSection(Section):
    percent: float = Field(default=100.0, ge=0, le=100, description="Share of requests that may go far at first.")
    automatic: bool = Field(default=False, description="Guards raise the share step by step, or take it back.")
    min_step_s: float = Field(default=300.0, ge=0, description="Shortest step.")
    min_requests: int = Field(default=100, ge=1, description="Fewest far prefills of a step.")


class PoliciesSection(Section):
    threshold_tokens: int | None = Field(default=None, ge=0, description="Unset: the plan's.")
    adapt_threshold: bool = Field(default=True, description="Search it again under pressure.")
    surge_queue_s: float = Field(default=2.0, gt=0, description="Far or near queue that asks for a search.")
    research_period_s: float = Field(default=5.0, gt=0, description="At most one search in this time.")
    window_lengths: int = Field(default=2048, ge=16, le=100_000, description="Recent prompts a search looks at.")
    utilisation_target: float | None = Field(
        default=None, gt=0, le=1, description="What a search lets far prefill fill a link to; unset: the plan's."
    )
    utilisation_limit: float = Field(default=0.95, gt=0, le=1, description="A fuller link takes no more.")
    decode_weights: dict[str, float] = Field(default={}, description="Scorers of decode; unset: the defaults.")
    prefill_weights: dict[str, float] = Field(default={}, description="Scorers of prefill; unset: the defaults.")
    knows: Literal["outstanding", "exact"] = Field(
        default="outstanding", description="What placement sees of queues: what it gave them, or also their progress."
    )
    far_timeout_s: float = Field(default=120.0, gt=0, description="A far prefill that takes longer is given up.")
    link_lost_s: float = Field(default=5.0, gt=0, description="Transfers over a cut link fail after this time.")
    breaker: BreakerSection = BreakerSection()
    fallback_budget: BudgetSection = BudgetSection()
    admission: AdmissionSection = AdmissionSection()
    rollout: RolloutSection = RolloutSection()
    index_blocks: int = Field(default=1_000_000, ge=2, description="Bound of the prefix index.")


class EngineShape(Section):
    prefill: Literal["one_by_one", "in_turns"] = Field(
        default="one_by_one",
        description="How an instance computes several prompts; in_turns: a chunk of each, as the embedded engine does.",
    )
    step_tokens: int = Field(
        default=0, ge=0, description="in_turns: tokens of a chunk between two decode steps; 0: the whole chunk."
    )
    pieces_per_chunk: int = Field(
        default=1, ge=1, le=1000, description="in_turns: KV of a chunk leaves in so many parts (layers)."
    )


class CacheSection(Section):
    decode_tokens: int = Field(default=2_000_000, ge=0, description="Prefix cache of each decode instance.")
    prefill_tokens: int = Field(default=2_000_000, ge=0, description="Prefix cache of each prefill instance.")


class ScalingRole(Section):
    minimum: int = Field(ge=0, examples=[1], description="Fewest instances.")
    maximum: int = Field(ge=0, examples=[8], description="Most instances.")
    price: float = Field(default=1.0, ge=0, description="Of one instance for an hour.")


_CLOCK = r"^([01]\d|2[0-3]):[0-5]\d$"


class ScalingSchedule(Section):
    group: str = Field(examples=["far/prefill"], description="SITE/ROLE, one of roles.")
    start: str = Field(pattern=_CLOCK, examples=["22:00"], description="From then on; a run begins at 00:00.")
    end: str = Field(pattern=_CLOCK, examples=["06:00"], description="Until then; the next day if that is earlier.")
    minimum: int = Field(ge=0, examples=[4], description="Fewest instances meanwhile.")
    maximum: int = Field(ge=0, examples=[16], description="Most instances meanwhile.")


class ScalingSection(Section):
    roles: dict[str, ScalingRole] = Field(
        min_length=1, examples=["{near/decode: {minimum: 1, maximum: 8}}"], description="By SITE/ROLE."
    )
    period_s: float = Field(default=30.0, gt=0, description="How often is decided.")
    start_s: float = Field(default=120.0, ge=0, description="How long a new instance takes to be ready.")
    schedules: list[ScalingSchedule] = Field(default=[], description="Other bounds by the time of day.")
    convert: list[str] = Field(default=[], description="Sites whose instances may change their role.")
    target: float = Field(default=0.7, gt=0, lt=1, description="Utilisation to size for.")
    out_above: float = Field(default=0.85, gt=0, le=1, description="Utilisation that adds instances.")
    in_below: float = Field(default=0.5, gt=0, lt=1, description="Utilisation that takes some away.")
    cooldown_out_s: float = Field(default=60.0, ge=0, description="Between two additions.")
    cooldown_in_s: float = Field(default=300.0, ge=0, description="Low load must last so long.")
    price_limit: float | None = Field(default=None, gt=0, description="Most that all may cost in an hour.")


class ScenarioFile(Section):
    version: Literal[1] = Field(default=1, description="Version of this file's format.")
    plan: Path = Field(examples=["plan.yaml"], description="Plan file: model, lengths, sites, profiles, links, SLO.")
    baseline: Path | None = Field(
        default=None, description="What `farfill plan capacity --baseline` wrote: instances, threshold and rate."
    )
    seed: int = Field(default=1, ge=0, description="Same seed, same result.")
    requests: int = Field(default=10_000, ge=1, le=100_000_000, description="How many come.")
    warmup: float = Field(default=0.05, ge=0, lt=1, description="Share of the first requests that is not counted.")
    fleet: FleetSection | None = Field(default=None, description="Instances; unset: the baseline's, or planned now.")
    traffic: TrafficSection = TrafficSection()
    links: dict[str, LinkShape] = Field(default={}, description="How the link from each far site behaves.")
    events: list[EventSection] = Field(default=[], description="Failures and cuts by the clock.")
    failures: FailuresSection | None = Field(default=None, description="Instances that die at random; unset: none.")
    engine: EngineShape = EngineShape()
    caches: CacheSection = CacheSection()
    policies: PoliciesSection = PoliciesSection()
    autoscale: ScalingSection | None = Field(default=None, description="Instance counts that follow the load.")
    monitor_s: float = Field(default=1.0, gt=0, description="How often utilisation and queues are looked at.")
