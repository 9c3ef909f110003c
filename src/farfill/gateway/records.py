"""What happened to each of the last requests, for people and tools: a ring bounded by count and bytes, without text.

A record is published when the generation and its far prefill both ended; until then it can be looked at as it is.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import msgspec

from farfill.wire.control import PrefillReport, StartEvent

CAPACITY = 1000
MAX_BYTES = 64 << 20
# By estimate: encoding each record to weigh it would cost more than keeping it.
RECORD_BYTES = 4096
DECISION_BYTES = 1024
CANDIDATE_BYTES = 400


class LegError(msgspec.Struct, kw_only=True):
    """Why a leg failed."""

    reason: str
    message: str


class ContinuationRecord(msgspec.Struct, kw_only=True):
    """One sender failed for `reason` (a fallback reason), and `prefill_instance` took over.

    `transfer_id` is the failed one's; `held_bytes` of KV were at decode by then. `outcome`: "ok", "cancelled", or the
    reason the next one failed for; "" while it runs.
    """

    reason: str
    detail: str
    transfer_id: str
    failed_instance: str
    failed_site: str
    prefill_instance: str
    prefill_site: str
    held_bytes: int
    outcome: str = ""


class TryRecord(msgspec.Struct, kw_only=True):
    """One placement that was tried, `at_s` after the request was accepted; `took_s` to decide."""

    at_s: float
    took_s: float
    decode_instance: str
    prefill_instance: str
    reason: str
    decode_version: str = ""
    prefill_version: str = ""


class RequestRecord(msgspec.Struct, kw_only=True):
    """GET /v1/farfill/requests/{request_id}. Durations in seconds of the gateway's monotonic clock.

    `placed` is what the gateway decided ("local" | "remote"), `placement` what really happened ("" when it
    never started). `start` comes from decode, `prefill` from the far side (null when local or failed).
    `prefill_instance` and `transfer_id` are the last ones, when others continued (`continuations`).
    `decisions` are lines for `farfill replay`: each policy that was asked, all it looked at, and its answer.
    `stages_at_s` is when each of `stages_s` began, after the request was accepted; `tries` are all placements tried.
    A request of several prompts has one record a prompt: the further ones are named `{request_id}-{i}`.
    """

    request_id: str
    endpoint: str
    model: str
    accepted_unix_s: float
    stream: bool
    outcome: str = ""
    error: LegError | None = None
    placed: str = ""
    placement: str = ""
    reason: str = ""
    fallback: str = "none"
    fallback_detail: str = ""
    decode_instance: str = ""
    decode_site: str = ""
    prefill_instance: str = ""
    prefill_site: str = ""
    transfer_id: str = ""
    prompt_tokens: int = 0
    tenant: str = ""
    expected_hit_tokens: int = 0
    expected_far_hit_tokens: int = 0
    uncached_tokens: int = 0
    threshold_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    duration_s: float = 0.0
    stages_s: dict[str, float] = {}
    stages_at_s: dict[str, float] = {}
    tries: list[TryRecord] = []
    finish_reasons: list[str] = []
    start: StartEvent | None = None
    prefill: PrefillReport | None = None
    prefill_error: LegError | None = None
    continuations: list[ContinuationRecord] = []
    prefill_leg_s: float | None = None
    decisions: list[Any] = []


class RequestRecords:
    """The last `capacity` records, of at most about `max_bytes`; the newest of a repeated id wins."""

    def __init__(self, capacity: int = CAPACITY, max_bytes: int = MAX_BYTES) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._bytes = 0
        self._running: dict[str, RequestRecord] = {}
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._weights: dict[str, int] = {}
        self._waiters: dict[str, list[asyncio.Future[RequestRecord]]] = {}

    def publish(self, record: RequestRecord) -> None:
        """Keep `record` and wake those who wait for it."""
        if self._running.get(record.request_id) is record:
            del self._running[record.request_id]
        if self._records.pop(record.request_id, None) is not None:
            self._bytes -= self._weights.pop(record.request_id)
        self._records[record.request_id] = record
        weight = self._weights[record.request_id] = weight_bytes(record)
        self._bytes += weight
        while len(self._records) > self._capacity or (self._bytes > self._max_bytes and len(self._records) > 1):
            oldest, _ = self._records.popitem(last=False)
            self._bytes -= self._weights.pop(oldest)
        if self._waiters:
            for waiter in self._waiters.pop(record.request_id, []):
                if not waiter.done():
                    waiter.set_result(record)

    def begin(self, record: RequestRecord) -> None:
        """`record` will be published; it can be looked at meanwhile."""
        self._running[record.request_id] = record

    def look(self, request_id: str) -> RequestRecord | None:
        """As it is now, finished or not."""
        return self._running.get(request_id) or self._records.get(request_id)

    def runs(self, request_id: str) -> bool:
        """Whether it is still to be published."""
        return request_id in self._running

    async def get(self, request_id: str, wait_s: float) -> RequestRecord | None:
        """The record, waiting up to `wait_s` for it to be published."""
        found = self._records.get(request_id)
        return found if found is not None or wait_s <= 0 else await self.next(request_id, wait_s)

    async def next(self, request_id: str, wait_s: float) -> RequestRecord | None:
        """The next record of this id to be published, within `wait_s`."""
        waiter: asyncio.Future[RequestRecord] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(request_id, []).append(waiter)
        try:
            async with asyncio.timeout(wait_s):
                return await waiter
        except TimeoutError:
            return None
        finally:
            waiters = self._waiters.get(request_id, [])
            if waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[request_id]

    def __len__(self) -> int:
        return len(self._records)


def weight_bytes(record: RequestRecord) -> int:
    """About what it holds in memory."""
    weight = RECORD_BYTES + DECISION_BYTES * len(record.decisions)
    for decision in record.decisions:
        weight += CANDIDATE_BYTES * len(getattr(decision.inputs, "candidates", ()))
    return weight
