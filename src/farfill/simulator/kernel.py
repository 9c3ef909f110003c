"""The event loop of virtual time: what was asked for earliest happens next; ties in the order they were asked for.

A heap of its own instead of simpy: an event here is one tuple and one call, not a generator that is resumed, which a
million requests with a dozen events each notice.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

Action = Callable[[Any], None]


class Kernel:
    """`now_s` only moves forward. There is nothing to cancel: an action checks whether it still matters."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._number = 0

    @property
    def events(self) -> int:
        """How many have happened."""
        return self._number - len(self._heap)

    def at(self, time_s: float, action: Action, argument: Any = None) -> None:
        """Call `action(argument)` at `time_s`; what lies in the past happens now."""
        self._number += 1
        heappush(self._heap, (time_s, self._number, action, argument))

    def stop(self) -> None:
        """End `run` after the current action."""
        heappush(self._heap, (-inf, 0, _end, None))

    def run(self) -> None:
        """Until nothing is left, or `stop` is called."""
        heap, pop = self._heap, heappop
        try:
            while heap:
                time_s, _, action, argument = pop(heap)
                if time_s > self.now_s:  # noqa: PLR1730 (a call for every event)
                    self.now_s = time_s
                action(argument)
        except _Ended:
            pass


class _Ended(Exception):  # noqa: N818 (nothing went wrong)
    """Cheaper than asking after every event whether to stop."""


def _end(_: None) -> None:
    raise _Ended
