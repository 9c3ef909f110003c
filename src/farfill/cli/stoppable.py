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

    Once it has ended, whether or not it took the cancellation, the process exits with 128 + the signal's number. The
    second signal interrupts even what does not await, as the second Ctrl-C does. A signal that is ignored (SIGHUP under
    nohup) stays ignored.
    """
    told: list[signal.Signals] = []

    async def stoppable() -> T:
        main, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert main is not None

        def stop(number: signal.Signals) -> None:
            told.append(number)
            main.cancel()
            loop.remove_signal_handler(number)
            signal.signal(number, signal.default_int_handler)

        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, stop, number)
        return await work

    try:
        result = asyncio.run(stoppable())
    except (asyncio.CancelledError, KeyboardInterrupt):
        if not told:
            raise
    else:
        if not told:
            return result
    finally:
        for number in told:
            signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + told[0])
