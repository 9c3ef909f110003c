"""Waits until a local cluster serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import aiohttp

from farfill.cli.local_cluster import DECODE, PREFILL, LocalCluster
from farfill.core.errors import FarfillError

READY_TIMEOUT_S = 300.0
POLL_S = 0.2


async def until_ready(cluster: LocalCluster, report: Callable[[str], None]) -> None:
    """Until the gateway sees both workers ready.

    Raises ChildDiedError when a role ends, FarfillError (reason not_ready) when it takes too long.
    """
    report(f"starting {', '.join(child.name for child in cluster.children)}")
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await _until_all(cluster, report)
    except TimeoutError:
        raise FarfillError(f"not ready after {READY_TIMEOUT_S:.0f} s", reason="not_ready") from None


async def _until_all(cluster: LocalCluster, report: Callable[[str], None]) -> None:
    told: set[str] = set()
    async with aiohttp.ClientSession(cluster.url, timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            cluster.check()
            ready = await _ready_roles(session)
            new, missing = sorted(ready - told), sorted({"gateway", DECODE, PREFILL} - ready)
            if new:
                # On a terminal this is shown until the next step, so it says what that one waits for.
                report(f"{', '.join(new)} ready" + (f"; waiting for {', '.join(missing)}" if missing else ""))
            told |= ready
            if not missing:
                return
            await asyncio.sleep(POLL_S)


async def _ready_roles(session: aiohttp.ClientSession) -> set[str]:
    """Names of the roles that are ready, as the gateway knows them; empty while it does not answer."""
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with session.get("/v1/farfill/instances") as response:
            instances = (await response.json())["instances"]
            return {"gateway"} | {i["name"] for i in instances if i["state"] == "ready"}
    return set()
