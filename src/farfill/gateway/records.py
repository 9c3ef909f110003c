"""What happened to each of the last requests, for people and tools: a bounded ring, without any text.

A record is published when the generation and its far prefill both ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import msgspec

from farfill.wire.control import PrefillReport, StartEvent

CAPACITY = 1000


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


class RequestRecord(msgspec.Struct, kw_only=True):
    """GET /v1/farfill/requests/{request_id}. Durations in seconds of the gateway's monotonic clock.

    `placed` is what the gateway decided ("local" | "remote"), `placement` what really happened ("" when it
    never started). `start` comes from decode, `prefill` from the far side (null when local or failed).
    `prefill_instance` and `transfer_id` are the last ones, when others continued (`continuations`).
    `decisions` are lines for `farfill replay`: each policy that was asked, all it looked at, and its answer.
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
    finish_reasons: list[str] = []
    start: StartEvent | None = None
    prefill: PrefillReport | None = None
    prefill_error: LegError | None = None
    continuations: list[ContinuationRecord] = []
    prefill_leg_s: float | None = None
    decisions: list[Any] = []


class RequestRecords:
    """The last `capacity` records; the newest of a repeated id wins."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._waiters: dict[str, list[asyncio.Future[RequestRecord]]] = {}

    def publish(self, record: RequestRecord) -> None:
        """Keep `record` and wake those who wait for it."""
        self._records[record.request_id] = record
        self._records.move_to_end(record.request_id)
        while len(self._records) > self._capacity:
            self._records.popitem(last=False)
        for waiter in self._waiters.pop(record.request_id, []):
            if not waiter.done():
                waiter.set_result(record)

    async def get(self, request_id: str, wait_s: float) -> RequestRecord | None:
        """The record, waiting up to `wait_s` for it to be published."""
        found = self._records.get(request_id)
        if found is not None or wait_s <= 0:
            return found
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
