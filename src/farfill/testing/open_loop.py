"""Seeded traffic in open loop: requests come when it is their time, whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farfill.verify.client import GatewayClient, Generation
from farfill.verify.corpus import Corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """`requests` at Poisson times, `rate_per_s` on average. Prompts have a length from `prompt_tokens`, answers one
    from `output_tokens`, both uniform; `shared_share` of the prompts begin with the same `shared_tokens`."""

    requests: int
    rate_per_s: float
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    shared_tokens: int = 0
    shared_share: float = 0.0
    seed: int = 1
    salt: str = "open-loop"


@dataclass(frozen=True, slots=True)
class Due:
    """One request and when it is sent, in seconds from the start."""

    at_s: float
    generation: Generation


def planned(loop: OpenLoop, corpus: Corpus) -> Iterator[Due]:
    """The requests of `loop`, in order; the same seed gives the same ones."""
    drawn, at_s = random.Random(loop.seed), 0.0  # noqa: S311 (traffic, no secret)
    for number in range(loop.requests):
        at_s += drawn.expovariate(loop.rate_per_s)
        tokens = drawn.randint(*loop.prompt_tokens)
        prompt = tuple(corpus.prompt_of(tokens, number + 1))
        if drawn.random() < loop.shared_share:
            prompt = (*corpus.prompt_of(loop.shared_tokens, 0), *prompt[loop.shared_tokens :])
        yield Due(at_s, Generation(prompt=prompt, max_tokens=drawn.randint(*loop.output_tokens), salt=loop.salt))


async def send_all(client: GatewayClient, due: Sequence[Due]) -> None:
    """Send each when it is due, streamed, and read every answer to its end. Raises what the first failure raises."""
    clock = asyncio.get_running_loop()
    start_s = clock.time()

    async def one(each: Due) -> None:
        await asyncio.sleep(max(0.0, start_s + each.at_s - clock.time()))
        async with client.stream(each.generation) as answer:
            async for _ in answer.events():
                pass

    async with asyncio.TaskGroup() as group:
        for each in due:
            group.create_task(one(each))
