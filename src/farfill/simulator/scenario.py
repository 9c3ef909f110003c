"""A scenario ready to run: the file read, the plan behind it read, instances and threshold decided."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from farfill.config.problems import KeyPath
from farfill.core.errors import ConfigError
from farfill.planner.answer import Option, read_answer
from farfill.planner.capacity import plan_capacity
from farfill.planner.inputs import read_input, refuse
from farfill.planner.lengths import Lengths
from farfill.planner.problem import Problem, lengths_from, read_problem
from farfill.planner.trace import TraceLine, is_recording, read_recording, read_trace_lines
from farfill.policy.plugins import SCORERS, plugin
from farfill.simulator.scenario_file import FleetSection, ScenarioFile
from farfill.wire.recording import RecordedRequest

_SAME_SCV = 1e-3
NEVER = 1 << 40
"""A threshold no prompt reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`rate_per_s` is the mean; `trace` replaces generated traffic, and `recorded` says more of the same requests.
    `output` None: always the plan's mean. `paces`: how many times as long as profiles say each prompt takes."""

    name: str
    file: ScenarioFile
    problem: Problem
    fleet: FleetSection
    threshold_tokens: int
    rate_per_s: float
    input: Lengths
    output: Lengths | None
    trace: tuple[TraceLine, ...] = ()
    recorded: tuple[RecordedRequest, ...] = ()
    paces: tuple[float, ...] = ()

    @property
    def utilisation_target(self) -> float:
        """What a search for the threshold lets far prefill fill a link to."""
        given = self.file.policies.utilisation_target
        return self.problem.link_utilisation if given is None else given


def read_scenario(
    path: Path, *, seed: int | None = None, requests: int | None = None, replay: Path | None = None
) -> Scenario:
    """Options replace what the file says. Raises ConfigError naming line and key, or file and line of a trace."""
    file, lines = read_input(path, ScenarioFile, "scenario")
    changes = {key: value for key, value in (("seed", seed), ("requests", requests)) if value is not None}
    return _Reader(path, file.model_copy(update=changes), lines).scenario(replay)


class _Reader:
    def __init__(self, path: Path, file: ScenarioFile, lines: dict[KeyPath, int]) -> None:
        self._path = path
        self._file = file
        self._lines = lines

    def scenario(self, replay: Path | None) -> Scenario:
        base = self._path.resolve().parent
        problem = read_problem(base / self._file.plan)
        file = self._file = _with_arrivals(self._file, problem.workload.arrival_scv)
        option, rate = self._option(problem, base)
        fleet = file.fleet or _fleet(option)
        self._check(problem, fleet)
        trace = tuple(read_trace_lines(replay)) if replay is not None else ()
        recorded = tuple(read_recording(replay)) if replay is not None and is_recording(replay) else ()
        rate = file.traffic.requests_per_s or rate
        if rate is None and not trace:
            raise self._refuse(("traffic", "requests_per_s"), "not known", "add it, or a baseline")
        threshold = file.policies.threshold_tokens
        if threshold is None:
            threshold = 1 if option is None else option.threshold_tokens
        if threshold is None or not any(fleet.far.values()):
            threshold = NEVER
        return Scenario(
            name=self._path.stem,
            file=file,
            problem=problem,
            fleet=fleet,
            threshold_tokens=threshold,
            rate_per_s=rate or 1.0,
            input=problem.workload.lengths if file.traffic.input is None else self._lengths("input"),
            output=None if file.traffic.output is None else self._lengths("output"),
            trace=trace,
            recorded=recorded,
        )

    def _option(self, problem: Problem, base: Path) -> tuple[Option | None, float | None]:
        file = self._file
        if file.baseline is not None:
            try:
                answer = read_answer(base / file.baseline)
            except ConfigError as error:
                raise self._refuse(("baseline",), str(error), "write it anew") from error
            return answer.plan, answer.rate_per_s
        if file.fleet is not None and (file.policies.threshold_tokens is not None or not file.fleet.far):
            return None, problem.workload.requests_per_s
        answer = plan_capacity(problem)
        return answer.plan, answer.rate_per_s

    def _lengths(self, key: str) -> Lengths:
        given = self._file.traffic.input if key == "input" else self._file.traffic.output
        assert given is not None
        try:
            return lengths_from(given)
        except ConfigError as error:
            raise self._refuse(("traffic", key), str(error), "see docs/planning.md") from error

    def _check(self, problem: Problem, fleet: FleetSection) -> None:
        file = self._file
        far = [site.name for site, _ in problem.far]
        has = ", ".join(far) or "none"
        for name in fleet.far:
            if name not in far:
                raise self._refuse(("fleet", "far", name), "no far site of the plan", f"far sites: {has}")
        for name in file.links:
            if name not in far:
                raise self._refuse(("links", name), "no far site of the plan", f"far sites: {has}")
        if not problem.near.profile.decode:
            raise self._refuse(("plan",), "the near profile has no decode steps", "add decode to it")
        if fleet.near_prefill and problem.near.profile.prefill is None:
            raise self._refuse(("fleet", "near_prefill"), "the near profile has no prefill times", "say 0, or add them")
        self._check_events(problem, fleet, far)
        self._check_policies()
        self._check_scaling(problem)

    def _check_events(self, problem: Problem, fleet: FleetSection, far: list[str]) -> None:
        names = instance_names(problem.near.name, fleet)
        for i, event in enumerate(self._file.events):
            if (event.instance is None) == (event.link is None):
                raise self._refuse(("events", i), "needs exactly one of instance and link", "add link: SITE")
            if event.instance is not None and event.instance not in names:
                what = f"{event.instance!r} is no instance"
                raise self._refuse(("events", i, "instance"), what, f"there are: {', '.join(names)}")
            if event.link is not None and event.link not in far:
                what = f"{event.link!r} is no far site"
                raise self._refuse(("events", i, "link"), what, f"far sites: {', '.join(far) or 'none'}")
        points = self._file.traffic.load
        for i in range(1, len(points)):
            if points[i].at_s <= points[i - 1].at_s:
                raise self._refuse(("traffic", "load", i, "at_s"), "not later than the one before", "sort them")

    def _check_policies(self) -> None:
        for key in ("decode_weights", "prefill_weights"):
            weights: dict[str, float] = getattr(self._file.policies, key)
            for name, weight in weights.items():
                try:
                    plugin(SCORERS, name, "scorer")
                except ConfigError as error:
                    raise self._refuse(("policies", key, name), str(error), "see docs/policies") from error
                if weight < 0:
                    raise self._refuse(("policies", key, name), "is negative", "leave it out with 0")

    def _check_scaling(self, problem: Problem) -> None:
        section = self._file.autoscale
        if section is None:
            return
        sites = [problem.near.name, *(site.name for site, _ in problem.far)]
        known = {f"{problem.near.name}/decode", *(f"{name}/prefill" for name in sites)}
        for key, role in section.roles.items():
            if key not in known:
                raise self._refuse(
                    ("autoscale", "roles", key), "no such role", f"there are: {', '.join(sorted(known))}"
                )
            if role.minimum > role.maximum:
                raise self._refuse(("autoscale", "roles", key, "minimum"), "more than maximum", "exchange them")
        for i, schedule in enumerate(section.schedules):
            key = ("autoscale", "schedules", i)
            if schedule.group not in section.roles:
                known_groups = ", ".join(section.roles)
                what = f"{schedule.group!r} is no group"
                raise self._refuse((*key, "group"), what, f"there are: {known_groups}")
            if schedule.minimum > schedule.maximum:
                raise self._refuse((*key, "minimum"), "more than maximum", "exchange them")
        if not section.in_below < section.target < section.out_above:
            raise self._refuse(("autoscale", "target"), "not between in_below and out_above", "set all three")

    def _refuse(self, key: KeyPath, what: str, fix: str) -> ConfigError:
        return refuse(self._path, self._lines, key, what, fix)


def _with_arrivals(file: ScenarioFile, scv: float) -> ScenarioFile:
    """Arrivals that are not given are as uneven as the plan says: what it predicts is then what is simulated."""
    if file.traffic.arrivals is not None:
        return file
    if abs(scv - 1) < _SAME_SCV:
        update: dict[str, object] = {"arrivals": "poisson"}
    elif scv < _SAME_SCV:
        update = {"arrivals": "even"}
    else:
        update = {"arrivals": "gamma", "scv": scv}
    return file.model_copy(update={"traffic": file.traffic.model_copy(update=update)})


def instance_names(near: str, fleet: FleetSection) -> list[str]:
    """As the simulator calls them."""
    names = [f"{near}-decode-{i}" for i in range(fleet.near_decode)]
    names += [f"{near}-prefill-{i}" for i in range(fleet.near_prefill)]
    return names + [f"{site}-prefill-{i}" for site, count in fleet.far.items() for i in range(count)]


def _fleet(option: Option | None) -> FleetSection:
    assert option is not None, "without a fleet there is a plan"
    return FleetSection(
        near_prefill=option.near_prefill,
        near_decode=option.near_decode,
        far={part.site: part.instances for part in option.far},
    )
