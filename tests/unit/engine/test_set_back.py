"""When memory or rows are short, sequences are set back and computed again: outputs stay what they would have been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farfill.engine.local import LocalEngine

MakeEngine = Callable[..., LocalEngine]


def bytes_for(engine: LocalEngine, harness: Any, prompt: int, output: int) -> int:
    """KV memory of one sequence of so many tokens."""
    slot = engine.reserve(harness.work(harness.prompt(prompt), max_tokens=output))
    nbytes = engine.load().kv_used_bytes
    slot.release()
    return nbytes


@pytest.fixture(autouse=True)
def small_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farfill.engine.scheduler._GROWTH_TOKENS", 8)


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 20])
def test_growing_sequences_set_each_other_back_and_give_their_solo_tokens(
    make_engine: MakeEngine, harness: Any, kind: str, prefix_bytes: int
) -> None:
    plain = make_engine()
    works = [
        harness.work(
            harness.prompt(20 + 5 * i, seed=i),
            max_tokens=70,
            temperature=0.8 * (i % 2),
            seed=i,
            logprobs=1 if i else None,
        )
        for i in range(4)
    ]
    expected = [harness.generate(plain, work) for work in works]
    # Room for all prompts, but for no more than two of the outputs.
    engine = make_engine(
        kv_bytes=bytes_for(plain, harness, 36, 70) * 2 + 64,
        output_reserve_tokens=4,
        prefix_bytes=prefix_bytes,
        step_token_budget=8,
    )
    sinks = [harness.start(engine, work) for work in works]
    results = [sink.wait() for sink in sinks]
    assert engine.load().totals.set_back_growth > 0
    assert engine.load().kv_most_bytes <= engine.info.kv_total_bytes
    for result, solo in zip(results, expected, strict=True):
        assert len(result.tokens()) == 70
        assert [e.index for e in result.events] == [0] * 70
        if not kind.endswith("bfloat16"):
            assert result.tokens() == solo.tokens()
            assert result.text() == solo.text()
        assert result.stats.computed_tokens + result.stats.cached_tokens == solo.stats.computed_tokens


def test_urgent_request_takes_the_memory_of_a_running_one(make_engine: MakeEngine, harness: Any, kind: str) -> None:
    plain = make_engine()
    low_work = harness.work(harness.prompt(30), max_tokens=150)
    urgent_work = harness.work(harness.prompt(60, seed=4), max_tokens=20)
    expected = [harness.generate(plain, work).tokens() for work in (low_work, urgent_work)]
    engine = make_engine(kv_bytes=bytes_for(plain, harness, 30, 150) + 64)
    low = harness.start(engine, low_work)
    assert low.first.wait(60)
    urgent = harness.start(engine, harness.work(harness.prompt(60, seed=4), max_tokens=20, priority=-1)).wait()
    assert not low.ended.is_set() or kind.startswith("fake")
    low.wait()
    assert engine.load().totals.set_back_priority == 1
    if not kind.endswith("bfloat16"):
        assert [low.tokens(), urgent.tokens()] == expected


def test_urgent_request_takes_the_row_of_the_youngest_of_lowest_priority(
    make_engine: MakeEngine, harness: Any, kind: str
) -> None:
    engine = make_engine(max_batch=3)
    works = [harness.work(harness.prompt(9, seed=i), max_tokens=50, priority=p) for i, p in enumerate((0, 5, 5))]
    sinks = [harness.start(engine, work) for work in works]
    for sink in sinks:
        assert sink.first.wait(60)
    urgent = harness.start(engine, harness.work(harness.prompt(9, seed=7), max_tokens=3, priority=-1))
    urgent.wait()
    for sink in sinks:
        sink.wait()
    assert engine.load().totals.set_back_priority == 1
    assert [len(sink.tokens()) for sink in sinks] == [50, 50, 50]
    if not kind.endswith("bfloat16"):
        assert sinks[2].tokens() == harness.generate(engine, works[2]).tokens()


def test_equal_priority_never_takes_from_who_runs(make_engine: MakeEngine, harness: Any) -> None:
    plain = make_engine()
    engine = make_engine(kv_bytes=bytes_for(plain, harness, 30, 60) + 64)
    first = harness.start(engine, harness.work(harness.prompt(30), max_tokens=60))
    second = harness.start(engine, harness.work(harness.prompt(30, seed=2), max_tokens=60))
    second.wait()
    assert first.ended.is_set()
    assert engine.load().totals.set_back_priority == engine.load().totals.set_back_growth == 0


def test_choices_are_set_back_together(make_engine: MakeEngine, harness: Any, kind: str) -> None:
    plain = make_engine()
    work = harness.work(harness.prompt(30), n=3, max_tokens=50, temperature=0.9, seed=3, priority=1)
    expected = harness.generate(plain, work)
    engine = make_engine(max_batch=3)
    sink = harness.start(engine, work)
    assert sink.first.wait(60)
    harness.start(engine, harness.work(harness.prompt(10), max_tokens=2)).wait()
    sink.wait()
    assert engine.load().totals.set_back_priority == 1
    if not kind.endswith("bfloat16"):
        assert [sink.tokens(i) for i in range(3)] == [expected.tokens(i) for i in range(3)]


def test_sequence_that_was_set_back_can_be_withdrawn(make_engine: MakeEngine, harness: Any) -> None:
    engine = make_engine(max_batch=1)
    low = harness.token_sink()
    running = engine.generate(harness.work(harness.prompt(20), max_tokens=100, priority=3), low)
    assert low.first.wait(60)
    urgent = harness.start(engine, harness.work(harness.prompt(100, seed=2), max_tokens=100))
    harness.wait_until(lambda: engine.load().totals.set_back_priority == 1 or low.ended.is_set())
    running.cancel()
    low.wait()
    assert len(urgent.wait().tokens()) == 100
