"""The event loop of virtual time: what was asked for earliest happens next; ties in the order they were asked for.

A heap of its own instead of simpy: an event here is one tuple and one call, not a generator that is resumed, which a
million requests with a dozen events each notice.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any], None]


class Kernel:
    """`now_s` only moves forward. There is nothing to cancel: an action checks whether it still matters."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._number = 0
        self._stopped = False

    def at(self, time_s: float, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` at `time_s`; what lies in the past happens now."""
        self._number += 1
        heappush(self._heap, (time_s, self._number, action, argument))

    def stop(self) -> None:
        """End `run` after the current action."""
        self._stopped = True

    def run(self, until_s: float = float("inf")) -> None:
        """Until nothing is left, `stop` is called, or the next event lies beyond `until_s`."""
        heap, self._stopped = self._heap, False
        while heap and not self._stopped:
            if heap[0][0] > until_s:
                return
            time_s, _, action, argument = heappop(heap)
            if time_s > self.now_s:  # noqa: PLR1730 (a call for every event)
                self.now_s = time_s
            self.events += 1
            action(argument)
