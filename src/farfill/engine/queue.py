"""Jobs that wait to start, and whose turn it is: by priority, then tenants by what they had, then by age.

What a tenant had is counted in tokens admitted (start-time fair queueing, Goyal, Vin and Cheng, 1996): a tenant that
comes new, or comes back, starts level with those that are being served. Now and then the oldest goes first, whatever
its priority, so that nothing waits for ever. Not safe from several threads: the scheduler's lock is its owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from farfill.engine.jobs import Job

# Every so many starts the oldest job is next.
_STARTS_PER_FAIR_START = 8


class WaitingQueue:
    """Jobs by the order in which they are to start."""

    def __init__(self) -> None:
        self._jobs: dict[Job, None] = {}
        self._had_tokens: dict[str, int] = {}
        self._level_tokens = 0
        self._starts = 0
        self._numbers = 0
        self._order: list[Job] | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def add(self, job: Job) -> None:
        """Let a job wait. One that was set back keeps its age and is not charged again."""
        if not job.number:
            self._numbers += 1
            job.number = self._numbers
        self._jobs[job] = None
        self._order = None
        self._had_tokens[job.tenant] = max(self._had_tokens.get(job.tenant, 0), self._level_tokens)

    def remove(self, job: Job) -> None:
        """Forget a job that does not wait any more."""
        self._jobs.pop(job, None)
        self._order = None

    def start(self, job: Job) -> None:
        """A job starts: its tenant is charged for it."""
        self.remove(job)
        self._starts += 1
        if job.charged:
            return
        job.charged = True
        had = self._had_tokens.get(job.tenant, self._level_tokens)
        self._level_tokens = max(self._level_tokens, had)
        self._had_tokens[job.tenant] = had + _cost(job)
        waiting = {other.tenant for other in self._jobs}
        self._had_tokens = {
            tenant: tokens
            for tenant, tokens in self._had_tokens.items()
            if tokens > self._level_tokens or tenant in waiting
        }

    def in_order(self) -> list[Job]:
        """All jobs, the next one first."""
        if self._order is None:
            self._order = self._make_order()
        return self._order

    def _make_order(self) -> list[Job]:
        had = dict(self._had_tokens)
        heap: list[tuple[int, int, int, Job]] = []
        lines: dict[tuple[int, str], deque[Job]] = {}
        for job in sorted(self._jobs, key=lambda job: job.number):
            lines.setdefault((job.priority, job.tenant), deque()).append(job)
        for (priority, tenant), line in lines.items():
            heappush(heap, (priority, had.get(tenant, 0), line[0].number, line[0]))
        order: list[Job] = []
        while heap:
            priority, counted, _, job = heappop(heap)
            line = lines[priority, job.tenant]
            if counted != had.get(job.tenant, 0):
                # Served at another priority since it was pushed.
                heappush(heap, (priority, had[job.tenant], job.number, job))
                continue
            order.append(line.popleft())
            if not job.charged:
                had[job.tenant] = had.get(job.tenant, 0) + _cost(job)
            if line:
                heappush(heap, (priority, had.get(job.tenant, 0), line[0].number, line[0]))
        if len(order) > 1 and self._starts % _STARTS_PER_FAIR_START == _STARTS_PER_FAIR_START - 1:
            oldest = min(order, key=lambda job: job.number)
            order.remove(oldest)
            order.insert(0, oldest)
        return order


def _cost(job: Job) -> int:
    return job.demand.rows * job.demand.capacity_tokens
