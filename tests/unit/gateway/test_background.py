"""Work that outlives its request: called in a row once the turn is over, each whatever others do, and at the close."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from farfill.gateway.background import BackgroundWork


async def test_calls_come_in_order_after_the_turn_and_one_that_fails_keeps_none_back():
    work, seen = BackgroundWork(), list[str]()

    def fail() -> None:
        raise ValueError("broken")

    with capture_logs() as logs:
        work.soon(lambda: seen.append("a"))
        work.soon(fail)
        work.soon(lambda: work.soon(lambda: seen.append("later")))
        work.soon(lambda: seen.append("b"))
        assert seen == []
        await asyncio.sleep(0)
        assert seen == ["a", "b"]
        await asyncio.sleep(0)
    assert seen == ["a", "b", "later"]
    assert [line["event"] for line in logs] == ["background_work_failed"]


async def test_what_was_to_be_called_is_called_at_the_close():
    work, seen = BackgroundWork(), list[str]()
    work.soon(lambda: seen.append("a"))
    await work.close()
    await asyncio.sleep(0)
    assert seen == ["a"]
