"""vLLM as it runs in production, with its model compiled: KV leaves and arrives between the compiled parts."""

from __future__ import annotations

from tests.vllm_engine.calls import far, local, prompt_of
from tests.vllm_engine.conftest import Fleet, start_engine


def test_compiled_engine_gives_the_tokens_of_local_prefill(fleet: Fleet) -> None:
    """One engine in both roles; its prefix cache does not help, since each role has a salt of its own."""
    fleet.drop()
    engine = start_engine(fleet.model("gemma3"), eager=False)
    try:
        for length in (5, 128, 300, 1500):
            sink = far(engine, engine, prompt_of(length))
            assert sink.stats is not None
            assert sink.stats.computed_tokens == 0
            assert sink.choices[0].token_ids == local(engine, prompt_of(length))[0].token_ids
        engine.check_integrity()
    finally:
        engine.close()
