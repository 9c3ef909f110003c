"""Time to the first token over a WAN of 1 Gbit/s and 30 ms round trip: prefill, transfer and decode must overlap.

A two-site cluster with vLLM in the lab's namespaces: registry, gateway and decode near, prefill far. Prefill as the far
worker reports it for that very request, transfer as the bytes that were sent over the line's rate; the figure is
(TTFT - 2 RTT) / max(prefill, transfer), the median over the rounds. One after the other would be nearer to 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp

from _common import Figures, median, note
from farfill.cli.local_cluster import DECODE, PREFILL
from farfill.testing.lab import Lab, missing_requirement
from farfill.verify.client import GatewayClient, Generation, gateway_client
from farfill.verify.prompts import load_corpus

NEAR, FAR = "near", "far"
RATE_BITS_PER_S = 1e9
RTT_S = 0.03
LIMIT = 1.2
LENGTHS = (1_000, 2_000)
START_S = 400.0
_PORT = 7_000


def over_wan(figures: Figures, model: Path, folder: Path, rounds: int) -> None:
    """Everything of it; not measured where there is no lab."""
    if (problem := missing_requirement()) is not None:
        note(f"no lab here: {problem}")
        for length in LENGTHS:
            figures.not_measured(f"vllm_wan_ttft_{length}", f"<= {LIMIT:g}")
        return
    with Lab((NEAR, FAR)) as lab:
        lab.link(NEAR, FAR).set(rate_bits_per_s=RATE_BITS_PER_S, rtt_s=RTT_S)
        config = _write_cluster(lab, model, folder)
        for site, role, name in (
            (NEAR, "registry", ""),
            (NEAR, "gateway", ""),
            (NEAR, "decode", DECODE),
            (FAR, "prefill", PREFILL),
        ):
            command = [sys.executable, "-m", "farfill.cli.main", role, "--config", str(config)]
            with (folder / f"wan-{role}.log").open("wb") as log:
                lab.start(site, command + (["--name", name] if name else []), stdout=log, stderr=log)
        url = f"http://{lab.address(NEAR)}:{_PORT}"

        def near() -> None:
            with lab.inside(NEAR):
                asyncio.run(_measure(figures, url, rounds))

        # A thread of its own, which stays at the site.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(near).result()


def _write_cluster(lab: Lab, model: Path, folder: Path) -> Path:
    from tests.system.cluster import Cluster, local_plan

    near, far = lab.address(NEAR), lab.address(FAR)
    overrides: dict[str, Any] = {
        "engine": {"type": "vllm", "vllm_args": ["--enforce-eager"], "kv_cache_mb": 1024},
        "kv_transfer": {"compression": "none"},
        "gateway": {"listen": f"{near}:{_PORT}"},
        "registry": {"listen": f"{near}:{_PORT + 1}", "lease_s": 10.0},
        "workers": {
            DECODE: {"listen": f"{near}:{_PORT + 2}", "transfer_listen": f"{near}:{_PORT + 3}"},
            PREFILL: {"listen": f"{far}:{_PORT + 4}"},
        },
    }
    plan = local_plan(model, "model", chunk_tokens=256, timeout_ms=60_000, dtype="bfloat16", overrides=overrides)
    home = folder / "wan"
    home.mkdir()
    return Cluster(plan, home).config_path


async def _measure(figures: Figures, url: str, rounds: int) -> None:
    await _ready(url)
    async with gateway_client(url, timeout_s=300.0) as client:
        corpus = await load_corpus(client)
        await _once(client, corpus.prompt_of(600), "warm")
        for length in LENGTHS:
            ratios = [await _once(client, corpus.prompt_of(length, turn), f"{length}-{turn}") for turn in range(rounds)]
            figures.at_most(f"vllm_wan_ttft_{length}", median(ratios), LIMIT)


async def _ready(url: str) -> None:
    """Until the gateway knows both workers."""
    async with asyncio.timeout(START_S), aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"{url}/v1/farfill/instances") as answer:
                    known = (await answer.json())["instances"]
                if sum(one["state"] == "ready" for one in known) == 2:
                    return
            await asyncio.sleep(0.5)


async def _once(client: GatewayClient, prompt: tuple[int, ...], salt: str) -> float:
    loop = asyncio.get_running_loop()
    sent_s, first_s = loop.time(), 0.0
    generation = Generation(prompt=prompt, max_tokens=2, salt=f"wan-{salt}", forced="remote")
    async with client.stream(generation) as answer:
        async for at_s, _ in answer.events():
            first_s = first_s or at_s
    record = await client.record(answer.request_id)
    if record.placement != "remote" or record.fallback != "none" or record.prefill is None:
        raise RuntimeError(f"not prefilled far away: {record}")
    prefill_s = record.prefill.prefill_s
    transfer_s = record.prefill.wire_bytes * 8 / RATE_BITS_PER_S
    ttft_s = first_s - sent_s
    note(
        f"{len(prompt)} tokens: TTFT {ttft_s:.3f} s, prefill {prefill_s:.3f} s,"
        f" {record.prefill.wire_bytes / 1e6:.1f} MB, at this rate {transfer_s:.3f} s; load {os.getloadavg()[0]:.1f}"
    )
    return (ttft_s - 2 * RTT_S) / max(prefill_s, transfer_s)
