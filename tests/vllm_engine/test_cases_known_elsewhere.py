"""Failures that users of other KV connectors reported to the vLLM project, by number, through ours.

Each gives right tokens or an error, and nothing is left behind. What the numbers stand for, in short:
52234, a reference to KV that is wrong, used up or old gave other prompts' answers with status 200; 49250, a load that
is refused left part of it behind; 49238, decode died when prefill came back; 46283, blocks of an aborted load stayed
taken when prefill went too; 41269, KV stayed held for a request that decode refused; 25067, the end of a request that
had ended already was fatal.
"""

from __future__ import annotations

import asyncio
import secrets
import urllib.error
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import psutil
import pytest
from tests.system.cluster import DECODE, PREFILL, Cluster
from tests.vllm_engine.calls import (
    GREEDY,
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
from tests.vllm_engine.fronts import TEXT, answer_of, asked, front, held, spoilt
from tests.vllm_engine.router import post

from farfill.verify.client import Generation
from farfill.verify.prompts import load_corpus

PROMPT = TEXT[:500]


def _fetched(params: dict[str, Any]) -> dict[str, Any]:
    """`params`, whose KV nobody holds any more."""
    answer_of(front(DECODE), asked(PROMPT, kv_transfer_params=params, cache_salt="first", max_tokens=1))
    return params


def _unknown() -> dict[str, Any]:
    return spoilt(_fetched(held(PROMPT)), transfer_id="f" * 32)


def _out_of_range() -> dict[str, Any]:
    params = held(PROMPT)
    return spoilt(params, num_tokens=params["farfill"]["num_tokens"] + 700)


def _used_up() -> dict[str, Any]:
    return _fetched(held(PROMPT))


def _old() -> dict[str, Any]:
    """Used up, and its memory is another prompt's by now."""
    params = _used_up()
    answer_of(front(DECODE), asked(TEXT[9:509], kv_transfer_params=held(TEXT[9:509]), cache_salt="second"))
    return params


def _of_another_prompt() -> dict[str, Any]:
    return held(TEXT[7:507])


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (_unknown, "prefill_failed"),
        (_out_of_range, "prefill_failed"),
        (_used_up, "ticket_invalid"),
        (_old, "ticket_invalid"),
        (_of_another_prompt, ""),  # found out by vLLM's own token ids
    ],
)
def test_52234_a_reference_that_is_wrong_never_changes_the_answer(
    cluster: Cluster, reference: Callable[[], dict[str, Any]], reason: str
) -> None:
    expected = answer_of(front(DECODE), asked(PROMPT, cache_salt="near"))
    before = len(cluster.events(DECODE, "fallback"))
    params = reference()
    answer = answer_of(front(DECODE), asked(PROMPT, kv_transfer_params=params, cache_salt=reference.__name__))
    assert answer == expected
    assert [event["reason"] for event in cluster.events(DECODE, "fallback")[before:]] == [reason] * bool(reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "f" * 32}, "fingerprint_mismatch"),
        ({"url": "https://127.0.0.1:1"}, "prefill_unreachable"),
        ({"num_tokens": "many"}, "protocol"),
    ],
)
def test_52234_what_cannot_be_fetched_is_computed(cluster: Cluster, change: dict[str, Any], reason: str) -> None:
    expected = answer_of(front(DECODE), asked(PROMPT, cache_salt="near"))
    params = spoilt(_fetched(held(PROMPT)), transfer_id=secrets.token_hex(16), **change)
    assert answer_of(front(DECODE), asked(PROMPT, kv_transfer_params=params, cache_salt=reason)) == expected
    assert cluster.events(DECODE, "fallback")[-1]["reason"] == reason


async def test_49238_either_side_comes_back_under_load(cluster: Cluster) -> None:
    """Killed with requests under way: the other one lives, answers are right or errors, both work together again."""
    async with cluster.client() as client:
        corpus = await load_corpus(client)
        prompts = [corpus.prompt_of(400 + 150 * i, variant=20 + i) for i in range(4)]
        expected = [
            (await client.complete(Generation(prompt=prompt, max_tokens=8, salt="x", forced="local"))).token_ids
            for prompt in prompts
        ]
        for name, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
            lives = psutil.Process(cluster.pid(other))
            load = _Load(client, prompts, expected, salt=name)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.run())
                await asyncio.to_thread(wait_until, lambda load=load: load.right >= 4, "requests flow")
                cluster.kill(name)
                await cluster.respawn(name)
                before = load.far
                again = lambda load=load, before=before: load.far > before  # noqa: E731
                await asyncio.to_thread(wait_until, again, "far again", 60)
                load.over = True
            assert not load.wrong
            assert name == DECODE or not load.errors, load.errors
            assert lives.is_running()


class _Load:
    """Four clients that ask again and again, and what became of it."""

    def __init__(self, client: Any, prompts: list[Any], expected: list[Any], *, salt: str) -> None:
        self._client, self._prompts, self._expected, self._salt = client, prompts, expected, salt
        self.over = False
        self.right = self.far = 0
        self.wrong: list[Any] = []
        self.errors: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._ask(index) for index in range(len(self._prompts))))

    async def _ask(self, index: int) -> None:
        turn = 0
        while not self.over:
            turn += 1
            try:
                answer = await self._client.complete(
                    Generation(prompt=self._prompts[index], max_tokens=8, salt=f"{self._salt}{index}.{turn}")
                )
            except Exception as error:
                self.errors.append(repr(error))
                await asyncio.sleep(0.2)
                continue
            if answer.token_ids != self._expected[index]:
                self.wrong.append(answer)
            self.right += 1
            self.far += answer.placement == "remote"


async def test_41269_a_request_that_decode_refuses_frees_what_prefill_holds(cluster: Cluster) -> None:
    body = asked(PROMPT, kv_transfer_params=await asyncio.to_thread(held, PROMPT), temperature=-1)
    with pytest.raises(urllib.error.HTTPError) as caught:
        await asyncio.to_thread(post, f"{front(DECODE)}/v1/completions", body)
    assert caught.value.code == 400
    await _assert_nothing_is_held(cluster)


async def test_46283_a_request_that_both_sides_lose_leaves_nothing(cluster: Cluster) -> None:
    """The client goes while KV is on its way, and so does prefill's part."""
    async with openai.AsyncOpenAI(base_url=f"{front(DECODE)}/v1", api_key="none", max_retries=0) as client:
        for turn in range(8):
            params = await asyncio.to_thread(held, TEXT[turn : turn + 1500])
            asking = asyncio.create_task(
                client.completions.create(
                    model="tiny",
                    prompt=TEXT[turn : turn + 1500],
                    max_tokens=500,
                    extra_body={"kv_transfer_params": params},
                )
            )
            done, _ = await asyncio.wait([asking], timeout=0.01 * turn)
            assert not done
            asking.cancel()
            await asyncio.wait([asking])
    await _assert_nothing_is_held(cluster)


async def _assert_nothing_is_held(cluster: Cluster) -> None:
    """By both workers' own count; what decode never asked for goes after `kv_transfer.timeout_ms`."""
    async with cluster.tools() as (_, scraping):
        for name in (PREFILL, DECODE):
            async with asyncio.timeout(40):
                while (await scraping.worker(name)).total("farfill_kv_used_bytes"):
                    await asyncio.sleep(0.2)


@pytest.mark.parametrize("pair", ["llama", "granite"], indirect=True)
def test_49250_a_load_that_is_refused_leaves_no_part_behind(pair: Pair) -> None:
    """Whatever vLLM computes and caches after it, also under the same salt, is as if nothing had been loaded."""
    prompt = prompt_of(900)
    expected = local(pair.decode, prompt)[0].token_ids
    for turn in range(3):
        handle, pieces = start_prefill(pair.prefill, prompt_of(900, seed=9), salt=f"other{turn}")
        pieces.wait()
        slot = pair.decode.reserve(work_of(prompt, "refused"))
        fill(slot, pieces)
        slot.path.unlink()  # type: ignore[attr-defined] # vLLM finds nothing where it was told to look
        pieces.pieces.clear()
        handle.release()
        sink = Tokens()
        pair.decode.generate(work_of(prompt, "refused"), sink, slot=slot, valid_tokens=899)
        assert sink.wait()[0].token_ids == expected
        assert local(pair.decode, prompt, salt="refused")[0].token_ids == expected
    assert far(pair.prefill, pair.decode, prompt, salt="refused").choices[0].token_ids == expected


def test_25067_what_is_over_may_be_ended_again(pair: Pair) -> None:
    running, sink = start_local(pair.decode, prompt_of(300), replace(GREEDY, max_tokens=2))
    sink.wait()
    handle, pieces = start_prefill(pair.prefill, prompt_of(300))
    pieces.wait()
    pieces.pieces.clear()
    for _ in range(3):
        running.cancel()
        handle.cancel()
        handle.release()
    assert sink.error is None
    assert pieces.error is None
    assert len(local(pair.decode, prompt_of(300))[0].token_ids) == 24
