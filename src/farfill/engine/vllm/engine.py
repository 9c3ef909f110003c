"""The `Engine` that is a vLLM server beside this process: its HTTP API for tokens, shared memory for KV."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

import structlog

from farfill.core.errors import CapacityError, EngineError, InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import (
    Cancellable,
    EngineInfo,
    EngineLoad,
    GenerateWork,
    KVSlot,
    PrefillHandle,
    PrefillSink,
    PrefillWork,
    TokenSink,
)
from farfill.engine.vllm.api import VllmApi
from farfill.engine.vllm.files import KVFile, KVFolder
from farfill.engine.vllm.jobs import GenerateJob, Job, PrefillJob
from farfill.engine.vllm.messages import Alive, Exported, ExportFailed, Message
from farfill.engine.vllm.server import VllmServer
from farfill.kv.manifest import build_manifest

_log = structlog.get_logger(__name__)


class VllmEngine:
    """Implements `engine.protocol.Engine`. Owns the server, the folder and one event loop on one thread."""

    def __init__(
        self, info: EngineInfo, vocabulary: Vocabulary, server: VllmServer, folder: KVFolder, *, max_queue: int
    ) -> None:
        self.info = info
        self._vocabulary = vocabulary
        self._server = server
        self._folder = folder
        self._max_queue = max_queue
        self._api = VllmApi(server.socket)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="farfill-vllm", daemon=True)
        self._jobs: set[Job] = set()
        self._prefills: dict[str, PrefillJob] = {}
        self._closed = False

    def load(self) -> EngineLoad:
        """How busy vLLM is with work from here."""
        jobs = list(self._jobs)
        waiting = [job for job in jobs if job.waiting]
        return EngineLoad(
            queued_tokens=sum(job.tokens for job in waiting),
            running_sequences=len(jobs) - len(waiting),
            waiting_sequences=len(waiting),
            kv_used_bytes=self._folder.used_bytes,
            prefix_cache_bytes=0,
        )

    def start(self) -> None:
        """Start the event loop's thread."""
        self._server.line.on_message = lambda message: self._post(self._heard, message)
        self._server.line.on_end = lambda: self._post(self._line_ended)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._api.open(), self._loop).result()

    def close(self) -> None:
        """Fail all work with CancelledWorkError, end vLLM, remove shared memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._server.stop()
        self._folder.close()

    def prefill(self, work: PrefillWork, sink: PrefillSink) -> PrefillHandle:
        """Hand `prompt[:-1]` to vLLM. Raises InvalidRequestError, CapacityError or EngineError."""
        self._check(work.prompt, at_least=2)
        file = self._folder.open(build_manifest(self.info.layout, len(work.prompt) - 1))
        job = PrefillJob(work, sink, file, api=self._api, loop=self._loop, over=self._over)
        self._launch(job)
        return job

    def reserve(self, work: GenerateWork) -> KVSlot:
        """Shared memory for the prompt's KV; vLLM finds room for the rest when it is asked to generate."""
        self._check(work.prompt, at_least=2)
        file = self._folder.open(build_manifest(self.info.layout, len(work.prompt) - 1))
        return file

    def prepare(self, sampling: SamplingParams) -> Future[None]:
        """vLLM compiles grammars itself."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def generate(
        self, work: GenerateWork, sink: TokenSink, *, slot: KVSlot | None = None, valid_tokens: int = 0
    ) -> Cancellable:
        """Hand the prompt to vLLM, with what `slot` holds of its KV. When this raises, `slot` is still the caller's."""
        self._check(work.prompt, at_least=1)
        num_tokens = len(work.prompt) - 1
        if slot is not None and (not isinstance(slot, KVFile) or slot.manifest.num_tokens != num_tokens):
            raise InvalidRequestError("the slot was reserved for other work", param="slot")
        whole = valid_tokens in (0, num_tokens) or self.info.layout.can_continue_at(valid_tokens)
        if not whole or (slot is None and valid_tokens):
            raise InvalidRequestError(f"KV of {valid_tokens} tokens cannot be continued from", param="valid_tokens")
        max_tokens = min(work.sampling.max_tokens, self.info.max_context_tokens - len(work.prompt))
        job = GenerateJob(
            work,
            sink,
            slot,
            valid_tokens=valid_tokens,
            max_tokens=max_tokens,
            vocabulary=self._vocabulary,
            api=self._api,
            loop=self._loop,
            over=self._over,
        )
        self._launch(job)
        return job

    def check_integrity(self) -> None:
        """Raise AssertionError if shared memory is held while nothing runs."""
        if not self._jobs:
            assert not self._folder.used_bytes, f"{self._folder.used_bytes} bytes of shared memory have no owner"

    def _check(self, prompt: tuple[int, ...], *, at_least: int) -> None:
        if self._closed or not self._server.running:
            raise EngineError("vLLM is not running")
        if len(self._jobs) >= self._max_queue:
            raise CapacityError(f"{self._max_queue} requests are under way", reason="queue_full")
        longest = self.info.max_context_tokens - 1
        if not at_least <= len(prompt) <= longest:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens; from {at_least} to {longest} are possible", param="prompt"
            )
        if not all(0 <= token < self.info.vocab_size for token in prompt):
            raise InvalidRequestError(f"token ids must be from 0 to {self.info.vocab_size - 1}", param="prompt")

    def _launch(self, job: Job) -> None:
        self._jobs.add(job)
        if isinstance(job, PrefillJob):
            self._prefills[job.file.key] = job
        self._loop.call_soon_threadsafe(job.launch)

    def _over(self, job: Job) -> None:
        self._jobs.discard(job)
        if isinstance(job, PrefillJob):
            self._prefills.pop(job.file.key, None)
        elif isinstance(job, GenerateJob):
            job.free()

    def _heard(self, message: Message) -> None:
        if isinstance(message, Alive):
            for job in list(self._prefills.values()):
                job.alive()
            return
        if isinstance(message, Exported | ExportFailed):
            job = self._prefills.get(message.key)
            if job is None:
                return  # withdrawn meanwhile
            if isinstance(message, Exported):
                job.exported(message.pieces)
            else:
                job.export_failed(message.detail)

    def _line_ended(self) -> None:
        if not self._closed:
            _log.error("vllm_worker_gone", running=self._server.running, log=str(self._server.log_file))

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _end(self) -> None:
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*(job.ended.wait() for job in jobs))
        await self._api.close()
