"""Whatever is wrong with a request's file, vLLM computes the prompt itself, says why, and goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.vllm_engine.calls import local, prompt_of, start_prefill, wait_until
from tests.vllm_engine.conftest import Pair

from farfill.core.errors import EngineError
from farfill.engine.vllm.api import VllmApi
from farfill.engine.vllm.files import KVFile
from farfill.engine.vllm.messages import ExportParams, ImportParams, export_params, import_params

PROMPT = prompt_of(600)


def _replace_by_link(params: dict[str, Any], other: Path) -> None:
    os.unlink(params["file"])
    os.symlink(other, params["file"])


BREAKERS: dict[str, tuple[Callable[[dict[str, Any], Path], None], str]] = {
    "missing": (lambda p, _: os.unlink(p["file"]), "No such file"),
    "short": (lambda p, _: os.truncate(p["file"], 100), "100 bytes instead of"),
    "long": (lambda p, _: os.truncate(p["file"], 10_000_000), "10000000 bytes instead of"),
    "of another request": (lambda p, _: p.update(key="0" * 16), "another request's file"),
    "elsewhere": (lambda p, other: p.update(file=str(other)), "file elsewhere"),
    "by a link elsewhere": (_replace_by_link, "file elsewhere"),
    "for another prompt": (lambda p, _: p.update(num_tokens=300), "of a prompt of other length"),
    "claiming too much": (lambda p, _: p.update(valid_tokens=10_000), "of a prompt of other length"),
    "nonsense": (lambda p, _: p.update(valid_tokens="many"), "Expected `int`"),
}


def _ask(pair: Pair, params: dict[str, Any], *, max_tokens: int = 24) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        api = VllmApi(pair.decode.endpoint)
        await api.open()
        try:
            return await api.once(
                {
                    "token_ids": list(PROMPT),
                    "sampling_params": {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True},
                    "cache_salt": "files",
                    "kv_transfer_params": params,
                }
            )
        finally:
            await api.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("how", BREAKERS)
def test_a_file_that_is_wrong_counts_as_none(pair: Pair, how: str, tmp_path: Path) -> None:
    expected = local(pair.decode, PROMPT)[0].token_ids
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(bytes(64))
    handle, pieces = start_prefill(pair.decode, PROMPT, salt="breaker")
    pieces.wait()
    file = handle.file  # type: ignore[attr-defined]
    assert isinstance(file, KVFile)
    params = import_params(ImportParams(file.key, str(file.path), file.nbytes, 599, 599))
    spoil, reason = BREAKERS[how]
    inner = params["farfill"]
    assert isinstance(inner, dict)
    spoil(inner, elsewhere)
    answer = _ask(pair, params)
    pieces.pieces.clear()
    handle.release()
    assert answer["choices"][0]["token_ids"] == expected
    asked = answer["request_id"]
    wait_until(lambda: any(asked in line and reason in line for line in pair.decode.log(30).splitlines()), reason, 5)
    assert elsewhere.read_bytes() == bytes(64)


def test_what_stock_routers_send_does_no_harm(pair: Pair) -> None:
    expected = local(pair.decode, PROMPT)[0].token_ids
    params = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None, "remote_host": None}
    assert _ask(pair, params)["choices"][0]["token_ids"] == expected


def test_an_export_that_fails_is_an_error_at_once_and_vllm_goes_on(pair: Pair) -> None:
    handle, pieces = start_prefill(pair.prefill, prompt_of(1400), salt="fails")
    os.unlink(handle.file.path)  # type: ignore[attr-defined]
    pieces.wait()
    pieces.pieces.clear()
    handle.release()
    assert isinstance(pieces.error, EngineError)
    assert "did not export" in str(pieces.error)
    local(pair.prefill, PROMPT)


def test_an_export_may_not_leave_the_folder(pair: Pair, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(10_000_000))
    _ask(pair, export_params(ExportParams("0" * 16, str(outside), len(PROMPT))), max_tokens=1)
    assert outside.read_bytes() == bytes(10_000_000)
