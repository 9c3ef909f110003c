"""Memory: does the decode worker come back to its idle level after 200 requests, half of them aborted?

The prefix cache keeps its default size and is filled to its bound in the warm-up, so that its content is part of what
is called idle. Turning it off would measure a worker that nobody runs, and would not notice memory lost in
evictions; leaving it cold would count its growth as a leak. What the figure then shows is everything that requests
leave behind on top: slots, buffers, sessions, fragments of the heap.

RSS is what must come back: it does not depend on what the prefill worker maps of the same model file, as PSS does.
PSS is told beside it.

The 200 requests are mixed: lengths, far and near prefill, streamed and whole, eight at a time. The aborted half
closes its connection at a random (seeded) moment: before the first token, while KV is awaited or the prompt is
prefilled, or after some tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import psutil

from _common import Figures, note, note_machine
from farfill.cli.local_cluster import DECODE, PREFILL, LocalCluster, LocalPlan
from farfill.cli.local_ports import free_ports
from farfill.cli.local_ready import until_ready
from farfill.cli.model_store import find_source, model_folder
from farfill.config.load import load_config
from farfill.verify.client import ForcedPlacement, GatewayClient, Generation, gateway_client
from farfill.verify.corpus import Corpus
from farfill.verify.prompts import load_corpus
from farfill.verify.scrape import Scraper, is_idle, scraper, wait_until

LENGTHS = (16, 40, 100, 250, 600, 1_200)
AT_ONCE = 8
SEED = 20261130
IDLE_DEADLINE_S = 120.0
# After the last request: the engine and the allocator may take a moment to hand memory back.
SETTLE_DEADLINE_S = 20.0
LIMIT = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request and how it ends: "whole", "before_first_token" after `abort_after_s`, or "mid_stream"."""

    generation: Generation
    streamed: bool
    end: Literal["whole", "before_first_token", "mid_stream"]
    abort_after_s: float
    abort_after_tokens: int


async def main() -> int:
    """Measure; the exit status."""
    arguments = _arguments()
    note_machine()
    source = find_source("smollm2")
    plan = LocalPlan(
        model_name=source.folder,
        model_dir=model_folder(source),
        port=free_ports(1)[0],
        threshold_tokens=200,
        chunk_tokens=128,
        timeout_ms=60_000,
        dtype="bfloat16",
        overrides={"engine": {"threads": 1}},
    )
    figures = Figures()
    with LocalCluster(plan) as cluster:
        cluster.start()
        await until_ready(cluster, note)
        decode = next(child for child in cluster.children if child.name == DECODE)
        loaded = load_config(cluster.config_file)
        async with gateway_client(cluster.url) as client, scraper(loaded) as scraping:
            corpus = await load_corpus(client)
            await _warm_up(client, scraping, corpus, loaded.config.engine.prefix_cache_mb * 2**20)
            idle = await _level(scraping, decode.pid)
            note(f"idle: RSS {idle.rss / 2**20:.1f} MiB, PSS {idle.pss / 2**20:.1f} MiB")
            await _run_all(client, _jobs(corpus, arguments.requests))
            await _until_idle(scraping)
            after = await _settled(scraping, decode.pid, idle.rss * LIMIT)
            note(f"after: RSS {after.rss / 2**20:.1f} MiB, PSS {after.pss / 2**20:.1f} MiB")
            samples = await scraping.worker(DECODE)
        figures.at_most("memory_decode_rss_after_over_idle", after.rss / idle.rss, LIMIT)
        figures.at_most("memory_decode_kv_used_bytes", samples.total("farfill_kv_used_bytes"), 0)
        figures.at_most("memory_decode_held_transfers", samples.total("farfill_held_transfers"), 0)
    return figures.exit_code


@dataclass(frozen=True, slots=True)
class Level:
    """Memory of one process, in bytes."""

    rss: int
    pss: int


async def _warm_up(client: GatewayClient, scraping: Scraper, corpus: Corpus, cache_bytes: int) -> None:
    """Every kind of request, the largest batch, and the prefix cache up to its bound."""
    jobs = [
        Job(
            generation=_generation(corpus, length, number, "warm-up", forced),
            streamed=bool(number % 2),
            end="whole",
            abort_after_s=0.0,
            abort_after_tokens=0,
        )
        for number, (length, forced) in enumerate((n, f) for n in LENGTHS for f in ("local", "remote"))
    ]
    await _run_all(client, jobs)
    number = 0
    filled = 0.0
    while True:
        number += 1
        await client.complete(_generation(corpus, max(LENGTHS), number, f"fill-{number}", "remote"))
        await _until_idle(scraping)
        before, filled = filled, (await scraping.worker(DECODE)).total("farfill_prefix_cache_bytes")
        # Full when the next prompt no longer adds to it: it evicts.
        if filled <= before:
            break
    note(f"prefix cache filled to {filled / 2**20:.1f} of {cache_bytes / 2**20:.0f} MiB by {number} prompts")


def _jobs(corpus: Corpus, count: int) -> list[Job]:
    """`count` requests, every second one aborted."""
    chance = random.Random(SEED)
    jobs: list[Job] = []
    for number in range(count):
        length = chance.choice(LENGTHS)
        forced = chance.choice(("local", "remote", None))
        end = chance.choice(("before_first_token", "mid_stream")) if number % 2 else "whole"
        jobs.append(
            Job(
                generation=_generation(corpus, length, number, f"load-{number}", forced),
                streamed=end == "mid_stream" or chance.random() < 0.5,
                end=end,
                # Up to about the time the prompt takes alone: queued, waiting for KV, or half way through prefill.
                abort_after_s=chance.uniform(0.0, length / 400),
                abort_after_tokens=chance.randint(1, 12),
            )
        )
    return jobs


def _generation(
    corpus: Corpus, length: int, variant: int, salt: str, forced: ForcedPlacement | str | None
) -> Generation:
    return Generation(
        prompt=corpus.prompt_of(length, variant),
        max_tokens=16,
        salt=f"memory-{salt}",
        forced=forced,  # type: ignore[arg-type]
        temperature=0.8,
        seed=variant,
    )


async def _run_all(client: GatewayClient, jobs: list[Job]) -> None:
    """Run `jobs`, `AT_ONCE` at a time, and tell how they ended."""
    room = asyncio.Semaphore(AT_ONCE)
    ended: Counter[str] = Counter()

    async def one(job: Job) -> None:
        async with room:
            ended[await _run(client, job)] += 1

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(one(job))
    note(f"{len(jobs)} requests: {', '.join(f'{count} {how}' for how, count in sorted(ended.items()))}")


async def _run(client: GatewayClient, job: Job) -> str:
    """How it ended; a request that was to be aborted may be done before."""
    if job.end == "before_first_token":
        try:
            async with asyncio.timeout(job.abort_after_s):
                await _finish(client, job)
        except TimeoutError:
            return "aborted before the answer"
        return "done before its abort"
    if job.end == "mid_stream":
        tokens = 0
        async with client.stream(job.generation) as answer, contextlib.aclosing(answer.events()) as events:
            async for _, token_ids in events:
                tokens += len(token_ids)
                if tokens >= job.abort_after_tokens:
                    return "aborted in mid stream"
        return "done before its abort"
    await _finish(client, job)
    return "whole"


async def _finish(client: GatewayClient, job: Job) -> None:
    if not job.streamed:
        await client.complete(job.generation)
        return
    async with client.stream(job.generation) as answer:
        async for _ in answer.events():
            pass


async def _until_idle(scraping: Scraper) -> None:
    for name in (DECODE, PREFILL):
        await wait_until(lambda name=name: scraping.idle(name), f"{name} is idle", IDLE_DEADLINE_S)


async def _level(scraping: Scraper, pid: int) -> Level:
    if not is_idle(await scraping.worker(DECODE)):
        raise RuntimeError("the decode worker is not idle")
    memory = psutil.Process(pid).memory_full_info()
    return Level(memory.rss, getattr(memory, "pss", 0))


async def _settled(scraping: Scraper, pid: int, enough: float) -> Level:
    """The level once it is low enough, or what it is at the deadline."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + SETTLE_DEADLINE_S
    while True:
        level = await _level(scraping, pid)
        if level.rss <= enough or loop.time() > end_s:
            return level
        await asyncio.sleep(0.5)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory of the decode worker after many requests.")
    parser.add_argument("--requests", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
