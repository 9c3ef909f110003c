"""From running generations to the client: server-sent events as they come, or one whole body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from farfill.core.errors import FarfillError
from farfill.gateway.errors import envelope
from farfill.gateway.openai.render import DONE, ChoiceResult, Renderer, Usage, make_usage, sse
from farfill.gateway.pipeline.dispatch import Dispatcher
from farfill.gateway.pipeline.generation import Generation
from farfill.gateway.pipeline.job import Job
from farfill.wire.control import TokensEvent

ForEach = Callable[[int], Awaitable[None]]


class EventSink(Protocol):
    """Where server-sent events go. `put` tells whether more may follow at once; if not, `drained` waits for a client
    that reads slowly."""

    def put(self, data: bytes) -> bool: ...
    async def drained(self) -> None: ...
    async def end(self, data: bytes) -> None: ...


async def open_all(
    dispatcher: Dispatcher, jobs: Sequence[Job], placed: Callable[[int], Callable[..., None]]
) -> list[Generation]:
    """Start all jobs; returns when each has its first token. If one fails, all are withdrawn."""
    opened: dict[int, Generation] = {}

    async def open_one(i: int) -> None:
        opened[i] = await dispatcher.open(jobs[i], placed(i))

    try:
        await _together(len(jobs), open_one)
    except BaseException:
        for generation in opened.values():
            generation.close()
        raise
    return [opened[i] for i in range(len(jobs))]


async def send_events(
    answer: EventSink, renderer: Renderer, generations: Sequence[Generation], *, include_usage: bool
) -> None:
    """Write all output, the usage if asked for, [DONE] and the end. The first write has the first tokens.

    Raises FarfillError when a generation breaks; the stream is then for `send_failure` to end.
    """

    async def send_one(i: int) -> None:
        generation = generations[i]
        n = generation.job.sampling.n
        base, put, chunk = i * n, answer.put, renderer.chunk

        def take(batch: list[TokensEvent]) -> bool:
            if len(batch) == 1:
                data = chunk(base + batch[0].index, batch[0])
            else:
                data = b"".join([chunk(base + event.index, event) for event in batch])
            return not data or put(data)

        opening = [renderer.begin(base + choice) for choice in range(n)]
        first = [chunk(base + event.index, event) for event in await generation.next_batch()]
        if data := b"".join(opening + first):
            put(data)
            await answer.drained()
        generation.sent()
        while not generation.ended:
            await generation.flow(take)
            await answer.drained()

    await _together(len(generations), send_one)
    tail = renderer.usage(await usage_of(generations)) if include_usage else b""
    # In one write: many clients hang up at [DONE], and by then the answer must be whole.
    await answer.end(tail + DONE)


async def send_failure(answer: EventSink, error: FarfillError) -> None:
    """End a stream that began with OpenAI's error event; no [DONE] follows."""
    await answer.end(sse(envelope(error)))


async def collect(renderer: Renderer, generations: Sequence[Generation]) -> bytes:
    """The body of an answer that is not streamed."""
    n = generations[0].job.sampling.n
    choices = [ChoiceResult(index) for index in range(n * len(generations))]

    async def gather_one(i: int) -> None:
        def take(batch: list[TokensEvent]) -> bool:
            for event in batch:
                choices[i * n + event.index].add(event)
            return True

        while not generations[i].ended:
            await generations[i].flow(take)

    await _together(len(generations), gather_one)
    return renderer.whole(choices, await usage_of(generations))


async def usage_of(generations: Sequence[Generation]) -> Usage:
    """Prompt tokens count once a prompt, however many choices it has."""
    return make_usage(
        prompt_tokens=sum(g.prompt_tokens for g in generations),
        completion_tokens=sum(g.timing.tokens for g in generations),
        cached_tokens=sum([await g.cached_tokens() for g in generations]),
    )


async def _together(count: int, each: ForEach) -> None:
    """Run `each(i)` for all i; the first failure cancels the others and is raised as it is."""
    if count == 1:
        await each(0)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for i in range(count):
                group.create_task(_awaited(each(i)))
    except* FarfillError as failures:
        raise _first(failures) from None


async def _awaited(work: Awaitable[None]) -> None:
    await work


def _first(failures: BaseExceptionGroup[FarfillError]) -> FarfillError:
    found = failures.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
