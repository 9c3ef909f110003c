"""Tensor parallelism: heads of KV are exchanged between engines of any number of ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.vllm_engine.calls import Tokens as TokenSink
from tests.vllm_engine.calls import far, fill, local, prompt_of, start_prefill, work_of
from tests.vllm_engine.conftest import Fleet, start_engine


def test_one_rank_and_two_exchange_kv(fleet: Fleet) -> None:
    fleet.drop()
    model = fleet.model("llama")
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda flags: start_engine(model, *flags), ([], ["--tensor-parallel-size=2"]))
    try:
        assert one.info.fingerprint == two.info.fingerprint
        for length in (5, 128, 129, 700, 1500):
            expected = local(one, prompt_of(length))[0].token_ids
            assert local(two, prompt_of(length))[0].token_ids == expected
            for prefill, decode in ((one, two), (two, one), (two, two)):
                sink = far(prefill, decode, prompt_of(length), salt=f"{id(prefill)}{id(decode)}")
                assert sink.stats is not None
                assert sink.stats.computed_tokens == 0
                assert sink.choices[0].token_ids == expected, (length, prefill is one, decode is one)
        # Half of the heads alone, or in the other order, would not be noticed by a model that does not read them.
        handle, pieces = start_prefill(two, prompt_of(700, seed=8))
        pieces.wait()
        slot = one.reserve(work_of(prompt_of(700), "wrong"))
        fill(slot, pieces)
        pieces.pieces.clear()
        handle.release()
        sink = TokenSink()
        one.generate(work_of(prompt_of(700), "wrong"), sink, slot=slot, valid_tokens=699)
        assert sink.wait()[0].token_ids != local(one, prompt_of(700))[0].token_ids
        one.check_integrity()
        two.check_integrity()
    finally:
        one.close()
        two.close()
