"""An hour of traffic on a virtual clock, through the placement code of a real gateway, with its decision log on.

Bursts, conversations, far sites that fail or ask for a pause, workers that restart, shares and a cluster file that
change: everything that moves a decision. Drawn from one seed, so that two runs see the same.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from farfill.clock import VirtualClock
from farfill.config.model import ClusterConfig
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.core.errors import FarfillError
from farfill.gateway.decisions import DecisionTrail
from farfill.gateway.observe import SilentPolicyObserver
from farfill.gateway.pipeline.place import Placed, PlacementQuery
from farfill.gateway.service import GatewayDeps, GatewayService, build_service
from farfill.gateway.tokenizer import load_tokenizer
from farfill.policy.breaker import Outcome
from farfill.registry.records import RolloutRecord
from farfill.wire.control import PrefillReport
from support.gateway_harness import make_config
from support.stub_worker import REPORT, sign_stub_ticket, start_event
from support.tiny_tokenizer import write_model_folder

HOUR_S = 3600.0
CHUNK_TOKENS = 256
THRESHOLD_TOKENS = 2048
MODEL = "tiny"
SITES = ("far", "other")
KV_BYTES_PER_TOKEN = 40_000
LINK_BYTES_PER_S = {"far": 250e6, "other": 120e6}
PREFILL_S_PER_TOKEN = {"far": 1 / 9000, "other": 1 / 6000}
NEAR_S_PER_TOKEN = 1 / 1000
WRITER_ROOM = 4096


def hour_config(folder: Path, *, log: Path, threshold_tokens: int = THRESHOLD_TOKENS) -> ClusterConfig:
    """Searched threshold, breakers that open soon, a fallback budget that runs out, tenants with shares."""
    return make_config(
        folder,
        gateway={"site": "near", "decision_log": log},
        prefill={"chunked_prefill_tokens": CHUNK_TOKENS},
        routing={
            "remote_prefill_threshold_tokens": threshold_tokens,
            "threshold": "auto",
            "threshold_min_tokens": 512,
            "threshold_max_tokens": 32_768,
            "circuit_breaker": {"min_requests": 5, "window_s": 20.0, "open_s": 15.0, "half_open_probes": 2},
            "fallback_budget": {"tokens_per_s": 4000.0, "burst_s": 5.0, "max_concurrent": 6, "itl_limit_ms": 120.0},
            "placement": {"picker": "spread"},
        },
        admission={"tenants": {"batch": {"max_share": 0.5}}},
    )


@dataclass
class Workers:
    """Who is alive; a tuple of its own after each change, as the registry's watcher gives."""

    _live: tuple[Instance, ...] = ()

    def __post_init__(self) -> None:
        near = [_instance(f"d{i}", Role.DECODE, "near") for i in range(3)]
        far = [_instance(f"{site}-{i}", Role.PREFILL, site) for site in SITES for i in range(2)]
        self._live = (*near, *far)

    def instances(self) -> tuple[Instance, ...]:
        return self._live

    def change(self, name: str, **changes: object) -> None:
        """One worker announced something."""
        self._live = tuple(dataclasses.replace(i, **changes) if i.name == name else i for i in self._live)


class _Drops(SilentPolicyObserver):
    count = 0

    def decisions_dropped(self, count: int) -> None:
        self.count += count


@dataclass
class RecordedHour:
    """`run` it once. `decided` is what was recorded, by policy; `outcomes` the reasons and refusals of requests."""

    folder: Path
    seed: int
    max_log_bytes: int
    decided: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self.log = self.folder / "decisions.jsonl"
        self._rng = random.Random(self.seed)
        self._clock = VirtualClock()
        self._workers = Workers()
        self._drops = _Drops()
        model = write_model_folder(self.folder / "model", context_tokens=65_536)
        self._config = hour_config(model, log=self.log)
        self._service: GatewayService = build_service(
            GatewayDeps(
                config=self._config,
                model=load_tokenizer(model),
                membership=self._workers,
                sign_ticket=sign_stub_ticket,
                worker_tls=None,
                clock=self._clock,
                policies=self._drops,
            )
        )
        self._prefixes = self._service.dispatcher.legs.prefixes
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._failing: dict[str, Outcome] = {}
        self._conversations: dict[str, int] = {}

    def run(self) -> None:
        """The hour, and everything written."""
        decision_log = self._service.decision_log
        assert decision_log is not None
        decision_log._max_bytes = self.max_log_bytes
        decision_log.start()
        try:
            self._schedule()
            while self._events and self._events[0][0] < HOUR_S:
                at_s, _, event = heapq.heappop(self._events)
                self._clock.advance(at_s - self._clock.now_s())
                event()
                while decision_log._waiting.qsize() > WRITER_ROOM:  # virtual time is faster than a disk
                    time.sleep(0.001)
        finally:
            decision_log.close()
            self._service.pool.close()
            self._service.renderer.loader.close()
        assert self._drops.count == 0

    def _at(self, at_s: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    def _schedule(self) -> None:
        at_s, number = 0.0, 0
        while at_s < HOUR_S:
            burst = at_s % 600.0 < 45.0
            at_s += self._rng.expovariate(6.0 if burst else 0.6)
            self._at(at_s, lambda number=number: self._arrive(number))
            number += 1
        for minute, event in (
            (4, lambda: self._shares((MODEL, "*", 1.0))),
            (8, lambda: self._shares((MODEL, "*", 50.0), (MODEL, "batch", 10.0))),
            (12, lambda: self._shares((MODEL, "*", 100.0))),
            (19.5, lambda: self._fails("far", Outcome.FAILURE)),
            (22, lambda: self._fails("other", Outcome.FAILURE)),
            (25, lambda: self._fails("other", None)),
            (27, lambda: self._fails("far", None)),
            (29.5, lambda: self._fails("other", Outcome.OVERLOAD)),
            (31, lambda: self._fails("other", None)),
            (33, lambda: self._shares((MODEL, "*", 0.0))),
            (36, lambda: self._shares((MODEL, "*", 100.0))),
            (40, lambda: self._workers.change("d1", state=InstanceState.DRAINING)),
            (42, lambda: self._workers.change("d1", state=InstanceState.READY, generation="2")),
            (45, lambda: [self._workers.change(f"{s}-{i}", fingerprint="new") for s in SITES for i in range(2)]),
            (48, lambda: [self._workers.change(f"d{i}", fingerprint="new", generation="3") for i in range(3)]),
            (52, lambda: self._service.reloader.apply(self._changed_config())),
        ):
            self._at(60.0 * minute, event)

    def _changed_config(self) -> ClusterConfig:
        return hour_config(self._config.model.path, log=self.log, threshold_tokens=8192)

    def _shares(self, *shares: tuple[str, str, float]) -> None:
        self._service.rollout.use(
            {
                (model, tenant): RolloutRecord(
                    percent=percent,
                    sticky="session" if tenant == "*" else "request",
                    salt="s",
                    version=len(shares),
                    author="test",
                    reason="",
                    unix_s=self._clock.unix_s(),
                )
                for model, tenant, percent in shares
            }
        )

    def _fails(self, site: str, outcome: Outcome | None) -> None:
        if outcome is None:
            self._failing.pop(site, None)
        else:
            self._failing[site] = outcome

    def _arrive(self, number: int) -> None:
        rng, service = self._rng, self._service
        session = f"s{rng.randrange(60)}"
        # A conversation grows until it begins anew.
        before = self._conversations.get(session, 0)
        tokens = before + int(rng.lognormvariate(7.0, 1.2)) + 16
        if tokens > 40_000:
            tokens = 400
        self._conversations[session] = tokens
        query = PlacementQuery(
            request_id=f"r{number}",
            tenant=rng.choice(("default", "default", "batch")),
            session=session,
            keys=[f"{session}/{i}".encode() for i in range(tokens // CHUNK_TOKENS)],
            prompt_tokens=tokens,
            total_tokens=tokens + 300,
            forced=None,
        )
        for name in ("d0", "d1", "d2"):
            if rng.random() < 0.05:
                self._workers.change(name, queued_tokens=rng.randrange(20_000), running_requests=rng.randrange(16))
        trail = DecisionTrail(query.request_id, self._clock.unix_s())
        try:
            placed = service.placer.place(query, trail=trail)
            self.outcomes[str(placed.placement.reason)] += 1
            self._serve(query, placed)
        except FarfillError as error:
            self.outcomes[error.reason] += 1
        self.decided.update(each.policy for each in trail.decisions)
        assert service.decision_log is not None
        service.decision_log.add(trail.decisions)

    def _serve(self, query: PlacementQuery, placed: Placed) -> None:
        """What follows from the placement, when it is over."""
        service, rng = self._service, self._rng
        placement, prefill, now_s = placed.placement, placed.placement.prefill, self._clock.now_s()
        service.fallback.token_gap(rng.uniform(0.01, 0.25 if self._failing else 0.06), now_s)
        claim = service.work.begin(placement.decode, placement.uncached_tokens, query.tenant)
        if prefill is None:
            took_s = placement.uncached_tokens * NEAR_S_PER_TOKEN
            start = start_event(query.prompt_tokens, "local", "none", placed.hit_tokens)
            start.computed_tokens, start.prefill_s = placement.uncached_tokens, took_s

            def ended() -> None:
                claim.end()
                service.links.near_ended(start)
                self._prefixes.computed(placement.decode.name, query.keys, placed.hit_tokens)
                if placed.grant is not None:
                    placed.grant.end(placement.uncached_tokens)

            self._at(now_s + took_s, ended)
            return
        trial = service.health.begin(prefill, placement.uncached_tokens)
        far_claim = service.work.begin(prefill, placement.uncached_tokens, query.tenant)
        outcome = self._failing.get(prefill.site, Outcome.SUCCESS)
        report = _report(query, placed, prefill, rng)

        def far_ended() -> None:
            claim.end()
            far_claim.end()
            service.health.end(trial, outcome, of_the_way=True, retry_after_s=20.0)
            if outcome is Outcome.SUCCESS:
                service.links.far_ended(prefill, query.prompt_tokens, report)
                for name in (placement.decode.name, prefill.name):
                    self._prefixes.computed(name, query.keys, placed.far_hit_tokens)

        self._at(now_s + report.prefill_s + report.transfer_s, far_ended)


def _report(query: PlacementQuery, placed: Placed, prefill: Instance, rng: random.Random) -> PrefillReport:
    computed = max(1, query.prompt_tokens - 1 - placed.far_hit_tokens)
    wire_bytes = (query.prompt_tokens - 1) * KV_BYTES_PER_TOKEN
    rate = LINK_BYTES_PER_S[prefill.site] * rng.uniform(0.8, 1.1)
    fields = {name: getattr(REPORT, name) for name in PrefillReport.__struct_fields__}
    return PrefillReport(
        **{
            **fields,
            "computed_tokens": computed,
            "cached_tokens": placed.far_hit_tokens,
            "prefill_s": computed * PREFILL_S_PER_TOKEN[prefill.site],
            "transfer_s": wire_bytes / rate,
            "wire_bytes": wire_bytes,
            "link_bytes_per_s": rate,
            "link_rtt_s": 0.02,
        }
    )


def _instance(name: str, role: Role, site: str) -> Instance:
    return Instance(
        name=name,
        role=role,
        site=site,
        url=f"https://{name}:1",
        transfer_address="" if role is Role.PREFILL else f"{name}:2",
        model=MODEL,
        fingerprint="fp",
        generation="1",
        state=InstanceState.READY,
        max_context_tokens=65_536,
        kv_total_bytes=16 << 30,
    )
