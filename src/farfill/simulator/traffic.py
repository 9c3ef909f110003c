"""Who comes when and asks for what: generated, seeded traffic, or a trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence

from farfill.planner.lengths import Lengths
from farfill.planner.trace import TraceLine
from farfill.policy.offload import Forced
from farfill.simulator.kernel import Kernel
from farfill.simulator.request import Request
from farfill.simulator.scenario import Scenario
from farfill.simulator.scenario_file import LoadPoint, TrafficSection
from farfill.wire.recording import RecordedRequest

_DRAWN_AT_ONCE = 4096
_GROUP_KEY = 1 << 62


def generator(seed: int, stream: int) -> Generator:
    """Independent streams: another kind of event in one leaves the others as they were."""
    return Generator(PCG64(SeedSequence((seed, stream))))


def drawn(draw: Callable[[int], list[float]]) -> Callable[[], float]:
    """One value at a time of what is drawn by the thousand."""

    def values() -> Iterator[float]:
        while True:
            yield from draw(_DRAWN_AT_ONCE)

    return values().__next__


def lengths_of(lengths: Lengths, rng: Generator) -> Callable[[], float]:
    """Lengths, drawn."""
    cumulative = np.cumsum(lengths.weights)
    last = len(cumulative) - 1

    def draw(count: int) -> list[float]:
        at = np.minimum(np.searchsorted(cumulative, rng.random(count), side="right"), last)
        return [float(v) for v in np.maximum(1.0, np.rint(lengths.tokens[at]))]

    return drawn(draw)


def gaps_of(traffic: TrafficSection, rng: Generator) -> Callable[[], float]:
    """Gaps between arrivals with a mean of 1, but for mmpp: see `Bursts`."""
    if traffic.arrivals == "even":
        return lambda: 1.0
    if traffic.arrivals == "gamma":
        shape = 1.0 / traffic.scv
        return drawn(lambda count: [float(v) for v in rng.gamma(shape, traffic.scv, count)])
    return drawn(lambda count: [float(v) for v in rng.exponential(1.0, count)])


def arrivals_text(scenario: Scenario) -> str:
    """How requests come, in words."""
    if scenario.trace:
        return "as in the recording" if scenario.recorded else "as in the trace"
    traffic = scenario.file.traffic
    words = {
        "gamma": f"gaps with a squared coefficient of variation of {traffic.scv:.2g}",
        "mmpp": f"Poisson, in bursts {traffic.burst_factor:g} times as often as in calms",
        "even": "all gaps equal",
    }
    return words.get(traffic.arrivals or "", "Poisson")


class Bursts:
    """A Poisson stream whose rate alternates between two values (MMPP-2); gaps are exponential in each state."""

    def __init__(self, traffic: TrafficSection, rate_per_s: float, rng: Generator) -> None:
        share = traffic.burst_s / (traffic.burst_s + traffic.calm_s)
        calm = rate_per_s / (1 - share + share * traffic.burst_factor)
        self._rates = (calm, calm * traffic.burst_factor)
        self._means = (traffic.calm_s, traffic.burst_s)
        self._unit = drawn(lambda count: [float(v) for v in rng.exponential(1.0, count)])
        self._burst = 0
        self._switch_s = self._means[0] * self._unit()

    def after(self, now_s: float, factor: float) -> float:
        """When the next one comes."""
        work = self._unit()
        while True:
            rate = self._rates[self._burst] * factor
            if now_s + work / rate <= self._switch_s:
                return now_s + work / rate
            work -= max(0.0, self._switch_s - now_s) * rate
            now_s = max(now_s, self._switch_s)
            self._burst = 1 - self._burst
            self._switch_s = now_s + self._means[self._burst] * self._unit()


def load_factor(points: list[LoadPoint], period_s: float | None, at_s: float) -> float:
    """Straight lines between points; before the first and after the last it stays."""
    if not points:
        return 1.0
    if period_s is not None:
        at_s %= period_s
    index = bisect_right(points, at_s, key=lambda p: p.at_s)
    if index == 0:
        return points[0].factor
    if index == len(points):
        return points[-1].factor
    low, high = points[index - 1], points[index]
    return low.factor + (high.factor - low.factor) * (at_s - low.at_s) / (high.at_s - low.at_s)


@dataclass(slots=True)
class Session:
    """A conversation: what its next prompt begins with, and how many turns are left."""

    ident: int
    name: str
    tenant: str
    group: int
    tokens: int
    left: int
    talks: bool


class GeneratedTraffic:
    """Hands each request to `arrive`; `ended` may bring the next turn of its session."""

    def __init__(
        self, kernel: Kernel, scenario: Scenario, block_tokens: int, arrive: Callable[[Request], None]
    ) -> None:
        file, traffic = scenario.file, scenario.file.traffic
        self._kernel = kernel
        self._arrive = arrive
        self._traffic = traffic
        self._block_tokens = block_tokens
        self._left = file.requests
        turns, share = (traffic.sessions.turns, traffic.sessions.share) if traffic.sessions else (1.0, 0.0)
        self._talking = share
        self._rate = scenario.rate_per_s / (share * turns + 1 - share)
        self._input = lengths_of(scenario.input, generator(file.seed, 1))
        mean_output = max(1.0, round(scenario.problem.workload.output_tokens))
        self._output = lengths_of(scenario.output, generator(file.seed, 2)) if scenario.output else lambda: mean_output
        self._gap = gaps_of(traffic, generator(file.seed, 3))
        self._bursts = Bursts(traffic, self._rate, generator(file.seed, 3)) if traffic.arrivals == "mmpp" else None
        self._rng = generator(file.seed, 4)
        self._think = drawn(lambda count: [float(v) for v in self._rng.exponential(1.0, count)])
        turns_rng = generator(file.seed, 5)
        self._turns = drawn(lambda count: [float(v) for v in turns_rng.geometric(1 / turns, count)])
        self._choice = drawn(_uniform(generator(file.seed, 6)))
        groups = traffic.shared_prefix.groups if traffic.shared_prefix else 1
        weights = 1.0 / np.arange(1, groups + 1)
        self._groups = [float(v) for v in np.cumsum(weights / weights.sum())]
        self._longest = 2 * scenario.input.most + scenario.problem.workload.output_tokens
        self._number = 0

    def begin(self) -> None:
        """The first session comes after a gap."""
        self._plan_next()

    def ended(self, request: Request) -> None:
        """Its answer is complete: the same user may ask again."""
        session = request.session
        if session is None or session.left <= 0 or session.tokens > self._longest:
            return
        sessions = self._traffic.sessions
        assert sessions is not None
        session.left -= 1
        self._kernel.at(self._kernel.now_s + sessions.think_s * self._think(), self._turn, session)

    def _plan_next(self) -> None:
        now_s = self._kernel.now_s
        factor = load_factor(self._traffic.load, self._traffic.load_period_s, now_s)
        if self._bursts is not None:
            self._kernel.at(self._bursts.after(now_s, factor), self._new_session)
        else:
            self._kernel.at(now_s + self._gap() / (self._rate * factor), self._new_session)

    def _new_session(self, _: None) -> None:
        if self._left <= 0:
            return
        traffic = self._traffic
        tenant = f"tenant-{int(self._choice() * traffic.tenants)}" if traffic.tenants > 1 else "tenant-0"
        group = bisect_right(self._groups, self._choice()) if traffic.shared_prefix else 0
        self._number += 1
        tokens = traffic.shared_prefix.tokens if traffic.shared_prefix else 0
        talks = self._talking >= 1 or (self._talking > 0 and self._choice() < self._talking)
        turns = int(self._turns()) if talks else 1
        session = Session(self._number, f"s{self._number}", tenant, group, tokens, turns - 1, talks)
        self._turn(session)
        if self._left > 0:
            self._plan_next()

    def _turn(self, session: Session) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        output = int(self._output())
        prompt = session.tokens + int(self._input())
        session.tokens = prompt + output
        # Only what may come again needs keys: a single request without a shared prefix is found by nobody.
        cached = session.talks
        request = Request(
            f"r{self._left}",
            self._kernel.now_s,
            prompt,
            output,
            keys=self._keys(session, prompt if cached else 0),
            session=session if cached else None,
            tenant=session.tenant,
        )
        self._arrive(request)

    def _keys(self, session: Session, tokens: int) -> list[bytes]:
        shared = self._traffic.shared_prefix
        common = shared.tokens // self._block_tokens if shared else 0
        keys = [(_GROUP_KEY | session.group << 24 | i).to_bytes(8, "little") for i in range(common)]
        own = session.ident << 24
        keys += [(own | i).to_bytes(8, "little") for i in range(common, tokens // self._block_tokens)]
        return keys


class TraceTraffic:
    """Requests as they were recorded, in open loop. `recorded` and `paces`, where there are any, say more of them."""

    def __init__(
        self,
        kernel: Kernel,
        lines: Sequence[TraceLine],
        recorded: Sequence[RecordedRequest],
        paces: Sequence[float],
        arrive: Callable[[Request], None],
    ) -> None:
        self._kernel = kernel
        self._lines = lines
        self._recorded = recorded
        self._paces = paces
        self._arrive = arrive
        self._first_ms = lines[0].timestamp

    def begin(self) -> None:
        """The first one comes at once."""
        self._come(0)

    def ended(self, request: Request) -> None:
        """Nothing follows from it."""

    def _come(self, index: int) -> None:
        line = self._lines[index]
        if index + 1 < len(self._lines):
            self._kernel.at((self._lines[index + 1].timestamp - self._first_ms) / 1000, self._come, index + 1)
        blocks = line.input_length // line.block_tokens
        keys = [(i & (1 << 64) - 1).to_bytes(8, "little") for i in line.hash_ids[:blocks]]
        request = Request(f"r{index}", self._kernel.now_s, line.input_length, max(1, line.output_length), keys=keys)
        if self._paces:
            request.pace = self._paces[index]
        if self._recorded:
            said = self._recorded[index]
            request.tenant = said.tenant
            request.session = Session(index, said.session, said.tenant, 0, 0, 0, talks=False) if said.session else None
            request.forced = Forced(said.forced) if said.forced else None
            # What tokenizing took is not simulated: it is known.
            self._kernel.at(self._kernel.now_s + said.before_s, self._arrive, request)
        else:
            self._arrive(request)


def longest_tokens(scenario: Scenario) -> float:
    """The longest prompt there may be, for tables and contexts."""
    if scenario.trace:
        return float(max(line.input_length for line in scenario.trace))
    traffic = scenario.file.traffic
    longest = scenario.input.most + (traffic.shared_prefix.tokens if traffic.shared_prefix else 0)
    if traffic.sessions:
        most_output = scenario.output.most if scenario.output else scenario.problem.workload.output_tokens
        longest = 2 * longest + scenario.input.most + 2 * most_output
    return longest if longest < inf else 1e6


def _uniform(rng: Generator) -> Callable[[int], list[float]]:
    return lambda count: [float(v) for v in rng.random(count)]
