"""Breakers of prefill instances and far sites, latency estimates, and which decode instances cannot be reached.

A restarted worker (another generation) starts with a clean record. What other gateways saw is merged in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from farfill.clock import Clock
from farfill.config.routing import CircuitBreakerConfig
from farfill.core.cluster import Instance
from farfill.gateway.observe import GatewayObserver
from farfill.policy.breaker import BreakerLimits, BreakerState, CircuitBreaker, Outcome
from farfill.policy.breaker_share import BreakerSnapshot
from farfill.policy.estimate import PrefillEstimator

log = structlog.get_logger("farfill.gateway")


@dataclass(slots=True)
class _Track:
    instance: Instance
    breaker: CircuitBreaker
    estimator: PrefillEstimator
    told: BreakerState = BreakerState.CLOSED


@dataclass(frozen=True, slots=True)
class Trial:
    """One far prefill in progress; hand it back with its outcome."""

    track: _Track
    probe: bool
    site: CircuitBreaker
    site_probe: bool
    tokens: int
    began_s: float


class DecodeReach:
    """Decode instances to which the last connection failed. Owned by the event loop.

    A mark lasts one lease of the registry: by then it has dropped a worker that is gone, and one that is still
    listed deserves another try. A restarted worker has no mark.
    """

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._until_s: dict[tuple[str, str], float] = {}

    def tried(self, instance: Instance, *, reached: bool) -> None:
        """How connecting to `instance` went."""
        now_s = self._clock.now_s()
        self._until_s = {key: until_s for key, until_s in self._until_s.items() if until_s > now_s}
        key = (instance.name, instance.generation)
        if reached:
            self._until_s.pop(key, None)
        else:
            self._until_s[key] = now_s + self._lease_s

    def lost(self, instance: Instance) -> bool:
        """Whether `instance` could not be reached a moment ago."""
        if not self._until_s:
            return False
        return self._until_s.get((instance.name, instance.generation), 0.0) > self._clock.now_s()


class PrefillHealth:
    """Owned by the event loop."""

    def __init__(self, config: CircuitBreakerConfig, clock: Clock, observer: GatewayObserver) -> None:
        self._limits = _limits(config, config.error_rate_limit)
        self._site_limits = _limits(config, config.site_error_rate_limit)
        self._clock = clock
        self._observer = observer
        self._lost: Callable[[Instance], bool] = lambda _: False
        self._tracks: dict[str, _Track] = {}
        self._sites: dict[str, CircuitBreaker] = {}

    def follow(self, lost: Callable[[Instance], bool]) -> None:
        """Instances that are `lost` are let nothing through either."""
        self._lost = lost

    def reach_changed(self, instance: Instance, lost: bool) -> None:
        """It counts as unreachable from now on, or no longer; shown like an open breaker."""
        self._observer.breaker_changed(instance, BreakerState.OPEN if lost else self.state(instance))

    def allows(self, instance: Instance) -> bool:
        """Whether `instance` can be reached and its breaker lets a request through now."""
        return not self._lost(instance) and self._track(instance).breaker.allows(self._clock.now_s())

    def overloaded(self, instance: Instance) -> bool:
        """Whether it is kept from requests only because it asked for a pause."""
        now_s, breaker = self._clock.now_s(), self._track(instance).breaker
        return breaker.state(now_s) is BreakerState.CLOSED and breaker.overloaded_s(now_s) > 0

    def site_allows(self, site: str) -> bool:
        """Whether the breaker of a whole far site lets a request through now."""
        return self._site(site).allows(self._clock.now_s())

    def state(self, instance: Instance) -> BreakerState:
        """The breaker's state, for people and metrics."""
        return self._track(instance).breaker.state(self._clock.now_s())

    def site_state(self, site: str) -> BreakerState:
        """The same of a site."""
        return self._site(site).state(self._clock.now_s())

    def begin(self, instance: Instance, tokens: int) -> Trial:
        """A far prefill goes out. `tokens` are its own and those waiting before it."""
        track, site, now_s = self._track(instance), self._site(instance.site), self._clock.now_s()
        trial = Trial(track, track.breaker.begin(now_s), site, site.begin(now_s), tokens, now_s)
        self._tell(track)
        return trial

    def end(self, trial: Trial, outcome: Outcome, *, of_the_way: bool = False, retry_after_s: float = 1.0) -> None:
        """It ended. Exactly once per `begin`. `of_the_way`: it failed on the way, which concerns the whole site."""
        now_s, track = self._clock.now_s(), trial.track
        took_s = now_s - trial.began_s
        expected_s = track.estimator.estimate_s(trial.tokens)
        excess_ms = 0.0 if expected_s is None else max(0.0, took_s - expected_s) * 1000
        if outcome is Outcome.SUCCESS:
            track.estimator.observe(trial.tokens, took_s)
        track.breaker.end(outcome, now_s, probe=trial.probe, excess_ms=excess_ms, retry_after_s=retry_after_s)
        concerns_site = outcome is Outcome.SUCCESS or (outcome is Outcome.FAILURE and of_the_way)
        trial.site.end(
            outcome if concerns_site else Outcome.NEUTRAL, now_s, probe=trial.site_probe, excess_ms=excess_ms
        )
        self._tell(track)

    def retain(self, live: Iterable[Instance]) -> None:
        """Forget instances that are gone."""
        names = {i.name for i in live}
        for name in [n for n in self._tracks if n not in names]:
            del self._tracks[name]

    def snapshots(self) -> dict[str, BreakerSnapshot]:
        """What this gateway saw, by the breaker's name, for the others."""
        now_s = self._clock.now_s()
        return {name: breaker.snapshot(now_s) for name, breaker in self._named().items()}

    def merge(self, heard: Mapping[str, Sequence[tuple[str, BreakerSnapshot]]]) -> None:
        """(gateway, snapshot) of others by the breaker's name; names this gateway does not know are left out."""
        now_s = self._clock.now_s()
        for name, breaker in self._named().items():
            if name in heard:
                breaker.merge(heard[name], now_s)
        for track in self._tracks.values():
            self._tell(track)

    def _named(self) -> dict[str, CircuitBreaker]:
        tracks = {f"instance/{t.instance.name}@{t.instance.generation}": t.breaker for t in self._tracks.values()}
        return tracks | {f"site/{site}": breaker for site, breaker in self._sites.items()}

    def _site(self, name: str) -> CircuitBreaker:
        found = self._sites.get(name)
        if found is None:
            found = self._sites[name] = CircuitBreaker(self._site_limits)
        return found

    def _track(self, instance: Instance) -> _Track:
        track = self._tracks.get(instance.name)
        if track is None or track.instance.generation != instance.generation:
            track = _Track(instance, CircuitBreaker(self._limits), PrefillEstimator())
            self._tracks[instance.name] = track
        return track

    def _tell(self, track: _Track) -> None:
        state = track.breaker.state(self._clock.now_s())
        if state is not track.told:
            track.told = state
            self._observer.breaker_changed(track.instance, state)
            log.warning("breaker", prefill=track.instance.name, site=track.instance.site, state=str(state))


def _limits(config: CircuitBreakerConfig, error_rate_limit: float) -> BreakerLimits:
    return BreakerLimits(
        error_rate_limit=error_rate_limit,
        latency_p99_limit_ms=config.latency_p99_limit_ms,
        window_s=config.window_s,
        min_requests=config.min_requests,
        open_s=config.open_s,
        half_open_probes=config.half_open_probes,
    )
