"""Runs what owns processes and files so that SIGTERM and SIGHUP make it clean up, as Ctrl-C does."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_stoppable(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, but SIGTERM and SIGHUP cancel `work` too.

    Once it has ended, whether or not it took the cancellation, the process exits with 128 + the signal's number.
    A signal that is ignored (SIGHUP under nohup) stays ignored.
    """
    told: list[signal.Signals] = []

    async def stoppable() -> T:
        main = asyncio.current_task()
        assert main is not None

        def stop(number: signal.Signals) -> None:
            told.append(number)
            main.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await work

    try:
        result = asyncio.run(stoppable())
    except asyncio.CancelledError:
        if not told:
            raise
    else:
        if not told:
            return result
    sys.exit(128 + told[0])
