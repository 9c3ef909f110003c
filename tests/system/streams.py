"""Streams as a client sees them: which tokens came when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from farfill.gateway.records import RequestRecord
from farfill.verify.client import GatewayClient, Generation


@dataclass
class Received:
    """A finished stream. `at_s[i]` is when the event with `token_ids` up to i came, in loop time."""

    placement: str = ""
    fallback: str = ""
    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    record: RequestRecord | None = None

    @property
    def gaps_s(self) -> list[float]:
        """ITL: each gap between events."""
        return [later - earlier for earlier, later in zip(self.at_s, self.at_s[1:], strict=False)]


async def receive(
    client: GatewayClient, generation: Generation, on_event: Callable[[Received], None] = lambda received: None
) -> Received:
    """Stream `generation` to its end, telling `on_event` of each step, and fetch its record."""
    received = Received()
    async with client.stream(generation) as answer:
        received.placement, received.fallback = answer.placement, answer.fallback
        received.request_id = answer.request_id
        async for at_s, token_ids in answer.events():
            received.at_s.append(at_s)
            received.token_ids += token_ids
            on_event(received)
    received.record = await client.record(received.request_id)
    return received


async def receive_all(client: GatewayClient, generations: list[Generation]) -> list[Received]:
    """All at once."""
    return list(await asyncio.gather(*(receive(client, generation) for generation in generations)))
