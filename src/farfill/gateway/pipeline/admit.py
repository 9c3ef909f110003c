"""Who may begin now, who waits for a turn, who is turned away: `policy.admission` with real time and real waiting.

Two gates. `slot` comes before anything is spent on a request and only counts; `turn` comes once its length is known.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from math import inf

from farfill.clock import Clock
from farfill.config.admission import AdmissionConfig, TenantConfig
from farfill.config.model import GatewayConfig
from farfill.core.errors import CapacityError, FarfillError, InvalidRequestError
from farfill.gateway.errors import OverloadedError
from farfill.gateway.observe import PolicyObserver
from farfill.policy.admission import Admission as AdmissionMachine
from farfill.policy.admission import AdmissionLimits, Arrival, Effect, Refusal, Refused, Started, TenantLimits

_TEXTS = {
    Refusal.TENANT_REQUESTS: "this tenant has sent as many requests as it may for now (admission.tenants)",
    Refusal.TENANT_TOKENS: "this tenant has used as many tokens as it may for now (admission.tenants)",
    Refusal.TENANT_QUEUE: "as many requests of this tenant wait as may (admission.max_queue_per_tenant)",
    Refusal.QUEUE: "as many requests wait as may (admission.max_queue)",
    Refusal.TOO_LARGE: "this request alone is more than may be outstanding (admission.max_kv_tokens, max_link_mb)",
    Refusal.SHED: "its turn would come too late; shed at once",
    Refusal.DEADLINE: "its turn did not come in time (admission.queue_timeout_s)",
}


class Turn:
    """A request's turn: waited for with `begin`, held until `end`. Tell what is known of it while it runs."""

    __slots__ = ("_admission", "_arrival", "_came_s", "used_tokens")

    def __init__(self, admission: Admission, arrival: Arrival, came_s: float) -> None:
        self._admission = admission
        self._arrival = arrival
        self._came_s = came_s
        self.used_tokens: int | None = None

    async def begin(self) -> None:
        """Wait for it. Raises OverloadedError (429), CapacityError (503) or InvalidRequestError (400) with the reason;
        there is nothing to end then."""
        await self._admission.wait(self._arrival, self._came_s)

    def sent(self) -> None:
        """Its KV has crossed the link, or need not."""
        if self._arrival.link_bytes:
            self._admission.sent(self._arrival.request)

    def end(self) -> None:
        """It is over, however."""
        self._admission.ended(self._arrival.request, self.used_tokens)


class Admission:
    """Owned by the event loop."""

    def __init__(self, gateway: GatewayConfig, config: AdmissionConfig, clock: Clock, observer: PolicyObserver) -> None:
        self._in_progress = 0
        self._machine = AdmissionMachine(AdmissionLimits())
        self._clock = clock
        self._observer = observer
        self._keys = itertools.count()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.configure(gateway, config)

    def configure(self, gateway: GatewayConfig, config: AdmissionConfig) -> None:
        """New limits from now on; who waits begins when these allow it. Nobody is turned away for them."""
        self._limit = gateway.max_concurrent_requests + config.max_queue
        self._queue_timeout_s = config.queue_timeout_s
        self._machine.configure(
            AdmissionLimits(
                max_running=gateway.max_concurrent_requests,
                max_waiting=config.max_queue,
                max_waiting_per_tenant=config.max_queue_per_tenant,
                kv_tokens=config.max_kv_tokens or inf,
                link_bytes=(config.max_link_mb << 20) or inf,
            ),
            {name: _tenant(tenant) for name, tenant in config.tenants.items()},
        )
        self._apply(self._machine.tick(self._clock.now_s()))

    def share(self, shares: Mapping[str, tuple[float, float]], default: float) -> None:
        """This gateway's parts of the tenants' rates from now on; see `gateway.limits`."""
        self._machine.scale(shares, default, self._clock.now_s())

    @property
    def in_progress(self) -> int:
        """Requests in either gate."""
        return self._in_progress

    def slot(self) -> Admission:
        """Hold it with `with`. Raises OverloadedError (429) when as many requests are in progress, or wait, as may."""
        if self._in_progress >= self._limit:
            raise OverloadedError(
                f"{self._limit} requests are in progress (gateway.max_concurrent_requests, admission.max_queue)"
            )
        return self

    def __enter__(self) -> None:
        self._in_progress += 1

    def __exit__(self, *_: object) -> None:
        self._in_progress -= 1

    def turn(self, *, tenant: str, kv_tokens: int, link_bytes: int, priority: int, deadline_s: float) -> Turn:
        """A turn to `begin`. Lower `priority` goes first."""
        key, came_s = str(next(self._keys)), self._clock.now_s()
        arrival = Arrival(
            request=key,
            tenant=tenant,
            kv_tokens=kv_tokens,
            link_bytes=link_bytes,
            priority=-priority,
            deadline_s=min(deadline_s, came_s + self._queue_timeout_s),
        )
        return Turn(self, arrival, came_s)

    async def wait(self, arrival: Arrival, came_s: float) -> None:
        """For the turn of `arrival`; see `Turn.begin`."""
        key, effects = arrival.request, self._machine.arrive(arrival, came_s)
        if len(effects) == 1 and isinstance(effects[0], Started):  # at once, as nearly always
            self._observer.admission_ended("started", 0.0)
            self._tell()
            return
        begun = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._apply(effects)
        try:
            await begun
        except FarfillError as error:
            self._observer.admission_ended(error.reason, self._clock.now_s() - came_s)
            raise
        except asyncio.CancelledError:
            self._observer.admission_ended("cancelled", self._clock.now_s() - came_s)
            self._withdraw(key)
            raise
        self._observer.admission_ended("started", self._clock.now_s() - came_s)

    def sent(self, key: str) -> None:
        """See `Turn.sent`."""
        self._apply(self._machine.sent(key, self._clock.now_s()))

    def ended(self, key: str, used_tokens: int | None) -> None:
        """See `Turn.end`."""
        self._apply(self._machine.end(key, self._clock.now_s(), used_tokens=used_tokens))

    def _withdraw(self, key: str) -> None:
        """The client left; its turn may have come at the same moment."""
        self._waiting.pop(key, None)
        now_s = self._clock.now_s()
        self._apply([*self._machine.cancel(key, now_s), *self._machine.end(key, now_s, used_tokens=0)])

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            begun = self._waiting.get(effect.request)
            if begun is None or not isinstance(effect, Started | Refused):
                continue
            del self._waiting[effect.request]
            if begun.done():
                continue
            if isinstance(effect, Started):
                begun.set_result(None)
            else:
                begun.set_exception(_error(effect))
        self._tell()

    def _tell(self) -> None:
        kv_tokens, link_bytes = self._machine.outstanding
        self._observer.admission(self._machine.running, self._machine.waiting, kv_tokens, link_bytes)
        if self._timer is not None or self._machine.waiting:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_s = self._machine.next_deadline_s()
        if deadline_s is not None:
            wait_s = max(0.0, deadline_s - self._clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._apply(self._machine.tick(self._clock.now_s()))


def _error(refused: Refused) -> FarfillError:
    reason, text = refused.reason, _TEXTS[refused.reason]
    if reason.status == 400:
        return InvalidRequestError(text, reason=str(reason))
    kind = OverloadedError if reason.status == 429 else CapacityError
    return kind(text, reason=str(reason), retry_after_s=refused.retry_after_s)


def _tenant(config: TenantConfig) -> TenantLimits:
    return TenantLimits(
        requests_per_s=config.requests_per_s or inf,
        tokens_per_s=config.tokens_per_s or inf,
        burst_s=config.burst_s,
        weight=config.weight,
    )
