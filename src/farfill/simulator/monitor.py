"""What happens by the clock: links and queues are looked at, the threshold follows, the rollout steps, fleets grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farfill.core.cluster import InstanceState, Role
from farfill.policy.rollout import GuardLimits, Share, StepAction, StepObservation, decide_step
from farfill.policy.scaling import Group, GroupLimits, GroupLoad, Scaler, ScalingChange, ScalingLimits, Schedule
from farfill.simulator.decode import DecodeServer
from farfill.simulator.records import Samples
from farfill.simulator.scenario_file import ScalingSection
from farfill.simulator.sites import Server

if TYPE_CHECKING:
    from farfill.simulator.world import World

_WINDOW_S = 10.0


class Monitor:
    """Ticks every `monitor_s`. `samples` is the run over time; `changes` are scaling decisions with their time."""

    def __init__(self, world: World) -> None:
        file = world.scenario.file
        self._world = world
        self._kernel = world.kernel
        self._hardware = world.hardware
        self._period_s = file.monitor_s
        self._step_from_s = 0.0
        self._step_reported = (0, 0)
        self._scaling = file.autoscale
        self._scaler = None if file.autoscale is None else _scaler(file.autoscale)
        self._scaled_s = 0.0
        self._busy_s: dict[Group, float] = {}
        self._batch = world.scenario.problem.near.profile.best_batch(
            world.scenario.problem.tpot_s, world.scenario.problem.workload.context_tokens
        )
        self._slots: dict[Group, list[float]] = {}
        self.samples = Samples()
        self.changes: list[tuple[float, ScalingChange]] = []
        self.share_changes: list[tuple[float, float, str]] = []

    def begin(self) -> None:
        """The first look comes after one period."""
        self._kernel.at(self._period_s, self._tick)

    def maybe_drained(self, server: Server) -> None:
        """A server that takes no new work and has none left is gone."""
        if server.instance.state is InstanceState.DRAINING and _idle(server):
            site = self._hardware.by_name[server.instance.site]
            self._hardware.remove(site, server)
            self._world.gateway.members_changed()

    def _tick(self, _: None) -> None:
        self._look()
        self._world.gateway.adapt()
        if self._world.scenario.file.policies.rollout.automatic:
            self._rollout()
        if self._scaler is not None:
            self._scale()
        self._kernel.at(self._kernel.now_s + self._period_s, self._tick)

    def _look(self) -> None:
        now_s, hardware, gateway = self._kernel.now_s, self._hardware, self._world.gateway
        weight = min(1.0, self._period_s / _WINDOW_S)
        for site in hardware.far:
            link = site.link
            assert link is not None
            carried = link.carried_by_now()
            could = link.rate * self._period_s
            part = min(1.0, (carried - site.carried) / could) if could > 0 else float(link.active > 0)
            site.carried = carried
            site.utilisation += weight * (part - site.utilisation)
            site.regime.observe(site.utilisation, now_s)
        gateway.links_seen()
        gaps = [gap for s in hardware.near.decode if (gap := s.gap_s()) is not None]
        gateway.budget.observe_itl(max(gaps) if gaps else None)
        # Series are built only when this sample will be kept.
        self.samples.offer(now_s, self._values)

    def _values(self) -> dict[str, float]:
        world, hardware = self._world, self._hardware
        near = hardware.near
        values = {
            "queue: admission": float(world.queued),
            "queue: decode": float(sum(s.waiting for s in near.decode)),
            "running: decode": float(sum(s.running for s in near.decode)),
            "threshold": float(world.gateway.threshold_tokens),
            f"instances: {near.name} decode": float(sum(s.ready for s in near.decode)),
        }
        for site in [near, *hardware.far]:
            values[f"queue: {site.name} prefill"] = float(sum(s.waiting for s in site.prefill))
            values[f"instances: {site.name} prefill"] = float(sum(s.ready for s in site.prefill))
        for site in hardware.far:
            values[f"link: {site.name}"] = site.utilisation
        return values

    def _rollout(self) -> None:
        world, now_s = self._world, self._kernel.now_s
        given = world.scenario.file.policies.rollout
        records, gateway = world.records, world.gateway
        limits = GuardLimits(min_step_s=given.min_step_s, min_requests=given.min_requests)
        decision = decide_step(
            limits,
            StepObservation(
                percent=gateway.share.percent,
                step_age_s=now_s - self._step_from_s,
                far_requests=gateway.far_done - self._step_reported[0],
                far_failures=gateway.far_failures - self._step_reported[1],
                ttft_ratio=records.ttft_ratio(),
                link_utilisation=max((s.utilisation for s in self._hardware.far), default=0.0),
                parity_samples=0,
                parity_mismatches=0,
            ),
        )
        if decision.action in (StepAction.ADVANCE, StepAction.REVERT):
            gateway.share = Share(percent=decision.percent)
            self._step_from_s = now_s
            self._step_reported = (gateway.far_done, gateway.far_failures)
            self.share_changes.append((now_s, decision.percent, decision.reason))

    def _scale(self) -> None:
        assert self._scaling is not None
        assert self._scaler is not None
        now_s, near = self._kernel.now_s, self._hardware.near
        slots = self._slots.setdefault(Group(near.name, Role.DECODE), [])
        slots.append(sum(s.running for s in near.decode) / max(1, self._batch))
        if now_s - self._scaled_s < self._scaling.period_s - 1e-9:
            return
        elapsed_s = now_s - self._scaled_s
        self._scaled_s = now_s
        loads = {group: load for group in self._groups() if (load := self._load(group, elapsed_s)) is not None}
        for change in self._scaler.decide(loads, now_s):
            self.changes.append((now_s, change))
            self._apply(change)
        self._slots.clear()

    def _groups(self) -> list[Group]:
        assert self._scaling is not None
        return [_group(key) for key in self._scaling.roles]

    def _load(self, group: Group, elapsed_s: float) -> GroupLoad | None:
        site = self._hardware.by_name.get(group.site)
        if site is None:
            return None
        if group.role == Role.DECODE:
            held = self._slots[group]
            waiting = sum(s.waiting for s in site.decode) / max(1, self._batch)
            step_s = max((gap for s in site.decode if (gap := s.gap_s()) is not None), default=0.0)
            work_s = waiting * step_s * self._world.scenario.problem.workload.output_tokens
            return GroupLoad(
                ready=sum(s.ready for s in site.decode),
                starting=sum(s.instance.state is InstanceState.STARTING for s in site.decode),
                busy=sum(held) / len(held),
                waiting_s=work_s,
            )
        busy_s = sum(s.busy_s for s in site.prefill) + site.gone_busy_s
        before = self._busy_s.get(group, 0.0)
        self._busy_s[group] = busy_s
        per_token = site.estimator.estimate_s(1)
        times = site.times
        waiting = 0.0
        if times is not None:
            waiting = sum(times.alone_s(s.outstanding_tokens) for s in site.prefill if s.waiting)
        if per_token is not None:
            waiting = min(waiting, sum(s.outstanding_tokens for s in site.prefill if s.waiting) * per_token)
        return GroupLoad(
            ready=sum(s.ready for s in site.prefill),
            starting=sum(s.instance.state is InstanceState.STARTING for s in site.prefill),
            busy=(busy_s - before) / elapsed_s,
            waiting_s=waiting,
        )

    def _apply(self, change: ScalingChange) -> None:
        assert self._scaling is not None
        site = self._hardware.by_name[change.group.site]
        role = Role(change.group.role)
        for _ in range(change.after - change.before):
            server = self._hardware.add(site, role, InstanceState.STARTING)
            self._kernel.at(self._kernel.now_s + self._scaling.start_s, self._started, server)
        servers: list[Server] = list(site.decode if role is Role.DECODE else site.prefill)
        # Those that came last go first: they have the least cached. What still starts goes before what works.
        starting = [s for s in servers if s.instance.state is InstanceState.STARTING]
        leaving = [*reversed(starting), *reversed([s for s in servers if s.ready])]
        for server in leaving[: max(0, change.before - change.after)]:
            self._hardware.set_state(server, InstanceState.DRAINING)
            self.maybe_drained(server)
        self._world.gateway.members_changed()

    def _started(self, server: Server) -> None:
        if server.instance.state is InstanceState.STARTING:
            self._hardware.set_state(server, InstanceState.READY)
            self._world.gateway.members_changed()


def _idle(server: Server) -> bool:
    return not server.expected if isinstance(server, DecodeServer) else server.outstanding == 0


def _group(key: str) -> Group:
    site, _, role = key.rpartition("/")
    return Group(site, role)


def _scaler(section: ScalingSection) -> Scaler:
    limits = ScalingLimits(
        target=section.target,
        out_above=section.out_above,
        in_below=section.in_below,
        cooldown_out_s=section.cooldown_out_s,
        cooldown_in_s=section.cooldown_in_s,
        convert=frozenset(section.convert),
        price_limit=section.price_limit,
    )
    groups = {
        _group(key): GroupLimits(minimum=role.minimum, maximum=role.maximum, price=role.price)
        for key, role in section.roles.items()
    }
    schedules = [
        Schedule(
            group=_group(given.group),
            from_minute=_minute(given.start),
            to_minute=_minute(given.end),
            minimum=given.minimum,
            maximum=given.maximum,
        )
        for given in section.schedules
    ]
    return Scaler(limits, groups, schedules)


def _minute(clock: str) -> int:
    return int(clock[:2]) * 60 + int(clock[3:])
