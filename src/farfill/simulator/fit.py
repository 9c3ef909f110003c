"""A scenario out of a gateway's recording alone: sites, instances, speeds and link as the recorded requests show them.

What is fitted are parts: seconds of computing by tokens, seconds of a decode step by running sequences, bytes of KV by
tokens, the link's rate; and of each prompt by how much computing it took longer or shorter than that. Never fitted are
the figures a replay is judged by, times to first token and throughput: those come out of the simulated queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np

from farfill.config.admission import AdmissionConfig
from farfill.config.model import GatewayConfig
from farfill.config.routing import RoutingConfig
from farfill.core.cluster import PlacementReason
from farfill.core.errors import ConfigError
from farfill.planner.curves import Floats, QuadraticCurve
from farfill.planner.kv_size import MeasuredKVSize
from farfill.planner.lengths import observed
from farfill.planner.problem import Link, Problem, Site, Workload
from farfill.planner.profile import DecodePoint, Profile
from farfill.planner.trace import read_recording, read_trace_lines
from farfill.simulator.scenario import NEVER, Scenario
from farfill.simulator.scenario_file import (
    AdmissionSection,
    BreakerSection,
    BudgetSection,
    CacheSection,
    EngineShape,
    FleetSection,
    PoliciesSection,
    ScenarioFile,
)
from farfill.wire.recording import RecordedPrefill, RecordedRequest, RecordedTransfer

LEAST_REQUESTS = 8
_UNKNOWN_LINK_BYTES_PER_S = 125e6
_MONITOR_S = 0.5
_UNLIMITED_S = 1e6
_UNLIMITED = 1e12
_PACES = 0.2, 5.0
_WHOLE = 0.9


def scenario_of_recording(path: Path) -> Scenario:
    """Everything from the file. Raises TraceError for broken lines, ConfigError when it says too little."""
    # Who was turned away loaded nothing.
    both = zip(read_recording(path), read_trace_lines(path), strict=True)
    ran = [(r, line) for r, line in both if r.outcome == "ok" or r.placement]
    recorded, lines = [r for r, _ in ran], [line for _, line in ran]
    served = [r for r in recorded if r.outcome == "ok" and r.prefill is not None and r.ttft_s is not None]
    if len(served) < LEAST_REQUESTS:
        raise ConfigError(
            f"{path}: {len(served)} requests ended well, too few to learn from (at least {LEAST_REQUESTS});"
            " record longer, or give a scenario too"
        )
    near = Counter(r.decode_site for r in served).most_common(1)[0][0]
    engine, chunk_tokens = served[-1].engine, served[-1].block_tokens
    prefills = [r.prefill for r in served if r.prefill is not None]
    far = sorted({p.site for p in prefills if p.site != near})
    decodes = sorted({r.decode for r in served})
    near_prefill = sorted({p.instance for p in prefills if p.site == near} - set(decodes))
    sizes = _kv_size(served)
    problem = _problem(served, near, far, sizes)
    file = ScenarioFile(
        plan=path,
        requests=len(lines),
        warmup=0.0,
        monitor_s=_MONITOR_S,
        engine=EngineShape(
            prefill="in_turns" if engine.type == "torch" else "one_by_one",
            step_tokens=min(engine.step_tokens, chunk_tokens),
            pieces_per_chunk=_pieces(served, chunk_tokens),
        ),
        caches=_caches(served, sizes),
        policies=_policies(recorded),
    )
    return Scenario(
        name=path.stem,
        file=file,
        problem=problem,
        fleet=FleetSection(
            near_prefill=len(near_prefill),
            near_decode=len(decodes),
            far={site: len({p.instance for p in prefills if p.site == site}) for site in far},
        ),
        threshold_tokens=served[0].threshold_tokens if far else NEVER,
        rate_per_s=1.0,
        input=observed([line.input_length for line in lines]),
        output=None,
        trace=tuple(lines),
        recorded=tuple(recorded),
        paces=tuple(_pace(r, problem) for r in recorded),
    )


def _policies(recorded: Sequence[RecordedRequest]) -> PoliciesSection:
    """As a cluster file sets them that says nothing of them; but where no breaker was open when it was recorded, none
    opens for slowness now: the simulated latency is what is in question. Nor is a link full that never was: of what it
    carries only the least is known."""
    opened = any(r.reason == str(PlacementReason.BREAKER_OPEN) for r in recorded)
    filled = any(r.reason == str(PlacementReason.LINK_BUSY) for r in recorded)
    routing, gateway, admission = RoutingConfig(), GatewayConfig(site="near"), AdmissionConfig()
    breaker, budget = routing.circuit_breaker, routing.fallback_budget
    return PoliciesSection(
        adapt_threshold=recorded[-1].adaptive,
        research_period_s=routing.threshold_period_s,
        utilisation_target=routing.link_utilisation_target,
        utilisation_limit=routing.link_utilisation_limit if filled else 1.0,
        breaker=BreakerSection(
            error_rate_limit=breaker.error_rate_limit,
            latency_p99_limit_ms=breaker.latency_p99_limit_ms if opened else _UNLIMITED,
            window_s=breaker.window_s,
            min_requests=breaker.min_requests,
            open_s=breaker.open_s,
        ),
        fallback_budget=BudgetSection(
            tokens_per_s=budget.tokens_per_s or _UNLIMITED,
            max_concurrent=budget.max_concurrent,
            itl_limit_ms=budget.itl_limit_ms or _UNLIMITED,
        ),
        admission=AdmissionSection(
            max_running=gateway.max_concurrent_requests,
            max_waiting=admission.max_queue,
            deadline_s=admission.queue_timeout_s,
        ),
    )


def _problem(served: Sequence[RecordedRequest], near: str, far: Sequence[str], sizes: MeasuredKVSize) -> Problem:
    outputs = [r.output_length for r in served]
    inputs = [r.input_length for r in served]
    decode = _decode_points(served)
    return Problem(
        name=served[0].model,
        kv=sizes,
        geometry=None,
        model_dir=None,
        workload=Workload(
            lengths=observed(inputs),
            input_tokens=float(np.mean(inputs)),
            output_tokens=float(max(1.0, np.mean(outputs))),
            context_tokens=float(np.mean(inputs) + np.mean(outputs) / 2),
            requests_per_s=None,
            arrival_scv=1.0,
            source="the recording",
        ),
        near=Site(name=near, profile=_profile(served, near, decode), instances=1, price=1.0),
        far=tuple(
            (Site(name=site, profile=_profile(served, site, ()), instances=1, price=1.0), _link(served, site))
            for site in far
        ),
        tpot_s=_UNLIMITED_S,
        ttft_s=None,
        quantile=0.9,
        headroom=0.0,
        link_utilisation=1.0,
        chunk_tokens=served[-1].block_tokens,
        at_mean_length=False,
    )


def _profile(served: Sequence[RecordedRequest], site: str, decode: tuple[DecodePoint, ...]) -> Profile:
    """Prefill of that site, or of all where it never prefilled."""
    own = [r.prefill for r in served if r.prefill is not None and r.prefill.site == site]
    computed = [p for p in own or [r.prefill for r in served if r.prefill is not None] if p.computed_tokens > 0]
    return Profile(
        name=site,
        accelerator="",
        gpus_per_instance=1,
        prefill=_prefill_curve(computed),
        decode=decode,
        max_batch=served[-1].engine.max_batch,
        sources=(f"{len(computed)} recorded prefills",),
    )


def _prefill_curve(computed: Sequence[RecordedPrefill]) -> QuadraticCurve:
    """Seconds from no token to n; what was cached before was not computed, but attended to."""
    if not computed:
        return QuadraticCurve(0.0, 1e-9, 0.0)
    start = np.array([p.cached_tokens for p in computed], dtype=np.float64)
    end = start + np.array([p.computed_tokens for p in computed], dtype=np.float64)
    features = np.stack([(start == 0).astype(np.float64), end - start, end**2 - start**2], axis=1)
    fixed, linear, square = _nonnegative(features, np.array([p.seconds for p in computed], dtype=np.float64))
    return QuadraticCurve(float(fixed), float(linear), float(square))


def _pace(r: RecordedRequest, problem: Problem) -> float:
    """How many times as long its prompt was computed as the fitted curve says: a machine that others use too is not
    equally fast all the time, and where there are queues a slow hour is not made good by a fast one."""
    if r.prefill is None or r.prefill.computed_tokens <= 0:
        return 1.0
    site = next(s for s in (problem.near, *(far for far, _ in problem.far)) if s.name == r.prefill.site)
    cached, computed = r.prefill.cached_tokens, r.prefill.computed_tokens
    before_s = site.profile.seconds_at(cached) if cached else 0.0
    told_s = site.profile.seconds_at(cached + computed) - before_s
    least, most = _PACES
    return min(most, max(least, r.prefill.seconds / told_s)) if told_s > 0 else 1.0


def _decode_points(served: Sequence[RecordedRequest]) -> tuple[DecodePoint, ...]:
    """A decode step by running sequences: what lies between the tokens of each answer, less the prefill its instance
    did meanwhile, against how many answers ran there on average."""
    running = [r for r in served if r.output_length > 1 and r.tpot_s is not None]
    context = float(np.mean([r.input_length + r.output_length / 2 for r in served]))
    if not running:
        return (DecodePoint(batch=1, context_tokens=context, step_s=1e-3),)
    steps, batches, weights = list[float](), list[float](), list[float]()
    names = {r.decode for r in running}
    beside = {name: _Spans([_decoding(r) for r in running if r.decode == name]) for name in names}
    prompts = {name: [r for r in served if r.prefill is not None and r.prefill.instance == name] for name in names}
    prefills = {name: _Spans([_prefilling(r) for r in found]) for name, found in prompts.items()}
    for r in running:
        begin, end = _decoding(r)
        batch = float(beside[r.decode].within(begin, end).sum()) / (end - begin)
        # Seconds of others' prefill meanwhile, each spread evenly over the time it took.
        stolen = float(prefills[r.decode].shares(begin, end) @ _seconds(prompts[r.decode]))
        steps.append((end - begin - stolen) / (r.output_length - 1))
        batches.append(batch)
        weights.append(float(np.sqrt(r.output_length - 1)))
    weight = np.array(weights)
    features = np.stack([np.ones(len(steps)), np.array(batches)], axis=1) * weight[:, None]
    fixed, each = _nonnegative(features, np.array(steps) * weight)
    most = max(2, served[-1].engine.max_batch)
    return tuple(
        DecodePoint(batch=n, context_tokens=context, step_s=max(1e-6, float(fixed + n * each))) for n in (1, most)
    )


def _decoding(r: RecordedRequest) -> tuple[float, float]:
    assert r.ttft_s is not None
    assert r.tpot_s is not None
    begin = r.timestamp / 1000 + r.ttft_s
    return begin, begin + max(1e-9, r.tpot_s * (r.output_length - 1))


def _prefilling(r: RecordedRequest) -> tuple[float, float]:
    assert r.prefill is not None
    assert r.ttft_s is not None
    came = r.timestamp / 1000
    return came + r.before_s + r.queued_s + r.prefill.queued_s, came + r.ttft_s


def _seconds(prompts: Sequence[RecordedRequest]) -> Floats:
    return np.array([r.prefill.seconds for r in prompts if r.prefill is not None], dtype=np.float64)


class _Spans:
    """Intervals of time."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        both = np.array(spans, dtype=np.float64).reshape(-1, 2)
        self._begins, self._ends = both[:, 0], both[:, 1]

    def within(self, begin: float, end: float) -> Floats:
        """Seconds of each that lie within."""
        return np.maximum(0.0, np.minimum(end, self._ends) - np.maximum(begin, self._begins))

    def shares(self, begin: float, end: float) -> Floats:
        """The part of each that lies within."""
        return self.within(begin, end) / np.maximum(1e-9, self._ends - self._begins)


def _kv_size(served: Sequence[RecordedRequest]) -> MeasuredKVSize:
    """Bytes on the wire by tokens that were sent: a straight line. Where decode had a part of the KV less was sent;
    such transfers say nothing of the size, and are those that lie well below the line of the others."""
    sent = [(r.input_length - 1, t.wire_bytes) for r in served if (t := r.transfer) is not None and t.wire_bytes]
    if not sent:
        return MeasuredKVSize(((1.0, 1.0), (2.0, 2.0)))
    while True:
        tokens = np.array([n for n, _ in sent], dtype=np.float64)
        features = np.stack([np.ones(len(sent)), tokens], axis=1)
        fixed, each = _nonnegative(features, np.array([size for _, size in sent], dtype=np.float64))
        whole = [(n, size) for n, size in sent if size >= _WHOLE * (fixed + each * n)]
        if len(whole) in (0, len(sent)):
            break
        sent = whole
    return MeasuredKVSize(((1.0, float(fixed + each)), (100_001.0, float(fixed + 100_001 * each))))


def _link(served: Sequence[RecordedRequest], site: str) -> Link:
    """The upper quartile of what senders measured, or the most it was seen to carry where that is more: a sender that
    waits for prefill sees less than there is. One that was never measured is taken for 1 Gbit/s."""
    sent = [
        (r, r.transfer) for r in served if r.transfer is not None and r.prefill is not None and r.prefill.site == site
    ]
    rates = [t.link_bytes_per_s for _, t in sent if t.link_bytes_per_s > 0] or [_UNKNOWN_LINK_BYTES_PER_S]
    measured = float(np.quantile(rates, 0.75))
    return Link(bytes_per_s=max(measured, _carried(sent)), rtt_s=_median((t.link_rtt_s for _, t in sent), 0.0))


def _carried(sent: Sequence[tuple[RecordedRequest, RecordedTransfer]]) -> float:
    """The most bytes/s, of all transfers together, while one of them was under way; each spread over its time."""
    spans: list[tuple[float, float]] = []
    for r, transfer in sent:
        assert r.ttft_s is not None
        end = r.timestamp / 1000 + r.ttft_s
        spans.append((end - max(1e-6, transfer.seconds), end))
    sizes = np.array([transfer.wire_bytes for _, transfer in sent], dtype=np.float64)
    together = _Spans(spans)
    return max((float(together.shares(begin, end) @ sizes) / (end - begin) for begin, end in spans), default=0.0)


def _pieces(served: Sequence[RecordedRequest], chunk_tokens: int) -> int:
    def per_chunk(transfer: RecordedTransfer, prefill: RecordedPrefill) -> float:
        return transfer.pieces / max(1, -(-(prefill.computed_tokens + prefill.cached_tokens) // chunk_tokens))

    found = [per_chunk(r.transfer, r.prefill) for r in served if r.transfer is not None and r.prefill is not None]
    return min(1000, max(1, round(_median(found, 1.0))))


def _caches(served: Sequence[RecordedRequest], sizes: MeasuredKVSize) -> CacheSection:
    """As many tokens as the prefix cache's megabytes hold, where bytes per token were seen."""
    raw = [t.raw_bytes / t.wire_bytes for r in served if (t := r.transfer) is not None and t.wire_bytes]
    megabytes = served[-1].engine.prefix_cache_mb
    if not megabytes:
        return CacheSection(decode_tokens=0, prefill_tokens=0)
    if not raw:
        return CacheSection()
    per_token = (sizes.bytes_at(100_001) - sizes.bytes_at(1)) / 100_000 * median(raw)
    tokens = int(megabytes * 2**20 / max(1e-9, per_token))
    return CacheSection(decode_tokens=tokens, prefill_tokens=tokens)


def _median(values: Iterable[float], otherwise: float) -> float:
    known = [value for value in values if value > 0]
    return median(known) if known else otherwise


def _nonnegative(features: Floats, values: Floats) -> Floats:
    """Least squares with no coefficient below 0: the best of all choices of features. Few features only."""
    count = features.shape[1]
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    best, least = np.zeros(count), float(np.sum(values**2))
    solve: Callable[[list[int]], Floats] = lambda chosen: np.linalg.lstsq(  # noqa: E731
        features[:, chosen] / scale[chosen], values, rcond=None
    )[0]
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            found = solve(list(chosen))
            if float(found.min()) < 0:
                continue
            missed = values - (features[:, list(chosen)] / scale[list(chosen)]) @ found
            error = float(np.sum(missed**2))
            if error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = found / scale[list(chosen)]
    return best
