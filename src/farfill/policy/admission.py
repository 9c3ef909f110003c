"""Admission, as a pure machine: which request starts, waits, or is turned away, before anything times out.

In this order: the tenant's rate limits (429), room in the queues (429), then whether its turn would come before its
deadline at the rate work gets done (503: shed at once rather than let it time out). A request holds its share of the
outstanding KV tokens, and of the link's bytes when it goes far, from its start to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from math import inf

import msgspec

from farfill.policy.fair_queue import FairQueue
from farfill.policy.tokens import TokenBucket

RATE_WINDOW_S = 30.0
MAX_TENANTS = 10_000
MIN_RATE_SAMPLES = 8
MAX_RATE_SAMPLES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """`kv_tokens`: prompt and output tokens that may be outstanding together; `link_bytes`: KV bytes on their way."""

    max_running: int = 256
    max_waiting: int = 512
    max_waiting_per_tenant: int = 256
    kv_tokens: float = inf
    link_bytes: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Rates of one tenant ("*" stands for any other); inf: not limited.

    Bursts are `burst_s` seconds of the rate. `weight` is its fair share.
    """

    requests_per_s: float = inf
    tokens_per_s: float = inf
    burst_s: float = 10.0
    weight: float = 1.0


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `deadline_s` is when it must have started; `kv_tokens` prompt and longest output together."""

    request: str
    tenant: str
    kv_tokens: int
    link_bytes: int = 0
    priority: int = 0
    deadline_s: float


class Refusal(StrEnum):
    """Stable: metric label and error code. The status is 429 for what the client can change, else 503."""

    TENANT_REQUESTS = "tenant_requests"
    TENANT_TOKENS = "tenant_tokens"
    TENANT_QUEUE = "tenant_queue_full"
    QUEUE = "queue_full"
    TOO_LARGE = "too_large"
    SHED = "shed"
    DEADLINE = "queue_deadline"

    @property
    def status(self) -> int:
        """HTTP status."""
        if self is Refusal.TOO_LARGE:
            return 400
        return 503 if self in (Refusal.SHED, Refusal.DEADLINE) else 429


class Started(msgspec.Struct, frozen=True):
    """The request may begin now; report its end with `end`."""

    request: str


class Waits(msgspec.Struct, frozen=True):
    """It will start, be refused at its deadline, or be withdrawn with `cancel`."""

    request: str
    expected_s: float


class Refused(msgspec.Struct, frozen=True):
    """It never begins. `retry_after_s` for the header."""

    request: str
    reason: Refusal
    retry_after_s: float


Effect = Started | Waits | Refused


class Admission:
    """Feed it `arrive`, `end`, `cancel` and `tick`; each returns what follows, in order."""

    def __init__(self, limits: AdmissionLimits, tenants: dict[str, TenantLimits] | None = None) -> None:
        self._limits = limits
        self._tenants: dict[str, _Tenant] = {}
        self._settings = dict(tenants or {})
        self._queue: FairQueue[str] = FairQueue()
        self._waiting: dict[str, Arrival] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._running: dict[str, Arrival] = {}
        self._kv_tokens = 0
        self._link_bytes = 0
        self._waiting_tokens = 0
        self._started_s: dict[str, float] = {}
        self._done: deque[_Done] = deque()
        self._shares: dict[str, tuple[float, float]] = {}
        self._default_share = 1.0

    @property
    def running(self) -> int:
        """Requests begun and not ended."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def outstanding(self) -> tuple[int, int]:
        """(KV tokens, link bytes) of running requests."""
        return self._kv_tokens, self._link_bytes

    def configure(self, limits: AdmissionLimits, tenants: dict[str, TenantLimits]) -> None:
        """New limits from now on. Tenants whose limits did not change keep what they have used."""
        self._limits = limits
        self._settings = dict(tenants)
        self._tenants = {n: t for n, t in self._tenants.items() if t.limits == self._settings_of(n)}

    def scale(self, shares: Mapping[str, tuple[float, float]], default: float, now_s: float) -> None:
        """This gateway's parts of tenants' rates (requests, tokens); `default` is that of tenants not named."""
        self._shares, self._default_share = dict(shares), default
        for name, tenant in self._tenants.items():
            tenant.scale(*self._share_of(name), now_s)

    def arrive(self, arrival: Arrival, now_s: float) -> list[Effect]:
        """A request came in. Exactly one effect is about it."""
        if arrival.request in self._running or arrival.request in self._waiting:
            raise ValueError(f"request {arrival.request} arrived already")
        effects = self.tick(now_s)
        refused = self._refuse(arrival, now_s)
        if refused is not None:
            return [*effects, refused]
        self._tenant(arrival.tenant).take(arrival.kv_tokens, now_s)
        if not self._queue and self._fits(arrival):
            return [*effects, self._start(arrival, now_s)]
        expected_s = self._expected_wait_s(now_s)
        weight = self._tenant(arrival.tenant).limits.weight
        self._queue.push(
            arrival.request,
            tenant=arrival.tenant,
            cost=arrival.kv_tokens,
            weight=weight,
            priority=arrival.priority,
        )
        self._waiting[arrival.request] = arrival
        heappush(self._deadlines, (arrival.deadline_s, arrival.request))
        self._waiting_tokens += arrival.kv_tokens
        return [*effects, Waits(arrival.request, expected_s), *self._start_waiting(now_s)]

    def sent(self, request: str, now_s: float) -> list[Effect]:
        """The request's KV has crossed the link (or need not): its link bytes are free for who waits."""
        arrival = self._running.get(request)
        if arrival is None or not arrival.link_bytes:
            return []
        self._link_bytes -= arrival.link_bytes
        self._running[request] = _without_link(arrival)
        return self.tick(now_s)

    def end(self, request: str, now_s: float, *, used_tokens: int | None = None) -> list[Effect]:
        """A running request ended, however. What it did not use of its `kv_tokens` counts for its tenant again."""
        arrival = self._running.pop(request, None)
        if arrival is not None:
            if used_tokens is not None:
                self._tenant(arrival.tenant).give_back(arrival.kv_tokens - used_tokens, 0, now_s)
            self._kv_tokens -= arrival.kv_tokens
            self._link_bytes -= arrival.link_bytes
            seconds = now_s - self._started_s.pop(request)
            if used_tokens is None or used_tokens > 0:  # what did nothing says nothing of how fast things go
                self._done.append(_Done(now_s, arrival.kv_tokens, seconds))
        return self.tick(now_s)

    def cancel(self, request: str, now_s: float) -> list[Effect]:
        """The client left while it waited. Idempotent."""
        self._unqueue(request, now_s)
        return self.tick(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Time passed: refuse what has missed its deadline, start what fits."""
        effects: list[Effect] = []
        if not self._waiting:
            self._deadlines.clear()
            return effects
        while (deadline_s := self.next_deadline_s()) is not None and deadline_s <= now_s:
            request = heappop(self._deadlines)[1]
            self._unqueue(request, now_s)
            effects.append(Refused(request, Refusal.DEADLINE, self._retry_s(now_s)))
        return [*effects, *self._start_waiting(now_s)]

    def next_deadline_s(self) -> float | None:
        """When `tick` has something to refuse, if nothing else happens before."""
        while self._deadlines:
            deadline_s, request = self._deadlines[0]
            arrival = self._waiting.get(request)
            if arrival is not None and arrival.deadline_s == deadline_s:
                return deadline_s
            heappop(self._deadlines)
        return None

    def _refuse(self, arrival: Arrival, now_s: float) -> Refused | None:  # noqa: PLR0911 (one for each reason)
        limits, tenant = self._limits, self._tenant(arrival.tenant)
        if arrival.kv_tokens > limits.kv_tokens or arrival.link_bytes > limits.link_bytes:
            return Refused(arrival.request, Refusal.TOO_LARGE, 0.0)
        limited = tenant.refuses(arrival.kv_tokens, now_s)
        if limited is not None:
            return Refused(arrival.request, limited[0], limited[1])
        if not self._queue and self._fits(arrival):
            return None
        if len(self._queue) >= limits.max_waiting:
            return Refused(arrival.request, Refusal.QUEUE, self._retry_s(now_s))
        if self._queue.waiting_of(arrival.tenant) >= limits.max_waiting_per_tenant:
            return Refused(arrival.request, Refusal.TENANT_QUEUE, self._retry_s(now_s))
        if now_s + self._expected_wait_s(now_s) > arrival.deadline_s:
            return Refused(arrival.request, Refusal.SHED, self._retry_s(now_s))
        return None

    def _fits(self, arrival: Arrival) -> bool:
        limits = self._limits
        if not self._running and limits.max_running:
            return True  # larger than a limit that was lowered while it waited: alone, or it would hold up all others
        return (
            len(self._running) < limits.max_running
            and self._kv_tokens + arrival.kv_tokens <= limits.kv_tokens
            and self._link_bytes + arrival.link_bytes <= limits.link_bytes
        )

    def _start_waiting(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        while (request := self._queue.pop(lambda r: self._fits(self._waiting[r]))) is not None:
            arrival = self._waiting.pop(request)
            self._waiting_tokens -= arrival.kv_tokens
            effects.append(self._start(arrival, now_s))
        return effects

    def _start(self, arrival: Arrival, now_s: float) -> Started:
        self._running[arrival.request] = arrival
        self._started_s[arrival.request] = now_s
        self._kv_tokens += arrival.kv_tokens
        self._link_bytes += arrival.link_bytes
        return Started(arrival.request)

    def _unqueue(self, request: str, now_s: float) -> None:
        """Nothing was done for it, so its tenant gets back what it took."""
        if self._queue.remove(request):
            arrival = self._waiting.pop(request)
            self._waiting_tokens -= arrival.kv_tokens
            self._tenant(arrival.tenant).give_back(arrival.kv_tokens, 1, now_s)

    def _expected_wait_s(self, now_s: float) -> float:
        """Tokens waiting, over the rate at which those that run get done; 0 while too little is known.

        The rate is what one request did a second lately, times how many run: time in which little was asked for must
        not look like slowness.
        """
        done = self._done
        while len(done) > MAX_RATE_SAMPLES or (len(done) > MIN_RATE_SAMPLES and done[0].at_s <= now_s - RATE_WINDOW_S):
            done.popleft()
        tokens = sum(each.tokens for each in done)
        if len(done) < MIN_RATE_SAMPLES or not tokens:
            return 0.0
        return self._waiting_tokens * sum(each.seconds for each in done) / tokens / max(1, len(self._running))

    def _retry_s(self, now_s: float) -> float:
        return min(60.0, max(1.0, self._expected_wait_s(now_s)))

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            settings = self._settings_of(name)
            if settings is _NO_LIMITS:
                return _UNLIMITED
            tenant = _Tenant(settings, *self._share_of(name))
            if tenant.limited:  # of the others there is nothing to remember
                self._tenants[name] = tenant
                if len(self._tenants) > MAX_TENANTS:
                    del self._tenants[next(iter(self._tenants))]
        return tenant

    def _share_of(self, name: str) -> tuple[float, float]:
        return self._shares.get(name, (self._default_share, self._default_share))

    def _settings_of(self, name: str) -> TenantLimits:
        return self._settings.get(name) or self._settings.get("*") or _NO_LIMITS


class _Done(msgspec.Struct, frozen=True):
    at_s: float
    tokens: int
    seconds: float


class _Tenant:
    def __init__(self, limits: TenantLimits, requests_share: float, tokens_share: float) -> None:
        self.limits = limits
        self._requests = _bucket(limits.requests_per_s * requests_share, limits.burst_s)
        self._tokens = _bucket(limits.tokens_per_s * tokens_share, limits.burst_s)

    @property
    def limited(self) -> bool:
        return self._requests is not None or self._tokens is not None

    def scale(self, requests_share: float, tokens_share: float, now_s: float) -> None:
        limits = self.limits
        if self._requests is not None:
            self._requests.resize(*_size(limits.requests_per_s * requests_share, limits.burst_s), now_s)
        if self._tokens is not None:
            self._tokens.resize(*_size(limits.tokens_per_s * tokens_share, limits.burst_s), now_s)

    def refuses(self, tokens: int, now_s: float) -> tuple[Refusal, float] | None:
        if not self.limited:
            return None
        for bucket, cost, reason in (
            (self._requests, 1.0, Refusal.TENANT_REQUESTS),
            (self._tokens, float(tokens), Refusal.TENANT_TOKENS),
        ):
            if bucket is not None and (wait_s := bucket.wait_s(cost, now_s)) > 0:
                return reason, min(3600.0, wait_s)
        return None

    def take(self, tokens: int, now_s: float) -> None:
        if self._requests is not None:
            self._requests.take(1.0, now_s)
        if self._tokens is not None:
            self._tokens.take(float(tokens), now_s)

    def give_back(self, tokens: int, requests: int, now_s: float) -> None:
        if self._requests is not None:
            self._requests.give_back(float(requests), now_s)
        if self._tokens is not None:
            self._tokens.give_back(float(tokens), now_s)


def _bucket(rate_per_s: float, burst_s: float) -> TokenBucket | None:
    return None if rate_per_s == inf else TokenBucket(*_size(rate_per_s, burst_s))


def _size(rate_per_s: float, burst_s: float) -> tuple[float, float]:
    return rate_per_s, max(1.0, rate_per_s * burst_s)


def _without_link(arrival: Arrival) -> Arrival:
    return Arrival(
        request=arrival.request,
        tenant=arrival.tenant,
        kv_tokens=arrival.kv_tokens,
        priority=arrival.priority,
        deadline_s=arrival.deadline_s,
    )


_NO_LIMITS = TenantLimits()
_UNLIMITED = _Tenant(_NO_LIMITS, 1.0, 1.0)
