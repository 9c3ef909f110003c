"""Fairness, isolation of failures, and the end of the engine, on the fake executor with its step hook."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from farfill.clock import VirtualClock
from farfill.core.errors import EngineError
from farfill.engine.fake import FakeEngine, FakeKV, FakeOptions
from farfill.engine.protocol import PrefillWork, TokenEvent


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """A started engine of four decode rows."""
    engine = FakeEngine(FakeOptions(max_batch=4))
    engine.start()
    yield engine
    engine.executor.step = lambda phase: None
    engine.close()
    engine.check_integrity()
    assert engine.load().kv_used_bytes == 0


class Gate:
    """A step hook that records phases and lets steps pass one by one once closed."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, phase: str) -> None:
        self.phases.append(phase)
        if not self._open.is_set():
            assert self._permits.acquire(timeout=60)

    def step(self) -> None:
        self._permits.release()

    def open(self) -> None:
        self._open.set()
        self._permits.release(1000)


def test_short_prompt_does_not_wait_for_a_long_one(engine: FakeEngine, harness: Any) -> None:
    gate = Gate()
    engine.executor.step = gate
    order: list[str] = []
    sinks = {}
    for name, length in (("long", 16 * 20 + 1), ("short", 33)):
        sink = harness.prefill_sink()
        sink.finished = lambda stats, name=name, sink=sink: (order.append(name), sink.ended.set())
        sinks[name] = (
            sink,
            engine.prefill(PrefillWork(request_id=name, prompt=harness.prompt(length), cache_salt=""), sink),
        )
    gate.open()
    for sink, handle in sinks.values():
        sink.wait()
        handle.release()
    assert order == ["short", "long"]


def test_running_stream_gets_a_token_between_any_two_prefill_chunks(engine: FakeEngine, harness: Any) -> None:
    gate = Gate()
    engine.executor.step = gate
    stream = harness.start(engine, harness.work(harness.prompt(1), max_tokens=60))
    harness.wait_until(lambda: gate.phases == ["decode"])
    sink = harness.prefill_sink()
    handle = engine.prefill(PrefillWork(request_id="p", prompt=harness.prompt(16 * 10 + 1), cache_salt=""), sink)
    gate.open()
    sink.wait()
    handle.release()
    stream.wait()
    chunks = [i for i, phase in enumerate(gate.phases) if phase == "prefill"]
    assert len(chunks) == 10
    assert all(b - a == 2 for a, b in pairwise(chunks))


def test_failing_prefill_step_fails_only_its_job(engine: FakeEngine, harness: Any) -> None:
    calls = iter([RuntimeError("broken chunk")])

    def step(phase: str) -> None:
        error = next(calls, None) if phase == "prefill" else None
        if error:
            raise error

    engine.executor.step = step
    first = harness.start(engine, harness.work(harness.prompt(40)))
    error = first.wait().error
    assert isinstance(error, EngineError)
    assert "broken chunk" in str(error)
    assert len(harness.generate(engine, harness.work(harness.prompt(40))).tokens()) == 12


def test_failing_row_of_a_batch_fails_alone(engine: FakeEngine, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = harness.generate(engine, harness.work(harness.prompt(20, 2))).tokens()
    append = FakeKV.append

    def broken(kv: FakeKV, token: int) -> None:
        append(kv, token)
        if kv.capacity_tokens == 30 - 1 + 12 and kv.tokens == 33:
            raise RuntimeError("broken row")

    monkeypatch.setattr(FakeKV, "append", broken)
    bad = harness.start(engine, harness.work(harness.prompt(30)))
    good = [harness.start(engine, harness.work(harness.prompt(20, 2))) for _ in range(3)]
    assert isinstance(bad.wait().error, EngineError)
    assert [sink.wait().tokens() for sink in good] == [expected] * 3


def test_raising_sink_ends_its_own_job_only(engine: FakeEngine, harness: Any) -> None:
    bad = harness.token_sink()
    accept = bad.token

    def token(event: TokenEvent) -> None:
        accept(event)
        raise ValueError("sink bug")

    bad.token = token
    engine.generate(harness.work(harness.prompt(20)), bad)
    assert isinstance(bad.wait().error, EngineError)
    assert len(harness.generate(engine, harness.work(harness.prompt(20))).tokens()) == 12


def test_death_of_the_thread_fails_all_work_and_later_calls(harness: Any) -> None:
    engine = FakeEngine(FakeOptions(max_batch=1))

    class Fatal(BaseException):
        pass

    def step(phase: str) -> None:
        raise Fatal("out of the ordinary")

    engine.executor.step = step
    sinks = [harness.start(engine, harness.work(harness.prompt(20, i))) for i in range(3)]
    engine.start()
    for sink in sinks:
        error = sink.wait().error
        assert isinstance(error, EngineError)
        assert error.reason == "engine_dead"
    with pytest.raises(EngineError, match="died"):
        engine.reserve(harness.work(harness.prompt(20)))
    assert engine.load().kv_used_bytes == 0
    engine.close()
    engine.check_integrity()


def test_waiting_prefills_hear_of_progress(engine: FakeEngine, harness: Any) -> None:
    gate = Gate()
    engine.executor.step = gate

    def prefill(length: int) -> Any:
        sink = harness.prefill_sink()
        return sink, engine.prefill(PrefillWork(request_id="w", prompt=harness.prompt(length), cache_salt=""), sink)

    running = [prefill(200) for _ in range(4)]
    harness.wait_until(lambda: engine.load().running_sequences == 4)
    sink, handle = prefill(20)
    for _ in range(6):
        gate.step()
    harness.wait_until(lambda: sink.steps >= 2)
    assert engine.load().waiting_sequences == 1
    gate.open()
    for other, other_handle in (*running, (sink, handle)):
        other.wait()
        other_handle.release()


def test_export_is_prefilled_beside_a_full_batch(engine: FakeEngine, harness: Any) -> None:
    streams = [harness.token_sink() for _ in range(4)]
    running = [
        engine.generate(harness.work(harness.prompt(3, i), max_tokens=3000), sink) for i, sink in enumerate(streams)
    ]
    for stream in streams:
        assert stream.first.wait(60)
    assert harness.prefill(engine, harness.prompt(40)).stats.computed_tokens == 39
    assert not any(stream.ended.is_set() for stream in streams)
    for one, stream in zip(running, streams, strict=True):
        one.cancel()
        stream.wait()


def test_engine_thread_can_close_the_engine(harness: Any) -> None:
    engine = FakeEngine()
    sink = harness.token_sink()
    sink.prefilled = lambda stats: engine.close()
    engine.generate(harness.work(harness.prompt(20)), sink)
    engine.start()
    sink.wait()
    engine.close()
    assert engine.load().kv_used_bytes == 0


def test_long_step_is_reported_while_it_runs(harness: Any) -> None:
    clock = VirtualClock()
    engine = FakeEngine(FakeOptions(prefill_chunk_tokens=16), lambda _: clock.advance(60.0), clock)
    engine.start()
    prefilled = harness.prefill(engine, harness.prompt(16))
    engine.close()
    # In the middle of its only chunk; at the end of that it is complete and told so.
    assert prefilled.steps == 1


def test_torch_reports_progress_layer_by_layer(tiny_models: Any, harness: Any) -> None:
    executor = tiny_models.load("llama-float32").executor
    calls: list[int] = []
    executor.on_progress = lambda: calls.append(1)
    try:
        executor.prefill(executor.allocate(32), harness.prompt(20))
    finally:
        executor.on_progress = lambda: None
    assert len(calls) == 2
