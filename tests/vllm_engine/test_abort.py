"""Withdrawn work, at every phase, leaves no shared memory and no block of vLLM's behind."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from tests.vllm_engine.calls import (
    GREEDY,
    Pieces,
    Tokens,
    far,
    fill,
    local,
    prompt_of,
    start_local,
    start_prefill,
    wait_until,
    work_of,
)
from tests.vllm_engine.conftest import Pair

from farfill.core.errors import CancelledWorkError, CapacityError, InvalidRequestError
from farfill.engine.vllm.engine import VllmEngine
from farfill.engine.vllm.health import read_vitals
from farfill.kv.manifest import build_manifest

FREE_WITHIN_S = 2.0
LONG = replace(GREEDY, max_tokens=2_000)


def assert_free(engine: VllmEngine) -> None:
    """Within two seconds, by vLLM's own count: its next step, for one small request, finds all else free."""
    wait_until(lambda: engine.load().kv_used_bytes == 0, "shared memory is free", FREE_WITHIN_S)
    engine.check_integrity()
    local(engine, prompt_of(3), replace(GREEDY, max_tokens=2))
    seen = engine.load().exposition
    wait_until(lambda: engine.load().exposition != seen, "vLLM's metrics are read again", 15)
    vitals = read_vitals(engine.load().exposition)
    assert vitals.kv_usage < 0.02, "vLLM holds blocks of requests that are over"
    assert b"vllm:num_requests_running" in vitals.exposition


def _prefilling(pair: Pair) -> tuple[VllmEngine, Pieces]:
    handle, pieces = start_prefill(pair.prefill, prompt_of(1500), salt="abort")
    wait_until(lambda: pieces.pieces, "the first pieces are there")
    pieces.pieces.clear()
    handle.release()
    return pair.prefill, pieces


def _prefilled(pair: Pair) -> tuple[VllmEngine, None]:
    handle, pieces = start_prefill(pair.prefill, prompt_of(1500), salt="done")
    pieces.wait()
    pieces.pieces.clear()
    handle.release()
    handle.release()
    handle.cancel()
    assert pieces.error is None
    return pair.prefill, None


def _reserved(pair: Pair) -> tuple[VllmEngine, None]:
    slot = pair.decode.reserve(work_of(prompt_of(1500), "abort"))
    assert pair.decode.load().kv_used_bytes == slot.manifest.total_bytes
    slot.release()
    slot.release()
    return pair.decode, None


def _importing(pair: Pair) -> tuple[VllmEngine, Tokens]:
    prompt = prompt_of(1500)
    slot = pair.decode.reserve(work_of(prompt, "abort"))
    sink = Tokens()
    running = pair.decode.generate(work_of(prompt, "abort", LONG), sink, slot=slot, valid_tokens=1499)
    running.cancel()
    return pair.decode, sink


def _computing(pair: Pair) -> tuple[VllmEngine, Tokens]:
    running, sink = start_local(pair.decode, prompt_of(3_000), LONG, salt="abort")
    running.cancel()
    return pair.decode, sink


def _streaming(pair: Pair) -> tuple[VllmEngine, Tokens]:
    running, sink = start_local(pair.decode, prompt_of(400), LONG, salt="abort")
    assert sink.first.wait(60)
    running.cancel()
    running.cancel()
    return pair.decode, sink


@pytest.mark.parametrize("phase", [_prefilling, _prefilled, _reserved, _importing, _computing, _streaming])
def test_withdrawn_work_frees_everything(pair: Pair, phase: object) -> None:
    assert callable(phase)
    engine, sink = phase(pair)
    if sink is not None:
        wait_until(lambda: sink.error is not None, "the sink hears of it", FREE_WITHIN_S)
        assert isinstance(sink.error, CancelledWorkError)
    assert_free(engine)


@pytest.mark.parametrize("pair", ["llama", "granite"], indirect=True)
def test_withdrawn_at_any_moment_of_the_import(pair: Pair) -> None:
    """Whenever the engine takes its file away, vLLM has it for good or never begins with it."""
    prompt = prompt_of(1200)
    expected = local(pair.decode, prompt)[0].token_ids
    handle, pieces = start_prefill(pair.prefill, prompt)
    pieces.wait()
    for turn in range(25):
        slot = pair.decode.reserve(work_of(prompt, f"moment{turn}"))
        fill(slot, pieces)
        sink = Tokens()
        running = pair.decode.generate(work_of(prompt, f"moment{turn}"), sink, slot=slot, valid_tokens=1199)
        threading.Event().wait(turn * 0.002)  # another moment each time
        running.cancel()
        wait_until(lambda sink=sink: sink.over or sink.error, "it is over", FREE_WITHIN_S)
    pieces.pieces.clear()
    handle.release()
    assert far(pair.prefill, pair.decode, prompt, salt="after").choices[0].token_ids == expected
    assert_free(pair.decode)


def test_shared_memory_has_a_bound(pair: Pair) -> None:
    work = work_of(prompt_of(4_000), "full")
    each = build_manifest(pair.decode.info.layout, 3_999).total_bytes
    slots = [pair.decode.reserve(work) for _ in range((256 << 20) // each)]
    with pytest.raises(CapacityError) as caught:
        pair.decode.reserve(work)
    assert caught.value.reason == "kv_memory"
    for slot in slots:
        slot.release()


def test_more_prompts_than_blocks_are_set_back_and_still_right(pair: Pair) -> None:
    """vLLM preempts when its cache is full: what was imported is computed again."""
    sampling = replace(GREEDY, max_tokens=40)
    prompts = [prompt_of(3_700, seed=seed) for seed in range(8)]
    expected = [local(pair.decode, prompt, sampling)[0].token_ids for prompt in prompts]
    sinks = [start_local(pair.decode, prompt, sampling, salt=f"many{i}")[1] for i, prompt in enumerate(prompts)]
    assert [sink.wait()[0].token_ids for sink in sinks] == expected


def test_a_slot_for_other_work_is_refused_and_stays_the_callers(pair: Pair) -> None:
    slot = pair.decode.reserve(work_of(prompt_of(300), "x"))
    with pytest.raises(InvalidRequestError) as caught:
        pair.decode.generate(work_of(prompt_of(301), "x"), Tokens(), slot=slot, valid_tokens=300)
    assert caught.value.param == "slot"
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        pair.decode.generate(work_of(prompt_of(300), "x"), Tokens(), slot=slot, valid_tokens=17)
    slot.release()
