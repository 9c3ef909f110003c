"""vLLM that dies or stops: typed errors at once, nothing hangs, the worker hears of it. Ends the engines it uses."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import psutil
import pytest
from tests.vllm_engine.calls import GREEDY, prompt_of, start_local, start_prefill, wait_until, work_of
from tests.vllm_engine.conftest import Fleet, Pair

from farfill.core.errors import EngineError
from farfill.engine.vllm.engine import VllmEngine

LONG = replace(GREEDY, max_tokens=3_000)


def _processes(engine: VllmEngine) -> list[psutil.Process]:
    """vLLM's own, the server first."""
    folder = engine.folder.name
    server = next(
        p for p in psutil.process_iter() if any(folder in word for word in _command(p)) and p.pid != os.getpid()
    )
    return [server, *server.children(recursive=True)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _assert_dead(engine: VllmEngine, processes: list[psutil.Process], why: str) -> None:
    with pytest.raises(EngineError, match=why) as caught:
        engine.load()
    assert caught.value.reason == "engine_dead"
    for call in (
        lambda: engine.reserve(work_of(prompt_of(50), "x")),
        lambda: start_local(engine, prompt_of(50)),
        lambda: start_prefill(engine, prompt_of(50)),
    ):
        with pytest.raises(EngineError):
            call()
    wait_until(
        lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes), "all ended", 30
    )
    folder = engine.folder
    engine.close()
    assert not folder.exists()


def test_killed_engine_fails_its_requests_at_once(pair: Pair, fleet: Fleet) -> None:
    engine = pair.decode
    processes = _processes(engine)
    sinks = [start_local(engine, prompt_of(100 + i), LONG)[1] for i in range(4)]
    handle, pieces = start_prefill(engine, prompt_of(3_000))
    for sink in sinks:
        assert sink.first.wait(60)
    worker = processes[-1]
    worker.send_signal(signal.SIGKILL)
    for sink in sinks:
        with pytest.raises(EngineError):
            sink.wait()
    pieces.wait()
    pieces.pieces.clear()
    handle.release()
    wait_until(lambda: _dead(engine), "the engine knows", 15)
    _assert_dead(engine, processes, "gone|ended|dead")


def test_stalled_engine_counts_as_dead(pair: Pair, fleet: Fleet) -> None:
    engine = pair.prefill
    processes = _processes(engine)
    _, sink = start_local(engine, prompt_of(100), LONG)
    assert sink.first.wait(60)
    for process in processes[1:]:
        process.suspend()
    with pytest.raises(EngineError, match="did not end a step"):
        sink.wait()
    _assert_dead(engine, processes, "did not end a step")
    fleet.drop()


def _dead(engine: VllmEngine) -> bool:
    try:
        engine.load()
    except EngineError:
        return True
    return False
