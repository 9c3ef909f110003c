"""A run: requests come in, policies place them, instances and links take their time, things fail."""

from __future__ import annotations

from farfill.core.cluster import FallbackReason, PlacementReason
from farfill.policy.admission import Admission, AdmissionLimits, Arrival, Effect, Refused, Started, TenantLimits
from farfill.policy.breaker import Outcome
from farfill.policy.prefix import PrefixHits
from farfill.simulator.decode import DecodeServer
from farfill.simulator.gateway import Gateway
from farfill.simulator.kernel import Kernel
from farfill.simulator.monitor import Monitor
from farfill.simulator.prefill import PrefillServer
from farfill.simulator.records import Kept, Records
from farfill.simulator.request import Listeners, Request
from farfill.simulator.scenario import Scenario
from farfill.simulator.sites import Hardware, Server, Site
from farfill.simulator.times import Sizes
from farfill.simulator.traffic import GeneratedTraffic, TraceTraffic, longest_tokens
from farfill.simulator.troubles import Troubles

MAX_FAR_ATTEMPTS = 2
_INF = float("inf")


class World:
    """Everything of one run. `run` once; then read `records`, `monitor`, `hardware`."""

    def __init__(self, scenario: Scenario) -> None:
        file = scenario.file
        self.scenario = scenario
        self.kernel = Kernel()
        self.block_tokens = scenario.trace[0].block_tokens if scenario.trace else scenario.problem.chunk_tokens
        self.total = len(scenario.trace) or file.requests
        self.records = Records(int(self.total * file.warmup))
        self.kept = Kept() if scenario.recorded else None
        told = Listeners(
            prefill_started=self._prefill_started,
            computing=self._computing,
            prefill_finished=self._prefill_finished,
            locally_prefilled=self._kv_ready,
            first_token=self._first_token,
            finished=self._answer_complete,
        )
        self.hardware = Hardware(self.kernel, scenario, self.block_tokens, told)
        self.sizes = Sizes(scenario.problem.kv.bytes_at, longest_tokens(scenario))
        self.gateway = Gateway(self.kernel, scenario, self.hardware, self.sizes, self.block_tokens)
        self._admission = Admission(*_admission(scenario))
        self._waiting: dict[str, Request] = {}
        self._tick_s = _INF
        self._chunk = scenario.problem.chunk_tokens
        self._policies = file.policies
        self._pieces = file.engine.pieces_per_chunk
        self.over = 0
        if scenario.trace:
            self._traffic = TraceTraffic(self.kernel, scenario.trace, scenario.recorded, scenario.paces, self._arrive)
        else:
            self._traffic = GeneratedTraffic(self.kernel, scenario, self.block_tokens, self._arrive)
        self.troubles = Troubles(self)
        self.monitor = Monitor(self)

    @property
    def queued(self) -> int:
        """Requests admission makes wait."""
        return len(self._waiting)

    def run(self) -> None:
        """Until every request has come and ended."""
        self.monitor.begin()
        self.troubles.begin()
        self._traffic.begin()
        self.kernel.run()

    # Arrival and placement

    def _arrive(self, request: Request) -> None:
        self._waiting[request.ident] = request
        now_s = self.kernel.now_s
        arrival = Arrival(
            request=request.ident,
            tenant=request.tenant,
            kv_tokens=request.prompt + request.output,
            deadline_s=now_s + self._policies.admission.deadline_s,
        )
        self._follow(self._admission.arrive(arrival, now_s))

    def _follow(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Started):
                self._dispatch(self._waiting.pop(effect.request))
            elif isinstance(effect, Refused):
                self.records.refused[str(effect.reason)] += 1
                self._over(self._waiting.pop(effect.request))
        if self._waiting:
            deadline_s = self._admission.next_deadline_s()
            if deadline_s is not None and deadline_s < self._tick_s:
                self._tick_s = deadline_s
                self.kernel.at(deadline_s, self._tick)

    def _tick(self, _: None) -> None:
        self._tick_s = _INF
        self._follow(self._admission.tick(self.kernel.now_s))

    def _dispatch(self, request: Request) -> None:
        gateway = self.gateway
        hits = gateway.hits(request)
        decode = gateway.place_decode(request, hits)
        if decode is None:
            self._refuse(request, "no_decode_instance")
            return
        request.decode = decode
        decode.expected[request] = None
        reason, site = gateway.decide(request, decode, hits)
        if not request.attempt:
            self.records.reasons[str(reason)] += 1
        if site is not None:
            server = gateway.place_prefill(request, site, hits)
            if server is not None:
                self._send_far(request, site, server)
                return
            reason = PlacementReason.BREAKER_OPEN
        if request.excluded:
            reason = PlacementReason.NO_PREFILL_INSTANCE
        refused = gateway.may_fall_back(request, reason)
        if refused:
            self._refuse(request, refused)
            return
        if request.budgeted_s >= 0 and not request.fallback:
            request.fallback = str(reason)
        if request.fallback:
            self.records.fallbacks[request.fallback] += 1
        self._prefill_near(request, hits)

    def _send_far(self, request: Request, site: Site, server: PrefillServer) -> None:
        assert site.link is not None
        request.far = site.name
        request.prefill = server
        self.gateway.far_begins(request, server)
        server.expect(request)
        now_s = self.kernel.now_s
        request.sent_s = now_s
        job = (request, request.attempt)
        self.kernel.at(now_s + site.link.rtt_s / 2, server.submit, job)
        self.kernel.at(now_s + self._policies.far_timeout_s, self._far_late, job)

    def _prefill_near(self, request: Request, hits: PrefixHits) -> None:
        request.far = ""
        near, decode = self.hardware.near, request.decode
        if any(s.ready for s in near.prefill):
            server = self.gateway.place_prefill(request, near, hits)
            assert server is not None, "a ready near instance may not be refused"
            request.prefill = server
            server.expect(request)
            server.submit((request, request.attempt))
        elif decode.can_prefill:
            request.prefill = None
            leading = decode.cache.leading(request.keys) * self.block_tokens if request.keys else 0
            request.cached = min(leading, request.prompt - 1)
            request.uncached = max(0, request.prompt - 1 - request.cached)
            decode.prefill(request)
        else:
            self._refuse(request, "no_local_prefill")

    # Prefill, transfer, decode

    def _prefill_started(self, request: Request) -> None:
        if not request.far:
            return
        # KV leaves while prefill runs, from the first chunk's end on; the last chunk and the states leave at its end.
        chunks = max(1.0, request.uncached / self._chunk)
        if chunks > 1:
            first_s = (request.prefill_to_s - request.prefill_from_s) / chunks
            self.kernel.at(request.prefill_from_s + first_s, self._stream, (request, request.attempt))

    def _stream(self, job: tuple[Request, int]) -> None:
        request, attempt = job
        if request.attempt == attempt and request.prefill is not None:
            link = self.hardware.by_name[request.far].link
            assert link is not None
            request.to_send = self._sent_bytes(request)
            request.given = self._early_bytes(request)
            request.flow = link.start(request, request.given, self._early_done)
            self.troubles.flow_started(link, request)

    def _computing(self, request: Request, start: int, end: int, seconds: float) -> None:
        """A piece of a far prompt is being computed: what was computed before leaves, and its own parts (layers) do as
        they come; the last part stays until the piece is complete."""
        if not request.far or request.prefill is None:
            return
        pieces = self._pieces
        self._sends((request, request.attempt, start))
        early = start + (end - start) * (1 - 1 / pieces)
        if pieces > 1:
            self.kernel.at(self.kernel.now_s + seconds / pieces, self._sends, (request, request.attempt, early))

    def _sends(self, job: tuple[Request, int, float]) -> None:
        """KV of its first tokens, as far as decode has none of it, may leave."""
        request, attempt, tokens = job
        if request.attempt != attempt or request.prefill is None:
            return
        if request.to_send < 0:
            request.to_send = self._sent_bytes(request)
        decode: DecodeServer = request.decode
        near = decode.cache.leading(request.keys) * self.block_tokens if request.keys else 0
        size = max(0.0, tokens - near) * self.sizes.per_token - request.given
        if size < 1:
            return
        link = self.hardware.by_name[request.far].link
        assert link is not None
        request.given += size
        if request.flow is not None:
            link.extend(request.flow, size)
            return
        request.flow = link.start(request, size, self._early_done)
        self.troubles.flow_started(link, request)

    def _early_done(self, request: Request) -> None:
        """The link was faster than prefill: what is left comes with the last chunk."""
        request.flow = None

    def _prefill_finished(self, request: Request) -> None:
        server: PrefillServer = request.prefill
        server.forget(request)
        self.monitor.maybe_drained(server)
        self.gateway.cached_at(server.instance.name, request, request.cached)
        if not request.far:
            self._kv_ready(request)
            return
        link = self.hardware.by_name[request.far].link
        assert link is not None
        if request.to_send < 0:
            request.to_send = self._sent_bytes(request)
        left = max(1.0, request.to_send - request.given)
        if request.flow is not None:
            request.flow.done = self._all_sent
            link.extend(request.flow, left)
            return
        request.flow = link.start(request, left, self._all_sent)
        self.troubles.flow_started(link, request)

    def _all_sent(self, request: Request) -> None:
        request.flow = None
        link = self.hardware.by_name[request.far].link
        assert link is not None
        self.kernel.at(self.kernel.now_s + link.rtt_s / 2, self._arrived, (request, request.attempt))

    def _arrived(self, job: tuple[Request, int]) -> None:
        request, attempt = job
        if request.attempt != attempt:
            return
        took_s = self.kernel.now_s - request.sent_s
        self.gateway.far_ended(request, request.prefill, Outcome.SUCCESS, took_s)
        self._kv_ready(request)

    def _kv_ready(self, request: Request) -> None:
        request.prefill = None
        request.decode.join(request)

    def _first_token(self, request: Request) -> None:
        request.first_s = self.kernel.now_s
        if request.budgeted_s >= 0:
            self.gateway.budget.end(request.first_s - request.budgeted_s, 0, request.first_s)
            request.budgeted_s = -1.0
        if request.keys:
            decode: DecodeServer = request.decode
            reported = decode.found_tokens(request, self.block_tokens)
            decode.cache.add(request.keys)
            self.gateway.cached_at(decode.instance.name, request, reported)

    def _answer_complete(self, request: Request) -> None:
        request.decode.expected.pop(request, None)
        self.records.finished(request, self.kernel.now_s)
        if self.kept is not None:
            self.kept.finished(request, self.kernel.now_s)
        self._release(request)
        self._traffic.ended(request)
        self.monitor.maybe_drained(request.decode)

    # What goes wrong

    def _far_late(self, job: tuple[Request, int]) -> None:
        request, attempt = job
        if request.attempt == attempt and request.far and request.prefill is not None:
            self.far_failed(request, FallbackReason.TRANSFER_TIMEOUT)

    def far_failed(self, request: Request, reason: FallbackReason) -> None:
        """Its far prefill or transfer is lost: another far instance, or near within the budget."""
        server: PrefillServer = request.prefill
        link = self.hardware.by_name[request.far].link
        assert link is not None
        if request.flow is not None:
            link.drop(request.flow)
            request.flow = None
        request.attempt += 1
        computed = 0 <= request.prefill_to_s <= self.kernel.now_s
        if not computed:
            server.withdraw(request)
            server.forget(request)
        self.gateway.far_ended(request, server, Outcome.FAILURE, 0.0)
        request.excluded = (*request.excluded, server.instance.name)
        if not request.fallback:
            request.fallback = str(reason)
        self._start_over(request)

    def server_lost(self, server: Server) -> None:
        """An instance died: all that was on it starts over, or ends if its answer has begun."""
        if isinstance(server, PrefillServer):
            for request in server.fail():
                self._prefill_lost(request, server)
            for request in [r for s in self.hardware.near.decode for r in s.expected if r.prefill is server]:
                self._prefill_lost(request, server)  # on its way there, or its KV on its way here
            return
        for request in server.fail():
            self._decode_lost(request)

    def _prefill_lost(self, request: Request, server: PrefillServer) -> None:
        if request.far:
            self.far_failed(request, FallbackReason.PREFILL_LOST)
            return
        server.forget(request)
        request.attempt += 1
        request.fallback = request.fallback or str(FallbackReason.PREFILL_LOST)
        self._start_over(request)

    def _decode_lost(self, request: Request) -> None:
        request.attempt += 1
        if request.prefill is not None:
            self._leave_prefill(request)
        if request.first_s >= 0:
            self.records.failed["decode_lost"] += 1
            self._release(request)
            return
        self._start_over(request)

    def _leave_prefill(self, request: Request) -> None:
        server: PrefillServer = request.prefill
        if request.flow is not None:
            link = self.hardware.by_name[request.far].link
            assert link is not None
            link.drop(request.flow)
            request.flow = None
        if not 0 <= request.prefill_to_s <= self.kernel.now_s:
            server.withdraw(request)
            server.forget(request)
        if request.far:
            self.gateway.far_ended(request, server, Outcome.NEUTRAL, 0.0)

    def _start_over(self, request: Request) -> None:
        request.decode.expected.pop(request, None)
        self._end_budget(request)
        request.prefill = None
        request.far = ""
        request.prefill_from_s = request.prefill_to_s = request.sent_s = request.to_send = -1.0
        request.given = 0.0
        if len(request.excluded) >= MAX_FAR_ATTEMPTS:
            request.excluded = tuple(s.instance.name for site in self.hardware.far for s in site.prefill)
        self._dispatch(request)

    def _refuse(self, request: Request, reason: str) -> None:
        if request.decode is not None:
            request.decode.expected.pop(request, None)
        self.records.refused[reason] += 1
        self._release(request)

    def _release(self, request: Request) -> None:
        self._end_budget(request)
        self._over(request)
        self._follow(self._admission.end(request.ident, self.kernel.now_s))

    def _end_budget(self, request: Request) -> None:
        if request.budgeted_s >= 0:
            self.gateway.budget.end(self.kernel.now_s - request.budgeted_s, 0, self.kernel.now_s)
            request.budgeted_s = -1.0

    def _over(self, request: Request) -> None:
        self.over += 1
        if self.over >= self.total:
            self.kernel.stop()

    def _sent_bytes(self, request: Request) -> float:
        """KV of the prompt beyond what decode has; states always travel."""
        decode: DecodeServer = request.decode
        near = decode.cache.leading(request.keys) * self.block_tokens if request.keys else 0
        return max(self.sizes.fixed, self.sizes.of(request.prompt) - near * self.sizes.per_token)

    def _early_bytes(self, request: Request) -> float:
        rows = request.to_send - self.sizes.fixed
        return max(1.0, rows * (1.0 - self._chunk / request.uncached))


def _admission(scenario: Scenario) -> tuple[AdmissionLimits, dict[str, TenantLimits]]:
    given = scenario.file.policies.admission
    limits = AdmissionLimits(
        max_running=given.max_running,
        max_waiting=given.max_waiting,
        max_waiting_per_tenant=given.max_waiting,
        kv_tokens=given.kv_tokens or _INF,
    )
    if given.tenant_requests_per_s is None:
        return limits, {}
    return limits, {"*": TenantLimits(requests_per_s=given.tenant_requests_per_s)}
