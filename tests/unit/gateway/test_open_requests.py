"""Requests run out of time each at its own, with one timer for all, and at once when the gateway stops."""

from __future__ import annotations

import asyncio

import pytest

from farfill.gateway.open_requests import OpenRequests

DEADLINE_S = 10.0
NEVER_S = 3600.0


async def late(requests: OpenRequests, timeout_s: float) -> bool:
    """Whether a request that waits for good runs out of time."""
    try:
        async with asyncio.timeout(None) as limit:
            requests.begin(limit, timeout_s)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                requests.over(limit)
    except TimeoutError:
        return True
    return False


async def test_each_runs_out_of_time_at_its_own_whatever_came_before():
    requests = OpenRequests()
    async with asyncio.timeout(DEADLINE_S):
        for_long = asyncio.create_task(late(requests, NEVER_S))
        await asyncio.sleep(0)
        assert await asyncio.gather(late(requests, 0.02), late(requests, 0.01)) == [True, True]
        assert await late(requests, 0.01)  # after the timer rang for others
        assert not for_long.done()
        requests.end()
        assert await for_long
        assert await late(requests, NEVER_S)  # one that comes now


async def test_a_request_that_is_over_hears_nothing_of_the_time():
    requests = OpenRequests()
    async with asyncio.timeout(DEADLINE_S):
        async with asyncio.timeout(None) as limit:
            requests.begin(limit, 0.01)
            requests.over(limit)
        running = asyncio.create_task(late(requests, NEVER_S))
        assert await late(requests, 0.02)
        assert not limit.expired()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
