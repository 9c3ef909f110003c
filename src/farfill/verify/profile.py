"""Measures how fast a running instance is, through the gateway, as a profile for the planner.

Prefill times are the workers' own, of prompts that no cache knows; decode steps are the gaps between tokens of streams
that run at the same time. An otherwise idle cluster with one decode instance is assumed; the second is checked.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from farfill.core.errors import ConfigError, FarfillError
from farfill.planner.profile_file import DecodeFigure, PrefillFigure, ProfileFile
from farfill.verify.client import ForcedPlacement, GatewayClient, Generation
from farfill.verify.corpus import Corpus
from farfill.verify.prompts import load_corpus

_STREAM_DEADLINE_S = 600.0


class ProfileError(FarfillError):
    """What was measured is not what was asked for."""

    reason = "profile_failed"
    side = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """What to measure. `remote`: the far instance's prefill instead of the decode instance's own."""

    name: str
    accelerator: str
    gpus: int
    remote: bool
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    output_tokens: int
    repeat: int

    @property
    def placement(self) -> ForcedPlacement:
        return "remote" if self.remote else "local"


async def measure_profile(client: GatewayClient, plan: ProfilePlan, report: Callable[[str], None]) -> ProfileFile:
    """The profile file. Raises ConfigError for lengths the model cannot take, ProfileError when placement failed."""
    model = await client.model()
    longest = max(plan.lengths)
    if longest + plan.output_tokens > model.context_tokens:
        raise ConfigError(
            f"--lengths: {longest} + {plan.output_tokens} output tokens do not fit the model's context of"
            f" {model.context_tokens}"
        )
    if min(plan.lengths) < 2:
        raise ConfigError("--lengths: a prompt of one token has nothing to prefill")
    corpus = await load_corpus(client)
    prefill: list[PrefillFigure] = []
    for tokens in plan.lengths:
        report(f"prefill of {tokens} tokens")
        times = [await _prefill_s(client, corpus, plan, tokens) for _ in range(plan.repeat + 1)][1:]
        prefill.append(PrefillFigure(tokens=tokens, seconds=median(times)))
    decode: list[DecodeFigure] = []
    for tokens in sorted({min(plan.lengths), longest}):
        for batch in plan.batches:
            report(f"decode of {batch} sequences of {tokens} tokens")
            step = await _step_s(client, corpus, plan, tokens=tokens, batch=batch)
            decode.append(DecodeFigure(batch=batch, context_tokens=tokens + plan.output_tokens / 2, step_s=step))
    return ProfileFile(
        name=plan.name,
        accelerator=plan.accelerator,
        gpus_per_instance=plan.gpus,
        source=f"measured through {client.url}: model {model.name}, prefill {plan.placement}, median of {plan.repeat}",
        prefill=prefill,
        decode=decode,
        max_batch=max(plan.batches),
    )


async def _prefill_s(client: GatewayClient, corpus: Corpus, plan: ProfilePlan, tokens: int) -> float:
    generation = Generation(
        prompt=corpus.prompt_of(tokens), max_tokens=1, salt=secrets.token_hex(8), forced=plan.placement
    )
    answer = await client.complete(generation)
    if answer.placement != plan.placement:
        raise ProfileError(
            f"a prompt of {tokens} tokens was to be prefilled {plan.placement}, but was {answer.placement}"
            f" ({answer.reason}, fallback {answer.fallback}); is such an instance running?"
        )
    record = await client.record(answer.request_id)
    seconds = None
    if plan.remote and record.prefill is not None:
        seconds = record.prefill.prefill_s
    elif not plan.remote and record.start is not None:
        seconds = record.start.prefill_s
    if not seconds:
        raise ProfileError(f"no prefill time was reported for {tokens} tokens; are workers and gateway of one version?")
    return seconds


async def _step_s(client: GatewayClient, corpus: Corpus, plan: ProfilePlan, *, tokens: int, batch: int) -> float:
    """Median gap between tokens while all `batch` streams run.

    Each prompt runs once before, for its prefill to be found in the cache: else the first streams would have ended
    before the last ones start.
    """
    generations = [
        Generation(prompt=corpus.prompt_of(tokens, variant), max_tokens=plan.output_tokens, salt=secrets.token_hex(8))
        for variant in range(batch)
    ]
    if batch > 1:
        for generation in generations:
            await client.complete(replace(generation, max_tokens=1))
    async with asyncio.timeout(_STREAM_DEADLINE_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(_stream(client, generation)) for generation in generations]
    streams = [task.result() for task in tasks]
    instances = {instance for instance, _ in streams}
    if len(instances) > 1:
        raise ProfileError(
            f"{batch} sequences were decoded by {len(instances)} instances ({', '.join(sorted(instances))}), so this is"
            " not the step of one; measure with one decode instance running"
        )
    start, end = max(times[0] for _, times in streams), min(times[-1] for _, times in streams)
    gaps = [
        later - earlier
        for _, times in streams
        for earlier, later in pairwise(times)
        if start <= earlier and later <= end
    ]
    if not gaps:
        raise ProfileError(
            f"{batch} sequences never ran at the same time; raise --tokens, or engine.max_batch and"
            " engine.prefix_cache_mb of the cluster file"
        )
    return median(gaps)


async def _stream(client: GatewayClient, generation: Generation) -> tuple[str, list[float]]:
    """(decode instance, times of its tokens)."""
    times: list[float] = []
    async with client.stream(generation) as answer:
        request_id = answer.request_id
        async for at, ids in answer.events():
            times += [at] * len(ids)
    record = await client.record(request_id)
    return record.decode_instance, times
