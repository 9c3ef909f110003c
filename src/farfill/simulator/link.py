"""A link between two sites: transfers share what it carries evenly (processor sharing), and it can weaken or be cut.

What a link carries is its rate, less what loss costs: 1 − p of it arrives, and with loss-based congestion control n
connections reach no more than n × 1.22 × MSS / (RTT × √p) (Mathis, Semke, Mahdavi, Ott 1997).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf, sqrt
from typing import Any

from farfill.simulator.kernel import Kernel

MSS_BYTES = 1448
_ALMOST = 1e-3
"""Bytes: what rounding leaves of a transfer."""


def goodput(bytes_per_s: float, rtt_s: float, loss: float, connections: int, *, loss_based: bool) -> float:
    """Bytes/s that arrive over so many connections."""
    if loss <= 0:
        return bytes_per_s
    arriving = bytes_per_s * (1 - loss)
    if not loss_based or rtt_s <= 0:
        return arriving
    return min(arriving, connections * 1.22 * MSS_BYTES / (rtt_s * sqrt(loss)))


class Flow:
    """One transfer. `end` is where the link's work per flow stands when it is through; inf: it left."""

    __slots__ = ("bytes", "done", "end", "job")

    def __init__(self, job: Any, size: float, done: Callable[[Any], None]) -> None:
        self.job = job
        self.bytes = size
        self.done = done
        self.end = inf


class SharedLink:
    """`carried` counts bytes. All flows progress alike, so one number, the work done per flow, says how far each is."""

    def __init__(self, kernel: Kernel, bytes_per_s: float, rtt_s: float) -> None:
        self._kernel = kernel
        self._full = bytes_per_s
        self._factors = {"fluctuation": 1.0, "event": 1.0}
        self.rtt_s = rtt_s
        self.rate = bytes_per_s
        self.carried = 0.0
        self._flows: dict[Flow, None] = {}
        self._ends: list[tuple[float, int, Flow]] = []
        self._work = 0.0
        self._at_s = 0.0
        self._number = 0
        self._version = 0

    @property
    def active(self) -> int:
        """Transfers under way."""
        return len(self._flows)

    def start(self, job: Any, size: float, done: Callable[[Any], None]) -> Flow:
        """Call `done(job)` when `size` bytes have left; the half round trip of the last byte comes on top."""
        self._advance()
        flow = Flow(job, size, done)
        self._flows[flow] = None
        self._expect(flow, self._work + size)
        self._plan()
        return flow

    def extend(self, flow: Flow, size: float) -> bool:
        """More bytes of a transfer under way; False: it is through already, start another."""
        if flow not in self._flows:
            return False
        self._advance()
        flow.bytes += size
        self._expect(flow, flow.end + size)
        self._plan()
        return True

    def drop(self, flow: Flow) -> None:
        """The transfer is given up. Idempotent."""
        if flow in self._flows:
            self._advance()
            del self._flows[flow]
            flow.end = inf
            self._plan()

    def set_factor(self, name: str, factor: float) -> None:
        """The link carries so much of its rate; 0: it is cut. Factors of different names multiply."""
        self._advance()
        self._factors[name] = factor
        self.rate = self._full
        for each in self._factors.values():
            self.rate *= each
        self._plan()

    def flows(self) -> list[Flow]:
        """Transfers under way, oldest first."""
        return list(self._flows)

    def carried_by_now(self) -> float:
        """Bytes since the beginning."""
        self._advance()
        return self.carried

    def _expect(self, flow: Flow, end: float) -> None:
        flow.end = end
        self._number += 1
        heappush(self._ends, (end, self._number, flow))

    def _advance(self) -> None:
        now_s = self._kernel.now_s
        if self._flows:
            moved = (now_s - self._at_s) * self.rate
            self.carried += moved
            self._work += moved / len(self._flows)
        self._at_s = now_s

    def _plan(self) -> None:
        self._version += 1
        ends = self._ends
        while ends and ends[0][2].end != ends[0][0]:
            heappop(ends)
        if ends and self.rate > 0:
            left = max(0.0, ends[0][0] - self._work)
            self._kernel.at(self._kernel.now_s + left * len(self._flows) / self.rate, self._through, self._version)

    def _through(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended: list[Flow] = []
        first = self._ends[0][0]
        limit = max(first, self._work + _ALMOST)
        while self._ends and self._ends[0][0] <= limit:
            end, _, flow = heappop(self._ends)
            if flow.end == end:
                del self._flows[flow]
                flow.end = inf
                ended.append(flow)
        if not self._flows:
            self._work = 0.0
        self._plan()
        for flow in ended:
            flow.done(flow.job)
