"""KV that vLLM cannot take: `kv_load_failure_policy` decides, with one kind of layers and with several alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.vllm_engine.calls import far, local, prompt_of, wait_until
from tests.vllm_engine.conftest import Fleet, Pair, start_engine
from tests.vllm_engine.no_kv import TOKENS, assert_fails_alone, late_or_not, name_any_size, start_without_kv

from farfill.engine.vllm.engine import VllmEngine

# One group of layers; recurrent states beside attention; windows beside full attention.
MODELS = ("llama", "granite", "gemma3")


@pytest.mark.parametrize("pair", MODELS, indirect=True)
@late_or_not
def test_the_prompt_is_computed_and_nothing_of_the_load_is_used(
    pair: Pair, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_any_size(monkeypatch)
    expected = local(pair.decode, prompt_of(TOKENS))[0].token_ids
    salt = f"fails late {late}"
    before = _counted(pair.decode, late)
    for turn in range(3):
        sink = start_without_kv(pair.prefill, pair.decode, salt, late=late)
        running = local(pair.decode, prompt_of(300), salt="beside")[0].token_ids
        assert sink.wait()[0].token_ids == expected
        assert sink.stats is not None
        assert sink.stats.kv_problem.startswith("broken: " if late else "refused: ")
        assert sink.stats.computed_tokens + sink.stats.cached_tokens == TOKENS - 1
        assert running == local(pair.decode, prompt_of(300))[0].token_ids
        wait_until(lambda turn=turn: _counted(pair.decode, late) == before + turn + 1, "it is counted", 5)
    assert local(pair.decode, prompt_of(TOKENS), salt=salt)[0].token_ids == expected
    assert far(pair.prefill, pair.decode, prompt_of(TOKENS), salt=salt).choices[0].token_ids == expected


@pytest.fixture(scope="module")
def strict(fleet: Fleet) -> Iterator[VllmEngine]:
    """An engine that the operator told to fail such requests. With one kind of layers: `test_attach`."""
    fleet.drop()
    engine = start_engine(fleet.model("granite"), "--kv-transfer-config.kv_load_failure_policy=fail")
    yield engine
    engine.close()


@late_or_not
def test_told_to_fail_vllm_fails_the_request_alone(
    strict: VllmEngine, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_any_size(monkeypatch)
    assert_fails_alone(strict, late)


def _counted(engine: VllmEngine, late: bool) -> int:
    totals = engine.load().totals
    return totals.loads_broken if late else totals.loads_refused
