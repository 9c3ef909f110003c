"""Signals end the work through its own clean-up."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from farfill.cli.stoppable import run_stoppable


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("swallowed", [False, True])
def test_signal_cancels_the_work_and_is_the_exit_code(number: signal.Signals, code: int, *, swallowed: bool):
    cleaned: list[bool] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cleaned.append(True)
            if not swallowed:
                raise

    with pytest.raises(SystemExit) as ended:
        run_stoppable(work())
    assert ended.value.code == code
    assert cleaned == [True]


def test_ignored_hangup_stays_ignored():
    async def work() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        return "done"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_stoppable(work()) == "done"
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_interrupts_what_does_not_await(second: signal.Signals):
    cleaned: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            try:
                os.kill(os.getpid(), second)
                time.sleep(30)
            finally:
                cleaned.append("at once")

    with pytest.raises(SystemExit) as ended:
        run_stoppable(work())
    assert ended.value.code == 143
    assert cleaned == ["at once"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "as before"
