"""Work that outlives the request it belongs to, owned by the gateway: never lost, ended at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger("farfill.gateway")


class BackgroundWork:
    """A set of supervised tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls: list[Callable[[], None]] = []

    def soon(self, call: Callable[[], None]) -> None:
        """`call` it once this turn of the loop is over, in a row with all others of the turn: the same work done
        several times in a row costs less than between other things."""
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._call)
        self._calls.append(call)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` until it ends or the gateway closes; a failure is logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self) -> None:
        """Cancel all and wait; what was to be called is called now."""
        self._call()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:
                log.exception("background_work_failed", name="soon")

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background_work_failed", name=task.get_name(), exc_info=error)

    def __len__(self) -> int:
        return len(self._tasks)
