"""Steady load on several gateways: streams whose every token is checked as it comes, each with a bounded end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from farfill.verify.client import Generation, gateway_client

SHORT_TOKENS, SHORT_OUTPUT = 24, 60
LONG_TOKENS, LONG_OUTPUT = 420, 24
LONGEST_S = 60.0
THINK_S = 0.02
TICK_S = 0.02
_NUMBERS = itertools.count()  # of requests, in all runs: no long prompt finds what another test's has left
FIRST_ID, LAST_ID = 3, 258  # of the tiny tokenizer, without its specials


class WrongAnswerError(AssertionError):
    """Other tokens than greedy decoding of the model gives, or fewer without an error."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its only right answer."""

    ids: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def long(self) -> bool:
        """Whether it belongs far."""
        return len(self.ids) == LONG_TOKENS


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request as its client saw it. `error` is empty when it was answered in full; times are `Load.now_s`."""

    gateway: str
    long: bool
    began_s: float
    ended_s: float = 0.0
    tokens: int = 0
    error: str = ""
    decode: str = ""
    prefill: str = ""
    placement: str = ""
    fallback: str = ""
    reason: str = ""


@dataclass(slots=True)
class Load:
    """What was asked and how it ended, in the order of the ends. `running`: when those began that have not.

    Times are as on a machine that has nothing else to do: what a sleep took too long is not counted, so that limits of
    seconds hold on a busy one too.
    """

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    running: dict[str, float] = field(default_factory=dict[str, float])
    _late_s: float = 0.0

    def now_s(self) -> float:
        """Now."""
        return asyncio.get_running_loop().time() - self._late_s

    async def watch_time(self) -> None:
        """Find out, until cancelled, how busy the machine is with others."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            await asyncio.sleep(TICK_S)
            self._late_s += max(0.0, loop.time() - began_s - 1.5 * TICK_S)

    def errors(self) -> list[Outcome]:
        """Requests that were not answered in full."""
        return [each for each in self.outcomes if each.error]

    def oldest_s(self) -> float:
        """When the oldest request began that has not ended."""
        return min(self.running.values(), default=math.inf)

    async def until(self, holds: Callable[[list[Outcome]], object], what: str, deadline_s: float) -> float:
        """Seconds until `holds` (of the outcomes from now on; plain or a coroutine function) is true."""
        first, began_s = len(self.outcomes), self.now_s()
        while True:
            found = holds(self.outcomes[first:])
            if await found if asyncio.iscoroutine(found) else found:
                return self.now_s() - began_s
            if self.now_s() - began_s > deadline_s:
                raise AssertionError(f"not within {deadline_s:g} s: {what}; last: {self.outcomes[first:][-6:]}")
            await asyncio.sleep(TICK_S)


async def make_prompts(url: str, count: int) -> list[Prompt]:
    """`count` short and `count` long ones; their answers come from local prefill, one after the other."""
    rng = random.Random(7)
    prompts: list[Prompt] = []
    async with gateway_client(url, timeout_s=60.0) as client:
        for length, output in [(SHORT_TOKENS, SHORT_OUTPUT), (LONG_TOKENS, LONG_OUTPUT)] * count:
            ids = tuple(rng.randint(FIRST_ID, LAST_ID) for _ in range(length))
            answer = await client.complete(Generation(prompt=ids, max_tokens=output, salt="right", forced="local"))
            assert (answer.placement, len(answer.token_ids)) == ("local", output)
            prompts.append(Prompt(ids, answer.token_ids))
    return prompts


@contextlib.asynccontextmanager
async def steady_load(urls: dict[str, str], model: str, prompts: Sequence[Prompt], clients: int) -> AsyncIterator[Load]:
    """`clients` clients of each gateway (URL by name) ask one prompt after another. A wrong answer or one that does
    not end is raised at the end of the block."""
    load = Load()
    stop = asyncio.Event()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:

        async def client(gateway: str, first: int) -> None:
            for turn in itertools.count(first):
                if stop.is_set():
                    return
                number = next(_NUMBERS)
                outcome = await _ask(http, gateway, urls[gateway], model, prompts[turn % len(prompts)], number, load)
                load.outcomes.append(outcome)
                await asyncio.sleep(THINK_S if not outcome.error else 10 * THINK_S)

        for index, gateway in enumerate(urls):
            for each in range(clients):
                group.create_task(client(gateway, index + each))
        timing = group.create_task(load.watch_time())
        try:
            yield load
        finally:
            stop.set()
            timing.cancel()


async def _ask(
    http: aiohttp.ClientSession, gateway: str, url: str, model: str, prompt: Prompt, number: int, load: Load
) -> Outcome:
    outcome = Outcome(gateway=gateway, long=prompt.long, began_s=load.now_s())
    body = {
        "model": model,
        "prompt": list(prompt.ids),
        "max_tokens": len(prompt.answer),
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        # Short ones may hit each other's prefixes; a long one is computed each time.
        "cache_salt": f"load-{number}" if prompt.long else "load",
    }
    request_id = f"load-{number}"
    load.running[request_id] = outcome.began_s
    try:
        async with asyncio.timeout(LONGEST_S):
            headers = {"X-Request-Id": request_id}
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                await _read(response, prompt, outcome)
    except TimeoutError:
        raise WrongAnswerError(f"{request_id} did not end within {LONGEST_S:g} s: {outcome}") from None
    except (aiohttp.ClientError, OSError) as error:
        outcome.error = f"connection: {type(error).__name__}"
    finally:
        del load.running[request_id]
    outcome.ended_s = load.now_s()
    return outcome


async def _read(response: aiohttp.ClientResponse, prompt: Prompt, outcome: Outcome) -> None:
    if response.status != 200:
        error = (await response.json())["error"]
        outcome.error = f"{response.status} {error['code']}"
        assert response.status in (429, 503), f"{outcome}: {error}"
        assert int(response.headers["Retry-After"]) >= 1
        return
    headers = response.headers
    outcome.decode, outcome.prefill = (
        headers["x-farfill-decode-instance"],
        headers.get("x-farfill-prefill-instance", ""),
    )
    outcome.placement, outcome.reason = headers["x-farfill-placement"], headers["x-farfill-reason"]
    outcome.fallback = headers.get("x-farfill-fallback", "")
    found: list[int] = []
    done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            done = True
            continue
        message: dict[str, Any] = msgspec.json.decode(line[6:])
        if "error" in message:
            outcome.error = f"event {message['error']['code']}"
            continue
        for choice in message["choices"]:
            found += choice.get("token_ids") or []
        outcome.tokens = len(found)
        if tuple(found) != prompt.answer[: len(found)]:
            raise WrongAnswerError(f"token {len(found) - 1}: {found} of {prompt.answer}: {outcome}")
    if done == bool(outcome.error) or (done and tuple(found) != prompt.answer):
        raise WrongAnswerError(f"{len(found)} of {len(prompt.answer)} tokens, [DONE] {done}: {outcome}")
