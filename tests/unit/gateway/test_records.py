from __future__ import annotations

import asyncio

from farfill.gateway.records import RequestRecord, RequestRecords


def record(request_id: str, outcome: str = "ok") -> RequestRecord:
    return RequestRecord(
        request_id=request_id, endpoint="chat", model="m", accepted_unix_s=0.0, stream=False, outcome=outcome
    )


async def test_oldest_records_are_dropped_and_the_newest_of_an_id_wins() -> None:
    records = RequestRecords(capacity=2)
    for name in ("a", "b", "a", "c"):
        records.publish(record(name, outcome=name + str(len(records))))
    assert await records.get("b", 0) is None
    again = await records.get("a", 0)
    assert again is not None
    assert again.outcome == "a2"
    assert len(records) == 2


async def test_waiting_ends_with_the_record_or_the_time() -> None:
    records = RequestRecords()
    assert await records.get("a", 0.01) is None
    waiting = [asyncio.create_task(records.get("a", 10)) for _ in range(2)]
    await asyncio.sleep(0)
    records.publish(record("a"))
    assert [found.request_id for found in await asyncio.gather(*waiting) if found is not None] == ["a", "a"]


async def test_waiter_that_leaves_is_forgotten() -> None:
    records = RequestRecords()
    waiting = asyncio.create_task(records.get("a", 10))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert records._waiters == {}
