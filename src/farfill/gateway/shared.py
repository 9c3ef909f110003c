"""What gateways share through the registry's store: breakers, rollout shares, and what they saw of them.

Everything heard stays in force while the registry is away; what this gateway has to say is said when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import structlog

from farfill.clock import Clock
from farfill.config.routing import RolloutConfig
from farfill.core.cluster import Role
from farfill.core.errors import FarfillError, ProtocolError
from farfill.gateway.decisions import DecisionLog, DecisionTrail
from farfill.gateway.health import PrefillHealth
from farfill.gateway.links import LinkView
from farfill.gateway.observe import PolicyObserver
from farfill.gateway.rollout import RolloutState
from farfill.policy.breaker_share import BreakerSnapshot
from farfill.policy.replay import StepInputs
from farfill.policy.rollout import STEPS, GuardLimits, StepAction, StepDecision, decide_step
from farfill.registry.mirror import Mirror
from farfill.registry.records import (
    BREAKERS,
    OBSERVED,
    ROLLOUT,
    BreakerRecord,
    ObservedRecord,
    ObservedShare,
    RolloutRecord,
    decode_record,
    encode_record,
)
from farfill.registry.rollouts import (
    ShareChange,
    ShareKey,
    change_share,
    share_key,
    share_of,
    version_share,
    version_share_of,
)
from farfill.registry.store import Delete, LeaseLostError, Operation, Put, Store

log = structlog.get_logger("farfill.gateway")

PERIOD_S = 0.5
LEASE_S = 10.0
FIRST_ANSWER_S = 5.0
"""Longest wait at the start for what the others decided, so that the first request is placed by it."""
MAX_PUTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What is shared of this gateway."""

    store: Store
    health: PrefillHealth
    links: LinkView
    rollout: RolloutState
    config: RolloutConfig
    observer: PolicyObserver
    clock: Clock
    decision_log: DecisionLog | None = None


class SharedState:
    """Runs between `start` and `close`."""

    def __init__(self, parts: SharedParts, gateway: str) -> None:
        self.gateway = gateway
        self._parts = parts
        self._limits = GuardLimits(
            min_step_s=parts.config.min_step_s,
            min_requests=parts.config.min_requests,
            min_parity=parts.config.min_parity_samples,
            success_rate=parts.config.success_rate,
            ttft_ratio_hold=parts.config.ttft_ratio_hold,
            ttft_ratio_revert=parts.config.ttft_ratio_revert,
            link_utilisation=parts.config.link_utilisation,
        )
        self._version_limits = replace(self._limits, min_parity=0, ttft_ratio_hold=parts.config.version_ttft_ratio_hold)
        self._rollouts = Mirror(parts.store, ROLLOUT, on_change=self._rollouts_changed)
        self._breakers = Mirror(parts.store, BREAKERS, on_change=self._breakers_changed)
        self._observed = Mirror(parts.store, OBSERVED)
        self._stack = contextlib.AsyncExitStack()
        self._task: asyncio.Task[None] | None = None
        self._lease = 0
        self._said: dict[str, bytes] = {}
        self._held: dict[ShareKey, str] = {}

    @property
    def stale_s(self) -> float:
        """For how long the store has been away."""
        return max(self._rollouts.stale_s, self._breakers.stale_s)

    async def start(self) -> None:
        """Begin to listen and to tell."""
        for mirror in (self._rollouts, self._breakers, self._observed):
            await self._stack.enter_async_context(mirror)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_S):
                await self._rollouts.wait_known()
                await self._breakers.wait_known()
        self._task = asyncio.create_task(self._run(), name="shared-state")

    async def close(self) -> None:
        """Say goodbye, if the store can hear it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._stack.aclose()
        with contextlib.suppress(FarfillError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._parts.store.revoke(self._lease)

    def _rollouts_changed(self) -> None:
        records: dict[ShareKey, RolloutRecord] = {}
        for entry in self._rollouts.entries():
            try:
                key, record = share_of(entry)
            except ProtocolError as error:
                log.warning("rollout_unreadable", key=entry.key, error=str(error))
                # What it says is not known, what it said before is.
                records |= {k: r for k, r in self._parts.rollout.records.items() if share_key(*k) == entry.key}
                continue
            records[key] = record
        for (model, tenant), record in records.items():
            if self._parts.rollout.records.get((model, tenant)) != record:
                log.info(
                    "rollout_share", model=model, tenant=tenant, percent=record.percent, version=record.version,
                    automatic=record.automatic, author=record.author, reason=record.reason,
                )  # fmt: skip
        self._parts.rollout.use(records)

    def _breakers_changed(self) -> None:
        heard: dict[str, list[tuple[str, BreakerSnapshot]]] = {}
        for entry in self._breakers.entries():
            try:
                record = decode_record(entry.value, BreakerRecord)
                snapshot = msgspec.convert(record.snapshot, BreakerSnapshot)
            except (ProtocolError, msgspec.ValidationError) as error:
                log.warning("breaker_unreadable", key=entry.key, error=str(error))
                continue
            if record.gateway != self.gateway:
                name = entry.key.removeprefix(BREAKERS).rpartition("/")[0]
                heard.setdefault(name, []).append((record.gateway, snapshot))
        self._parts.health.merge(heard)

    async def _run(self) -> None:
        while True:
            try:
                await self._tell()
                await self._guard()
            except LeaseLostError:
                self._lease, self._said = 0, {}
                continue
            except FarfillError as error:
                log.debug("shared_state_not_told", reason=error.reason, error=str(error))
            await asyncio.sleep(PERIOD_S)

    async def _tell(self) -> None:
        """What changed of our breakers and of what we saw."""
        store = self._parts.store
        if not self._lease:
            self._lease = (await store.grant(LEASE_S)).id
        else:
            await store.keep_alive(self._lease)
        now = dict(self._to_say())
        changes: list[Operation] = [Put(k, v, self._lease) for k, v in now.items() if self._said.get(k) != v]
        changes += [Delete(key) for key in self._said if key not in now]
        for i in range(0, len(changes), MAX_PUTS):
            await store.commit(changes[i : i + MAX_PUTS])
        self._said = now

    def _to_say(self) -> Iterator[tuple[str, bytes]]:
        for name, snapshot in self._parts.health.snapshots().items():
            if snapshot.buckets or snapshot.changed_age_s is not None or snapshot.overloaded_s:
                record = BreakerRecord(gateway=self.gateway, snapshot=msgspec.to_builtins(snapshot))
                yield f"{BREAKERS}{name}/{self.gateway}", encode_record(record)
        seen = self._seen_here()
        if seen:
            yield f"{OBSERVED}{self.gateway}", encode_record(ObservedRecord(gateway=self.gateway, shares=seen))

    def _seen_here(self) -> list[ObservedShare]:
        links = self._parts.links
        return self._parts.rollout.observed(max((links.utilisation(s.site) for s in links.all_sites()), default=0.0))

    async def _guard(self) -> None:
        """Let automatic rollouts go on, stay or go back. Every gateway does; the store takes the first one's word."""
        rollout = self._parts.rollout
        for key, record in rollout.records.items():
            if not record.automatic:
                continue
            limits = self._limits if version_share_of(key) is None else self._version_limits
            inputs = StepInputs(limits, rollout.observation(key, [*self._seen_here(), *self._seen_elsewhere()]))
            decision = decide_step(limits, inputs.seen)
            if decision.action in (StepAction.HOLD, StepAction.DONE):
                if self._held.get(key) != decision.reason:
                    self._held[key] = decision.reason
                    self._note(inputs, decision)
                if decision.action is StepAction.DONE:
                    await self._decode_next(key)
                continue
            self._held.pop(key, None)
            change = ShareChange(
                percent=decision.percent,
                automatic=decision.action is StepAction.ADVANCE,
                author=self.gateway,
                reason=f"{decision.action}: {decision.reason}",
                unix_s=self._parts.clock.unix_s(),
            )
            done = await change_share(
                self._parts.store,
                key,
                lambda found, version=record.version, change=change: (
                    change if found is not None and found.version == version else None
                ),
            )
            if done is not None:
                self._note(inputs, decision)

    async def _decode_next(self, key: ShareKey) -> None:
        """All prefill is of the new version: decode may begin. One that was taken back is not begun again."""
        found = version_share_of(key)
        if found is None or found[0] is not Role.PREFILL:
            return
        following = version_share(Role.DECODE, found[1])
        if following not in self._parts.rollout.records:
            begin = ShareChange(
                percent=STEPS[0],
                automatic=True,
                author=self.gateway,
                reason=f"all prefill workers are of {found[1]}",
                unix_s=self._parts.clock.unix_s(),
            )
            await change_share(self._parts.store, following, lambda seen: begin if seen is None else None)

    def _seen_elsewhere(self) -> Iterator[ObservedShare]:
        for entry in self._observed.entries():
            with contextlib.suppress(ProtocolError):
                record = decode_record(entry.value, ObservedRecord)
                if record.gateway != self.gateway:
                    yield from record.shares

    def _note(self, inputs: StepInputs, decision: StepDecision) -> None:
        self._parts.observer.rollout_decided(str(decision.action), decision.reason)
        trail = DecisionTrail("", self._parts.clock.unix_s())
        trail.add("rollout_step", inputs, decision)
        if self._parts.decision_log is not None:
            self._parts.decision_log.add(trail.decisions)
