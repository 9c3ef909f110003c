"""POST /v1/prefixes: which prompts' beginnings this worker's prefix cache is to keep, and their KV, computed now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from aiohttp import web

from farfill.core.errors import InvalidRequestError
from farfill.core.priority import MAX_PRIORITY
from farfill.engine.protocol import Engine, KeepsPrefixes, PrefillStats, PrefillWork
from farfill.wire.control import KeepPrefixCommand, KeepPrefixReply
from farfill.worker.http import message_response, read_message

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KeepService:
    """`lossy`: the form that KV comes in from elsewhere, whose prefixes are told apart ("" for none)."""

    engine: Engine
    lossy: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers with `KeepPrefixReply`; 400 from engines that keep prefixes by themselves (vLLM)."""
        command = await read_message(request, KeepPrefixCommand)
        engine = self.engine
        if not isinstance(engine, KeepsPrefixes):
            raise InvalidRequestError(
                f"engine {engine.info.engine} cannot be told which prefixes to keep", reason="prefixes_not_kept"
            )
        if not all(0 <= token < engine.info.vocab_size for token in command.token_ids):
            raise InvalidRequestError(f"token_ids must be in [0, {engine.info.vocab_size})", param="token_ids")
        salts = [command.cache_salt]
        if self.lossy:
            salts.append(f"lossy:{self.lossy}\0{command.cache_salt}")
        kept, *_ = [
            engine.keep_prefix(
                command.token_ids, salt, pinned=command.pinned, weight=command.weight, ttl_s=command.ttl_s
            )
            for salt in salts
        ]
        there = kept.there_tokens
        if command.compute and there < kept.tokens:
            await self._compute(command.token_ids[: kept.tokens], command.cache_salt)
            there = kept.tokens
        log.info("prefix_kept", tokens=kept.tokens, pinned=command.pinned, weight=command.weight, ttl_s=command.ttl_s)
        return message_response(
            KeepPrefixReply(tokens=kept.tokens, there_tokens=there, pinned_bytes=engine.load().prefix_pinned_bytes)
        )

    async def _compute(self, tokens: Sequence[int], cache_salt: str) -> None:
        """Prefill `tokens`, which leaves them in the prefix cache; behind everybody else's requests."""
        sink = _Done(asyncio.get_running_loop())
        # A prompt's last token is not prefilled, so any will do.
        prompt = (*tokens, 0)
        work = PrefillWork(request_id="kept-prefix", prompt=prompt, cache_salt=cache_salt, priority=MAX_PRIORITY)
        handle = self.engine.prefill(work, sink)
        try:
            await sink.done
        finally:
            handle.release()


class _Done:
    """A `PrefillSink` that only waits for the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.done: asyncio.Future[None] = loop.create_future()

    def progress(self) -> None: ...

    def pieces_ready(self, pieces: Sequence[tuple[int, memoryview]]) -> None: ...

    def finished(self, stats: PrefillStats) -> None:
        self._loop.call_soon_threadsafe(self._settle, None)

    def failed(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._settle, error)

    def _settle(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
