"""Generations whose KV vLLM cannot take."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.vllm_engine.calls import Tokens, fill, local, prompt_of, start_prefill, wait_until, work_of

from farfill.core.errors import EngineError
from farfill.engine.vllm import jobs
from farfill.engine.vllm.engine import VllmEngine
from farfill.engine.vllm.files import KVFile
from farfill.engine.vllm.messages import ImportParams

TOKENS = 900
# Whether vLLM finds out before it copies, or by it.
late_or_not = pytest.mark.parametrize("late", [False, True], ids=["not found", "too short"])


def name_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests name whatever size their file has: so nobody finds out before the copy."""

    def params(key: str, file: str, nbytes: int, num_tokens: int, valid_tokens: int) -> ImportParams:
        found = os.stat(file).st_size if os.path.exists(file) else nbytes
        return ImportParams(key, file, found, num_tokens, valid_tokens)

    monkeypatch.setattr(jobs, "ImportParams", params)


def start_without_kv(prefill: VllmEngine, decode: VllmEngine, salt: str, *, late: bool) -> Tokens:
    """Begin a generation of `prompt_of(TOKENS)` whose KV is another prompt's, in a file that vLLM does not find, or
    (`name_any_size`) that is too short.
    """
    handle, pieces = start_prefill(prefill, prompt_of(TOKENS, seed=9), salt=f"other {salt}")
    pieces.wait()
    slot = decode.reserve(work_of(prompt_of(TOKENS), salt))
    assert isinstance(slot, KVFile)
    fill(slot, pieces)
    pieces.pieces.clear()
    handle.release()
    if late:
        slot.path.write_bytes(b"short")
    else:
        slot.path.unlink()
    sink = Tokens()
    decode.generate(work_of(prompt_of(TOKENS), salt), sink, slot=slot, valid_tokens=TOKENS - 1)
    return sink


def assert_fails_alone(engine: VllmEngine, late: bool) -> None:
    """One request without KV ends with an error; others, and later ones, go on as if it had not been."""
    expected = local(engine, prompt_of(TOKENS))[0].token_ids
    salt = f"fails late {late}"
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(local, engine, prompt_of(400), salt=salt)
        sink = start_without_kv(engine, engine, salt, late=late)
        with pytest.raises(EngineError):
            sink.wait()
        assert beside.result()[0].token_ids == local(engine, prompt_of(400))[0].token_ids
    assert local(engine, prompt_of(TOKENS), salt=salt)[0].token_ids == expected
    wait_until(lambda: not engine.load().kv_used_bytes, "KV memory is free", 10)
    engine.check_integrity()
