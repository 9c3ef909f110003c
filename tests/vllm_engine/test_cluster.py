"""Registry, gateway and two workers with vLLM beside them, as real processes: what a user sees is what vLLM says."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from tests.system.cluster import DECODE, PREFILL, Cluster
from tests.vllm_engine.calls import wait_until
from tests.vllm_engine.fronts import TEXT, answer_of, asked, front, running_requests
from tests.vllm_engine.router import needs_router, post, routing

from farfill.verify.client import Generation
from farfill.verify.prompts import load_corpus

STOP_S = 30.0
# vLLM pins another version of transformers.
EMBEDDED = Path(__file__).parents[2] / ".venv" / "bin" / "python"


async def test_long_prompt_goes_far_and_says_the_same(cluster: Cluster) -> None:
    async with cluster.tools() as (client, scraping):
        prompt = (await load_corpus(client)).prompt_of(900, variant=1)
        far = await client.complete(Generation(prompt=prompt, max_tokens=16, salt="far", logprobs=2))
        near = await client.complete(Generation(prompt=prompt, max_tokens=16, salt="near", forced="local", logprobs=2))
        short = await client.complete(Generation(prompt=prompt[:40], max_tokens=4, salt="short"))
        record = await client.record(far.request_id)
        samples = await scraping.worker(DECODE)
    assert (far.placement, near.placement, short.placement) == ("remote", "local", "local")
    assert far.token_ids == near.token_ids
    assert far.logprobs == pytest.approx(near.logprobs, abs=1e-5)
    assert record.start is not None
    assert record.prefill is not None
    assert (record.start.received_tokens, record.start.computed_tokens) == (899, 0)
    assert record.prefill.raw_bytes >= 4 * 65536 * 7
    # vLLM's own metrics are among the worker's.
    assert samples.total("vllm:request_success_total") >= 1
    assert samples.has("vllm:kv_cache_usage_perc")
    assert samples.total("farfill_transfers_total", outcome="ok") >= 1


def test_chat_streams_through(cluster: Cluster) -> None:
    messages: list[Any] = [{"role": "user", "content": "Tell me a long story. " * 20}]
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
        stream = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True
        )
        pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 1
    assert whole.usage is not None
    assert whole.usage.prompt_tokens > 256


def test_usage_tells_what_vllm_had_in_its_cache(cluster: Cluster) -> None:
    prompt = "A prompt of one block and a bit of vLLM's cache, asked again and again. " * 3
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        answers = [client.completions.create(**asked).usage for _ in range(2)]
        warm = {**asked, "temperature": 0.5, "n": 2}  # two choices count the prompt once
        parts = client.completions.create(**warm, stream=True, stream_options={"include_usage": True})
        answers += [part.usage for part in parts if part.usage is not None]
    assert [usage.prompt_tokens_details.cached_tokens for usage in answers] == [0, 128, 128]


async def test_gateway_counts_on_what_vllm_says_it_holds(cluster: Cluster) -> None:
    """vLLM's KV events of both workers are in the gateway's prefix index, and what it expects of them comes true."""
    async with cluster.tools() as (client, scraping):
        prompt = (await load_corpus(client)).prompt_of(1_100, variant=7)
        asked_for = Generation(prompt=prompt, max_tokens=4, salt="events")
        async with asyncio.timeout(30):
            while (before := await scraping.gateway()).total("farfill_prefix_exact_workers") < 2:
                await asyncio.sleep(0.1)
        first = await client.complete(replace(asked_for, forced="remote"))
        # Four chunks of 256 tokens by prefill, and the same four by decode, which has them from there.
        stored = before.total("farfill_prefix_events_total", kind="stored") + 8
        async with asyncio.timeout(30):
            while (now := await scraping.gateway()).total("farfill_prefix_events_total", kind="stored") < stored:
                await asyncio.sleep(0.1)
        far = await client.record((await client.complete(replace(asked_for, forced="remote"))).request_id)
        hits = (await scraping.worker(DECODE)).total("vllm:prefix_cache_hits_total")
        second = await client.complete(asked_for)
        record = await client.record(second.request_id)
        async with asyncio.timeout(30):  # vLLM's own count is relayed every other second
            while (await scraping.worker(DECODE)).total("vllm:prefix_cache_hits_total") < hits + 1024:
                await asyncio.sleep(0.2)
        other = await client.complete(replace(asked_for, salt="others"))
        unknown = await client.record(other.request_id)
    assert now.total("farfill_prefix_index_blocks") >= 8
    assert far.prefill is not None
    assert far.prefill.cached_tokens >= far.expected_far_hit_tokens == 1024
    assert record.expected_hit_tokens == 1024
    assert record.start is not None
    assert (record.start.cached_tokens, record.start.computed_tokens) == (1024, 75)
    assert first.token_ids == second.token_ids
    assert (unknown.expected_hit_tokens, unknown.expected_far_hit_tokens) == (0, 0)


@needs_router
async def test_a_stock_router_drives_both_workers(cluster: Cluster, tmp_path: Path) -> None:
    """vllm-router in PD mode knows vLLM only; KV goes from worker to worker all the same."""
    async with cluster.tools() as (_, scraping):
        before = (await scraping.worker(DECODE)).total("farfill_transfers_total", outcome="ok")
        with routing(front(PREFILL), front(DECODE), tmp_path / "router.log") as url:
            lengths = (2, 100, 128, 129, 700, 1500)
            for length in lengths:
                prompt = f"{length}:{TEXT}"[:length]
                expected = await asyncio.to_thread(answer_of, front(DECODE), asked(prompt, cache_salt="near"))
                assert await asyncio.to_thread(answer_of, url, asked(prompt)) == expected, length
            chat: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
            chat["messages"] = [{"role": "user", "content": TEXT[:900]}]
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0) as client:
                whole = client.chat.completions.create(**chat).choices[0].message.content
                stream = client.chat.completions.create(**chat, stream=True)
                pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
            assert "".join(pieces) == whole
            near = await asyncio.to_thread(post, f"{front(DECODE)}/v1/chat/completions", {**chat, "cache_salt": "n"})
            assert near["choices"][0]["message"]["content"] == whole
        samples = await scraping.worker(DECODE)
    assert samples.total("farfill_transfers_total", outcome="ok") - before == len(lengths) + 2
    assert samples.total("vllm:external_prefix_cache_hits_total") > 0


async def test_parity_command_passes(cluster: Cluster) -> None:
    code, out = await _farfill(
        "parity", "--config", str(cluster.config_path), "--lengths", "5,257,600,1500", "--tokens", "16"
    )
    assert code == 0, out


async def test_worker_whose_vllm_dies_ends_and_says_why(cluster: Cluster) -> None:
    family = _vllm_of(cluster, PREFILL)
    assert len(family) >= 3
    family[0].kill()
    assert await asyncio.to_thread(cluster.ended, PREFILL) == 1
    (died,) = cluster.events(PREFILL, "vllm_died")
    assert "vLLM" in died["detail"]
    assert died["detail"] in cluster.log_tail(PREFILL)
    assert not psutil.wait_procs(family, timeout=STOP_S)[1]


@pytest.mark.skipif(not EMBEDDED.exists(), reason="the embedded engine has an environment of its own: `make test`")
async def test_the_embedded_engine_and_vllm_never_exchange_kv(cluster: Cluster) -> None:
    overrides = {
        "engine": {"type": "torch", "vllm_args": [], "prefix_cache_mb": 0},
        "workers": {name: {"vllm_listen": None} for name in (PREFILL, DECODE)},
    }
    torch = cluster.write_config("torch.yaml", overrides)
    await asyncio.to_thread(cluster.wait_known, {DECODE})
    cluster.spawn(PREFILL, config=torch, python=str(EMBEDDED))
    await asyncio.to_thread(cluster.wait_known, {DECODE, PREFILL})
    async with cluster.client() as client:
        prompt = (await load_corpus(client)).prompt_of(500, variant=2)
        answer = await client.complete(Generation(prompt=prompt, max_tokens=4, salt="mixed"))
    assert (answer.placement, answer.reason) == ("local", "fingerprint_mismatch")
    assert cluster.stop(PREFILL) == 0


async def test_drain_finishes_what_runs(cluster: Cluster) -> None:
    family = _vllm_of(cluster, DECODE)
    async with cluster.client() as client:
        prompt = (await load_corpus(client)).prompt_of(100, variant=3)
        running = asyncio.create_task(client.complete(Generation(prompt=prompt, max_tokens=600, salt="drain")))
        await asyncio.to_thread(wait_until, lambda: running_requests(cluster), "the request runs")
        status = asyncio.create_task(asyncio.to_thread(cluster.stop, DECODE))
        assert len((await running).token_ids) == 600
        assert await status == 0
    assert not psutil.wait_procs(family, timeout=STOP_S)[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_worker_that_ends_while_vllm_starts_takes_it_along(cluster: Cluster, number: signal.Signals) -> None:
    cluster.spawn(DECODE)
    wait_until(lambda: _vllm_of(cluster, DECODE), "vLLM is being started")
    family = _vllm_of(cluster, DECODE)
    cluster.signal(DECODE, number)
    assert cluster.ended(DECODE) == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    assert not psutil.wait_procs(family, timeout=STOP_S)[1]


def _vllm_of(cluster: Cluster, name: str) -> list[psutil.Process]:
    """vLLM's processes beside a worker, its server first."""
    children = psutil.Process(cluster.pid(name)).children()
    servers = [child for child in children if "vllm.entrypoints.openai.api_server" in child.cmdline()]
    return [process for server in servers for process in (server, *server.children(recursive=True))]


async def _farfill(*arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "farfill.cli.main",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        cwd=Path.cwd(),
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()
