"""A bounded queue that is fair between tenants: start-time fair queueing within strict priorities. Pure.

Each tenant's next request starts, in virtual time, where its last one ended, or now if it had none waiting; a request
lasts its cost over the tenant's weight. The one that starts first goes first. (Goyal, Vin, Cheng: Start-time Fair
Queuing, 1996.) A tenant's own requests keep their order. Higher priority goes first, always.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(slots=True, order=True)
class _Waiting(Generic[Item]):
    rank: int
    start: float
    number: int
    tenant: str = field(compare=False)
    cost: float = field(compare=False)
    item: Item = field(compare=False)
    gone: bool = field(default=False, compare=False)


class FairQueue(Generic[Item]):
    """`len` is what waits. `item`s must be unique and hashable."""

    def __init__(self) -> None:
        self._heap: list[_Waiting[Item]] = []
        self._waiting: dict[Item, _Waiting[Item]] = {}
        self._counts: dict[str, int] = {}
        self._finish: dict[tuple[int, str], float] = {}
        self._virtual: dict[int, float] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        """How many of one tenant wait."""
        return self._counts.get(tenant, 0)

    def push(self, item: Item, *, tenant: str, cost: float, weight: float = 1.0, priority: int = 0) -> None:
        """`cost` in tokens, say; a weight of 2 gets twice the share of 1."""
        if item in self._waiting:
            raise ValueError(f"{item!r} waits already")
        if weight <= 0 or cost < 0:
            raise ValueError(f"weight must be above 0 and cost at least 0, got {weight} and {cost}")
        rank = -priority
        start = max(self._virtual.get(rank, 0.0), self._finish.get((rank, tenant), 0.0))
        self._finish[rank, tenant] = start + cost / weight
        self._number += 1
        waiting = _Waiting(rank, start, self._number, tenant, cost, item)
        heapq.heappush(self._heap, waiting)
        self._waiting[item] = waiting
        self._counts[tenant] = self._counts.get(tenant, 0) + 1

    def pop(self, fits: Callable[[Item], bool] = lambda _: True) -> Item | None:
        """The next one, if it `fits`; nobody overtakes it when it does not."""
        while self._heap and self._heap[0].gone:
            heapq.heappop(self._heap)
        if not self._heap or not fits(self._heap[0].item):
            return None
        first = heapq.heappop(self._heap)
        self._virtual[first.rank] = max(first.start, self._virtual.get(first.rank, 0.0))
        self._forget(first)
        return first.item

    def remove(self, item: Item) -> bool:
        """Take it out, wherever it stands. Returns whether it waited."""
        waiting = self._waiting.get(item)
        if waiting is None:
            return False
        waiting.gone = True
        self._forget(waiting)
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._waiting):
            self._heap = [w for w in self._heap if not w.gone]
            heapq.heapify(self._heap)
        return True

    def _forget(self, waiting: _Waiting[Item]) -> None:
        del self._waiting[waiting.item]
        left = self._counts[waiting.tenant] - 1
        if left:
            self._counts[waiting.tenant] = left
            return
        del self._counts[waiting.tenant]
        if not self._waiting:
            # Nobody waits: all shares begin anew, and nothing is kept of tenants that come no more.
            self._heap.clear()
            self._finish.clear()
            self._virtual.clear()
