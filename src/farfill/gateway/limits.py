"""Rate limits of API keys, and how much every limit is asked for here, so that gateways can divide it among them.

Each gateway admits its own part of a limit (`policy.shares`); `replicas` tells it which part that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from farfill.clock import Clock
from farfill.gateway.errors import OverloadedError
from farfill.gateway.principal import Principal, RateLimits
from farfill.policy.tokens import TokenBucket

MAX_NAMES = 10_000
MAX_RETRY_S = 3600.0
SMOOTHING = 0.5
FORGOTTEN_BELOW = 1e-3

Shares = Mapping[str, tuple[float, float]]
"""Parts of (requests, tokens) by the limit's name; see `LimitMeter.demand`."""


@dataclass(slots=True)
class _Buckets:
    limits: RateLimits
    requests: TokenBucket | None
    tokens: TokenBucket | None


@dataclass(slots=True)
class Spent:
    """Tokens of one request: `used` is set once it is known."""

    used: int | None = None


class LimitMeter:
    """Owned by the event loop. `refused` hears "key_requests" or "key_tokens"."""

    def __init__(self, clock: Clock, refused: Callable[[str], None] = lambda _: None) -> None:
        self._clock = clock
        self._refused = refused
        self._buckets: dict[str, _Buckets] = {}
        self._shares: Shares = {}
        self._default = 1.0
        self._asked: dict[str, list[float]] = {}
        self._demand: dict[str, tuple[float, float]] = {}
        self._counted_s = clock.now_s()

    def request(self, principal: Principal) -> None:
        """One more request of this key. Raises OverloadedError (429)."""
        limits = principal.limits
        if limits is None or not limits.requests_per_s:
            return
        self._count(principal.name, 0, 1.0)
        bucket, now_s = self._of(principal.name, limits).requests, self._clock.now_s()
        if bucket is not None and not bucket.take(1.0, now_s):
            raise self._refusal("key_requests", bucket.wait_s(1.0, now_s))

    def tokens(self, principal: Principal, tenant: str, tokens: int) -> AbstractContextManager[Spent]:
        """Prompt and longest output of a request; what it does not use counts again. Raises OverloadedError (429)."""
        self._count(f"tenant:{tenant}", 0, 1.0)
        self._count(f"tenant:{tenant}", 1, float(tokens))
        limits = principal.limits
        if limits is None or not limits.tokens_per_s:
            return nullcontext(Spent())
        return self._spending(principal, limits, tokens)

    @contextmanager
    def _spending(self, principal: Principal, limits: RateLimits, tokens: int) -> Iterator[Spent]:
        spent = Spent()
        self._count(principal.name, 1, float(tokens))
        bucket, now_s = self._of(principal.name, limits).tokens, self._clock.now_s()
        if bucket is not None and not bucket.take(float(tokens), now_s):
            raise self._refusal("key_tokens", bucket.wait_s(float(tokens), now_s))
        try:
            yield spent
        finally:
            if bucket is not None:
                bucket.give_back(float(tokens - (spent.used or 0)), self._clock.now_s())

    def share(self, shares: Shares, default: float) -> None:
        """This gateway's parts from now on; `default` is that of limits not named."""
        self._shares, self._default = dict(shares), default
        for name, held in self._buckets.items():
            self._resize(name, held)

    def demand(self) -> dict[str, tuple[float, float]]:
        """Requests and tokens a second that were asked for lately, refused ones included, by limit.

        `key:ID` for keys that have one, `tenant:NAME` for tenants. It looks back to the last call.
        """
        now_s = self._clock.now_s()
        span_s = now_s - self._counted_s
        if span_s <= 0:
            return self._demand
        self._counted_s, asked = now_s, self._asked
        self._asked = {}
        found: dict[str, tuple[float, float]] = {}
        for name in self._demand.keys() | asked.keys():
            before, count = self._demand.get(name, (0.0, 0.0)), asked.get(name, [0.0, 0.0])
            requests, tokens = (
                (1 - SMOOTHING) * old + SMOOTHING * new / span_s for old, new in zip(before, count, strict=True)
            )
            if max(requests, tokens) > FORGOTTEN_BELOW:
                found[name] = requests, tokens
        self._demand = found
        return found

    def _count(self, name: str, kind: int, amount: float) -> None:
        asked = self._asked.get(name)
        if asked is None:
            if len(self._asked) >= MAX_NAMES:
                return
            asked = self._asked[name] = [0.0, 0.0]
        asked[kind] += amount

    def _of(self, name: str, limits: RateLimits) -> _Buckets:
        held = self._buckets.get(name)
        if held is None:
            requests, tokens = self._parts(name, limits)
            held = _Buckets(
                limits,
                TokenBucket(*requests) if limits.requests_per_s else None,
                TokenBucket(*tokens) if limits.tokens_per_s else None,
            )
            self._buckets[name] = held
            if len(self._buckets) > MAX_NAMES:
                del self._buckets[next(iter(self._buckets))]
        elif held.limits != limits:  # the key was changed: what it has used stays used
            held.limits = limits
            self._resize(name, held)
        return held

    def _resize(self, name: str, held: _Buckets) -> None:
        now_s = self._clock.now_s()
        requests, tokens = self._parts(name, held.limits)
        held.requests = _resized(held.requests, held.limits.requests_per_s, requests, now_s)
        held.tokens = _resized(held.tokens, held.limits.tokens_per_s, tokens, now_s)

    def _parts(self, name: str, limits: RateLimits) -> tuple[tuple[float, float], tuple[float, float]]:
        requests, tokens = self._shares.get(name, (self._default, self._default))
        return _size(limits.requests_per_s * requests, limits), _size(limits.tokens_per_s * tokens, limits)

    def _refusal(self, reason: str, wait_s: float) -> OverloadedError:
        self._refused(reason)
        what = "requests" if reason == "key_requests" else "tokens"
        return OverloadedError(
            f"this API key has used as many {what} as it may for now",
            reason=reason,
            retry_after_s=min(MAX_RETRY_S, wait_s),
        )


def _size(rate_per_s: float, limits: RateLimits) -> tuple[float, float]:
    return rate_per_s, max(1.0, rate_per_s * limits.burst_s)


def _resized(
    bucket: TokenBucket | None, whole_rate: float, size: tuple[float, float], now_s: float
) -> TokenBucket | None:
    if not whole_rate:
        return None
    if bucket is None:
        return TokenBucket(*size)
    bucket.resize(*size, now_s)
    return bucket
