"""One request of vLLM's: a prefill whose KV comes out, or a generation whose tokens do. Both live on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from farfill.core.errors import CancelledWorkError, EngineError, FarfillError
from farfill.engine.output import OutputText, Vocabulary
from farfill.engine.protocol import (
    GenerateWork,
    Logprob,
    PrefillSink,
    PrefillStats,
    PrefillWork,
    TokenEvent,
    TokenSink,
)
from farfill.engine.vllm.api import VllmApi
from farfill.engine.vllm.files import KVFile
from farfill.engine.vllm.media import check_prompt, prompt_fields
from farfill.engine.vllm.messages import (
    ExportParams,
    ImportParams,
    WatchParams,
    export_params,
    import_params,
    watch_params,
)
from farfill.kv.manifest import Manifest

# After vLLM answered, all its exports are on their way through a local socket.
LAST_EXPORTS_S = 5.0
# Before vLLM computes a first token, it told through that socket what it begins with.
BEGUN_S = 2.0


class Exports:
    """A file that vLLM fills, and what is missing in it. `ranks`: how many have a part of each tensor of the layout."""

    def __init__(self, file: KVFile, ranks: Sequence[int]) -> None:
        self.file = file
        self._missing = {piece.index: ranks[piece.tensor] for piece in file.manifest.pieces}
        self._told: set[tuple[int, int]] = set()
        self._complete = asyncio.Event()

    def take(self, pieces: tuple[int, ...], rank: int = 0) -> list[int]:
        """These are there as far as they are `rank`'s; returns those that became whole."""
        new: list[int] = []
        for piece in pieces:
            if piece not in self._missing or (piece, rank) in self._told:
                continue
            self._told.add((piece, rank))
            self._missing[piece] -= 1
            if not self._missing[piece]:
                del self._missing[piece]
                new.append(piece)
        if not self._missing:
            self._complete.set()
        return new

    async def wait(self) -> None:
        """Until it is whole, soon after vLLM's answer. Raises EngineError."""
        try:
            async with asyncio.timeout(LAST_EXPORTS_S):
                await self._complete.wait()
        except TimeoutError as error:
            raise EngineError(f"vLLM did not export {len(self._missing)} pieces of the prompt's KV") from error


class Job:
    """Runs as a task. `waiting` until vLLM gave a sign of working on it; `exports` when it is to leave KV in a file."""

    def __init__(
        self,
        tokens: int,
        loop: asyncio.AbstractEventLoop,
        over: Callable[[Job], None],
        exports: Exports | None = None,
    ) -> None:
        self.tokens = tokens
        self.exports = exports
        self.waiting = True
        self.ended = asyncio.Event()
        self._loop = loop
        self._over = over
        self._task: asyncio.Task[None] | None = None
        self._error: FarfillError | None = None
        self._begun = False
        self.began_s = time.monotonic()

    def launch(self) -> None:
        """On the loop: begin, unless it was cancelled meanwhile."""
        self._task = self._loop.create_task(self._guarded())

    def cancel(self) -> None:
        """Withdraw it; from any thread, idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.end, CancelledWorkError("the work was withdrawn"))

    def end(self, error: FarfillError) -> None:
        """On the loop: end it with `error`, unless it has ended."""
        self._error = self._error or error
        # A task cancelled before its first step would never run at all, and nobody would hear of its end.
        if self._task is not None and self._begun:
            self._task.cancel()

    async def _guarded(self) -> None:
        self._begun = True
        error: Exception | None = None
        try:
            if self._error is not None:
                raise self._error
            await self.run()
        except asyncio.CancelledError:
            error = self._error or CancelledWorkError("the work was withdrawn")
        except FarfillError as failure:
            error = failure
        except Exception as failure:
            error = EngineError(f"vLLM: {type(failure).__name__}: {failure}")
        self._over(self)
        if error is not None:
            self.failed(error)
        self.ended.set()

    def exported(self, pieces: tuple[int, ...], rank: int) -> None:
        """A rank left these in the file."""
        assert self.exports is not None
        self.exports.take(pieces, rank)

    def alive(self) -> None:
        """vLLM ended a step."""

    async def run(self) -> None:
        """The work."""
        raise AssertionError

    def failed(self, error: Exception) -> None:
        """Last call when `run` raised."""
        raise AssertionError


class PrefillJob(Job):
    """A `PrefillHandle`: vLLM computes the prompt and leaves its blocks in `file`."""

    def __init__(
        self,
        work: PrefillWork,
        sink: PrefillSink,
        exports: Exports,
        *,
        api: VllmApi,
        loop: asyncio.AbstractEventLoop,
        over: Callable[[Job], None],
    ) -> None:
        self._exports = exports
        super().__init__(len(work.prompt) - 1, loop, over, exports)
        self._work = work
        self._sink = sink
        self._api = api
        self.file = exports.file
        self._done = False

    @property
    def manifest(self) -> Manifest:
        """Of the prompt without its last token."""
        return self.file.manifest

    def release(self) -> None:
        """The KV is not needed any more."""
        self.cancel()
        self.file.release()

    def exported(self, pieces: tuple[int, ...], rank: int) -> None:
        """A rank's part of these is in the file."""
        new = self._exports.take(pieces, rank)
        self.waiting = False
        if new and not self._done:
            self._sink.pieces_ready([(piece, self.file.buffer(piece).toreadonly()) for piece in new])

    def alive(self) -> None:
        """vLLM ended a step."""
        if not self._done:
            self._sink.progress()

    async def run(self) -> None:
        """Ask vLLM for one token, which nobody wants, after the prompt."""
        stats = await _export(self._api, self._work, self._exports, self.began_s)
        self._done = True
        self._sink.finished(stats)

    def failed(self, error: Exception) -> None:
        """See `Job`."""
        if not self._done:
            self._done = True
            self._sink.failed(error)


class GenerateJob(Job):
    """Tokens from vLLM, text from here."""

    def __init__(
        self,
        work: GenerateWork,
        sink: TokenSink,
        file: KVFile | None,
        *,
        valid_tokens: int,
        fields: dict[str, Any],
        vocabulary: Vocabulary,
        api: VllmApi,
        loop: asyncio.AbstractEventLoop,
        over: Callable[[Job], None],
        exports: Exports | None = None,
        watch: str = "",
        processes: int = 1,
    ) -> None:
        """`fields`: the sampling, as vLLM names it. `exports`: a request of its own computes the prompt into `file`
        first, of which nothing is valid yet. `watch` names it in `messages.Begun`; empty where nobody tells.
        `processes`: how many of vLLM's load its KV.
        """
        super().__init__(len(work.prompt) - 1 - valid_tokens, loop, over, exports)
        self._work = work
        self._sink = sink
        self._file = file
        self._valid_tokens = valid_tokens
        self._vocabulary = vocabulary
        self._api = api
        self._fields = fields
        self._texts = [_text(work, vocabulary) for _ in range(work.sampling.n)]
        self._open = set(range(work.sampling.n))
        self._silent = set(range(work.sampling.n))
        self._watch = watch
        self._news = asyncio.Event()
        self._local_tokens: int | None = None
        self._loading = set(range(processes))
        self._kv_problem = ""

    @property
    def key(self) -> str:
        """What the connector calls this generation; empty where nobody tells of it."""
        if not self._watch:
            return ""
        return self._watch if self._file is None else self._file.key

    def begun(self, cached_tokens: int) -> None:
        """vLLM begins, with so many tokens in its own cache. Only the first time counts: choices share a prompt."""
        if self._local_tokens is None:
            self._local_tokens = cached_tokens
            self._news.set()

    def loaded(self, rank: int) -> None:
        """One of vLLM's processes took over the KV in the file."""
        self._loading.discard(rank)
        self._news.set()

    async def run(self) -> None:
        """Stream until each choice ended."""
        computed = None
        if self.exports is not None:
            computed = await _export(self._api, self._work, self.exports, self.began_s)
            self._valid_tokens = computed.computed_tokens + computed.cached_tokens
        media = self._work.media_inputs
        body: dict[str, Any] = {
            **prompt_fields(self._work.prompt, media),
            "sampling_params": self._fields,
            "cache_salt": self._work.cache_salt or None,
            "priority": self._work.priority,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self._file is not None and self._valid_tokens:
            body["kv_transfer_params"] = import_params(
                ImportParams(
                    self._file.key,
                    str(self._file.path),
                    self._file.nbytes,
                    len(self._work.prompt) - 1,
                    self._valid_tokens,
                )
            )
        elif self.key:
            body["kv_transfer_params"] = watch_params(WatchParams(self.key))
        async with aclosing(self._api.stream(body)) as parts:
            async for part in parts:
                if self.waiting and part.get("choices"):
                    check_prompt(part, self._work.prompt, media)
                    await self._prefilled(computed)
                for choice in part.get("choices") or ():
                    self._silent.discard(choice["index"])
                    self._choice(choice)
                if not self._silent:
                    self.free()
                if not self._open:
                    return
        raise EngineError("vLLM ended the stream before every choice was finished")

    def failed(self, error: Exception) -> None:
        """See `Job`."""
        self._sink.failed(error)

    def not_loaded(self, key: str, problem: str) -> bool:
        """vLLM does not take the KV in file `key`: it computes the prompt, or soon ends the request.

        False: it is another request's, or this is known.
        """
        news = self._file is not None and self._file.key == key and self._valid_tokens > 0
        if news:
            self._valid_tokens = 0
            self._kv_problem = problem
            self._news.set()
        return news

    def free(self) -> None:
        """Every choice has the prompt's KV inside vLLM, or nobody wants it."""
        if self._file is not None:
            self._file.release()

    async def _prefilled(self, computed: PrefillStats | None) -> None:
        self.waiting = False
        if computed is not None:
            self._sink.prefilled(computed)
            return
        await self._told()
        num_tokens = len(self._work.prompt) - 1
        cached = min(max(0, (self._local_tokens or 0) - self._valid_tokens), num_tokens - self._valid_tokens)
        self._sink.prefilled(
            PrefillStats(
                queued_s=0.0,
                compute_s=time.monotonic() - self.began_s,
                computed_tokens=num_tokens - self._valid_tokens - cached,
                cached_tokens=cached,
                kv_problem=self._kv_problem,
            )
        )

    async def _told(self) -> None:
        """Wait until it is known what vLLM began with. Nothing depends on it but what clients are told."""
        if not self.key:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGUN_S):
                while not self._knows_beginning():
                    self._news.clear()
                    await self._news.wait()

    def _knows_beginning(self) -> bool:
        if self._local_tokens is None:
            return False
        # What vLLM has itself it does not load.
        return self._local_tokens >= self._valid_tokens or not self._loading

    def _choice(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        if index not in self._open:
            return  # it ended here, at a stop string, before vLLM knew
        token_ids = tuple(choice.get("token_ids") or ())
        finish, stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
        if finish not in (None, "stop", "length"):
            raise EngineError(f"vLLM ended a choice with {finish!r}")
        logprobs = self._logprobs(choice)
        shown, matched, used = self._show(index, token_ids, finish, stop_reason)
        if matched is not None:
            token_ids, finish, stop_reason = token_ids[:used], "stop", matched
            logprobs = None if logprobs is None else logprobs[:used]
        elif finish is not None:
            shown += self._texts[index].finish()
        if finish is not None:
            self._open.discard(index)
        if token_ids or finish is not None:
            self._sink.token(
                TokenEvent(
                    index=index,
                    token_ids=token_ids,
                    text=shown,
                    finish_reason=finish,
                    stop_reason=stop_reason,
                    logprobs=logprobs,
                )
            )

    def _show(
        self, index: int, token_ids: tuple[int, ...], finish: str | None, stop_reason: object
    ) -> tuple[str, str | None, int]:
        """(text to show, stop string that ended it, tokens up to there). A token that ends the text has none."""
        shown = ""
        for used, token in enumerate(token_ids, start=1):
            ends = finish == "stop" and used == len(token_ids)
            if ends and not (stop_reason is not None and self._work.sampling.include_stop_str_in_output):
                break
            text, matched = self._texts[index].push(token)
            shown += text
            if matched is not None:
                return shown, matched, used
        return shown, None, len(token_ids)

    def _logprobs(self, choice: dict[str, Any]) -> tuple[tuple[Logprob, tuple[Logprob, ...]], ...] | None:
        wanted = self._work.sampling.logprobs
        if wanted is None:
            return None
        content = (choice.get("logprobs") or {}).get("content") or []
        return tuple(
            (self._logprob(item), tuple(self._logprob(other) for other in item.get("top_logprobs", [])[:wanted]))
            for item in content
        )

    def _logprob(self, item: dict[str, Any]) -> Logprob:
        token = item["token_id"]
        return Logprob(token_id=token, logprob=item["logprob"], text_bytes=self._vocabulary.token_bytes(token))


async def _export(api: VllmApi, work: PrefillWork | GenerateWork, exports: Exports, began_s: float) -> PrefillStats:
    """Have vLLM compute the prompt without its last token, and one more, which nobody wants; wait for its KV."""
    file, prompt = exports.file, work.prompt[:-1]
    num_tokens = len(prompt)
    answer = await api.once(
        {
            **prompt_fields(prompt, work.media_inputs),
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
            "cache_salt": work.cache_salt or None,
            "priority": work.priority,
            "kv_transfer_params": export_params(ExportParams(file.key, str(file.path), num_tokens)),
        }
    )
    check_prompt(answer, prompt, work.media_inputs)
    await exports.wait()
    cached = _cached_tokens(answer)
    return PrefillStats(
        queued_s=0.0,
        compute_s=time.monotonic() - began_s,
        computed_tokens=num_tokens - cached,
        cached_tokens=cached,
    )


def _text(work: GenerateWork, vocabulary: Vocabulary) -> OutputText:
    sampling = work.sampling
    return OutputText(
        vocabulary.tokenizer,
        work.prompt,
        stop=sampling.stop,
        min_tokens=sampling.min_tokens,
        include_stop=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
    )


def _cached_tokens(part: dict[str, Any]) -> int:
    details = (part.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
