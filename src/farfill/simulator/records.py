"""What a run leaves behind: figures of every request, compactly, and samples over time."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from farfill.planner.curves import Floats
from farfill.simulator.request import Request

MAX_SAMPLES = 4096
_RECENT = 200
_FEWEST = 20


class Records:
    """Columns, one entry per finished request, and counts of those that did not finish."""

    def __init__(self, skipped: int) -> None:
        self._skipped = skipped
        self._seen = 0
        self.arrival = array("d")
        self.wait = array("d")
        self.ttft = array("d")
        self.tpot = array("d")
        self.end = array("d")
        self.far = array("b")
        self.prompt = array("q")
        self.output = array("q")
        self.cached = array("q")
        self.refused: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._recent: tuple[deque[float], deque[float]] = (deque(maxlen=_RECENT), deque(maxlen=_RECENT))

    def finished(self, request: Request, now_s: float) -> None:
        """The last token is out. The first ones of a run are left out: the sites were empty then."""
        self._recent[1 if request.far else 0].append((request.first_s - request.arrival_s) / request.prompt)
        self._seen += 1
        if self._seen <= self._skipped:
            return
        self.arrival.append(request.arrival_s)
        began_s = request.prefill_from_s if request.prefill_from_s >= 0 else request.first_s
        self.wait.append(began_s - request.arrival_s)
        self.ttft.append(request.first_s - request.arrival_s)
        self.tpot.append((now_s - request.first_s) / (request.output - 1) if request.output > 1 else 0.0)
        self.end.append(now_s)
        self.far.append(1 if request.far else 0)
        self.prompt.append(request.prompt)
        self.output.append(request.output)
        self.cached.append(request.cached)

    def ttft_ratio(self) -> float | None:
        """p95 of the time to first token per prompt token, far over near, of late; None: too few of either."""
        near, far = self._recent
        if min(len(near), len(far)) < _FEWEST:
            return None
        return float(np.quantile(far, 0.95) / max(1e-12, np.quantile(near, 0.95)))

    def column(self, name: str) -> Floats:
        """As an array."""
        return np.array(getattr(self, name), dtype=np.float64)


class Kept:
    """What became of every simulated request, by its number in the recording."""

    def __init__(self) -> None:
        self.ended: dict[int, tuple[float, float, bool]] = {}

    def finished(self, request: Request, now_s: float) -> None:
        """Its last token is out."""
        number = int(request.ident[1:])
        self.ended[number] = (request.first_s - request.arrival_s, now_s, bool(request.far))


@dataclass(slots=True)
class Samples:
    """Series over time. When there are too many, every other one goes, so that the whole run stays in sight."""

    at_s: list[float] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    every: int = 1
    _skipped: int = 0

    def offer(self, at_s: float, values: Callable[[], Mapping[str, float]]) -> None:
        """One sample of everything, if this one is kept; a series that begins late has been 0 before."""
        self._skipped += 1
        if self._skipped < self.every:
            return
        self._skipped = 0
        self.at_s.append(at_s)
        count = len(self.at_s)
        for name, value in values().items():
            found = self.series.setdefault(name, [])
            found.extend([0.0] * (count - 1 - len(found)))
            found.append(value)
        if count >= MAX_SAMPLES:
            self.at_s = self.at_s[1::2]
            self.series = {name: found[1::2] for name, found in self.series.items()}
            self.every *= 2
