"""The `Engine` that is a vLLM server beside this process: its HTTP API for tokens, shared memory for KV."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TypeVar

import structlog

from farfill.core.errors import CapacityError, EngineError, InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.engine.blocks import BlockLedger
from farfill.engine.media import MediaProcessor
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
from farfill.engine.requests import check_valid_tokens, check_work, output_tokens, prepare_grammar
from farfill.engine.vllm.api import Endpoint, VllmApi, sampling_fields
from farfill.engine.vllm.attached import AttachedServer
from farfill.engine.vllm.files import KVFile, KVFolder
from farfill.engine.vllm.health import Vitals, read_vitals
from farfill.engine.vllm.jobs import Exports, GenerateJob, Job, PrefillJob
from farfill.engine.vllm.kv_events import EVENTS_SOCKET, VllmBlockFeed, VllmBlocks
from farfill.engine.vllm.media import VllmMedia
from farfill.engine.vllm.messages import (
    Alive,
    Begun,
    Exported,
    ExportFailed,
    ImportParams,
    Loaded,
    LoadFailed,
    Message,
    import_params,
)
from farfill.engine.vllm.server import VllmServer
from farfill.kv.manifest import build_manifest

WATCH_S = 2.0
ANSWER_S = 5.0
# Longer than vLLM takes to compile a kernel for a new shape.
STALL_S = 120.0

_NO_GRAMMARS = "grammars and schemas need vLLM started with --structured-outputs-config.backend=guidance"

_Work = TypeVar("_Work", PrefillWork, GenerateWork)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Traits:
    """What this vLLM can do. `ranks`: how many have a part of each tensor of the layout. `seeds_in_one_step`: it dies
    when a seeded request's prompt takes several steps. `first_tokens`: it dies of a prompt with fewer. `tells_begun`:
    its connector tells what it begins a prompt with, in each of so many `processes`. `images`: the token that stands
    for one, and its text; None: it takes text only.
    """

    ranks: tuple[int, ...]
    seeds_in_one_step: bool = False
    first_tokens: int = 1
    prioritizes: bool = True
    grammars: bool = True
    tells_begun: bool = True
    processes: int = 1
    images: tuple[int, str] | None = None


class VllmEngine:
    """Implements `engine.protocol.Engine`. Owns the server, the folder and one event loop on one thread."""

    def __init__(
        self,
        info: EngineInfo,
        vocabulary: Vocabulary,
        server: VllmServer | AttachedServer,
        folder: KVFolder,
        *,
        max_queue: int,
        stall_s: float = STALL_S,
        traits: Traits,
        blocks: VllmBlocks | None = None,
    ) -> None:
        """`stall_s`: with work under way and no step ended for so long, vLLM counts as dead.

        `blocks`: what its KV events are read into.
        """
        self.info = info
        self.media: MediaProcessor | None = None
        self._vocabulary = vocabulary
        self._server = server
        self._folder = folder
        self._max_queue = max_queue
        self._api = VllmApi(server.endpoint)
        self._loop = asyncio.new_event_loop()
        if traits.images is not None:
            self.media = VllmMedia(self._api, self._loop, *traits.images)
        self._thread = Thread(target=self._run, name="farfill-vllm", daemon=True)
        self._jobs: set[Job] = set()
        self._exporting: dict[str, Job] = {}
        self._generating: dict[str, GenerateJob] = {}
        self._stall_s = stall_s
        self._traits = traits
        self._heard_s = time.monotonic()
        self._vitals = Vitals()
        self._loads_refused = self._loads_broken = 0
        self._dead = ""
        self._watching: asyncio.Future[None] | None = None
        self._closed = False
        self._blocks = blocks
        self._block_feed = None if blocks is None else VllmBlockFeed(folder.path / EVENTS_SOCKET, blocks)

    @property
    def folder(self) -> Path:
        """Where sockets and shared memory are."""
        return self._folder.path

    @property
    def blocks(self) -> BlockLedger | None:
        """What vLLM's events say; None where they do not say enough."""
        return None if self._blocks is None else self._blocks.ledger

    @property
    def endpoint(self) -> Endpoint:
        """Where vLLM answers."""
        return self._server.endpoint

    def log(self, lines: int) -> str:
        """The last lines that vLLM wrote."""
        return self._server.tail(lines)

    def load(self) -> EngineLoad:
        """How busy vLLM is. Raises EngineError when it is dead."""
        if self._dead:
            raise EngineError(self._dead, reason="engine_dead")
        jobs = list(self._jobs)
        waiting = [job for job in jobs if job.waiting]
        vitals = self._vitals
        # vLLM's own number stays as it was in its last step: idle, it holds nothing.
        usage = vitals.kv_usage if jobs else 0.0
        return EngineLoad(
            queued_tokens=sum(job.tokens for job in waiting),
            running_sequences=len(jobs) - len(waiting),
            waiting_sequences=len(waiting),
            # Whichever of both is fuller decides what can still be taken.
            kv_used_bytes=max(self._folder.used_bytes, int(usage * self.info.kv_total_bytes)),
            prefix_cache_bytes=0,
            totals=replace(vitals.totals, loads_refused=self._loads_refused, loads_broken=self._loads_broken),
            ready=vitals.ready,
            exposition=vitals.exposition,
        )

    def start(self) -> None:
        """Start the event loop's thread."""
        self._server.line.on_message = lambda message: self._post(self._heard, message)
        self._server.line.on_end = lambda: self._post(self._line_ended)
        if self._block_feed is not None:
            self._block_feed.start()
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result()

    def close(self) -> None:
        """Fail all work with CancelledWorkError, end vLLM, remove shared memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._block_feed is not None:
            self._block_feed.close()
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        self._server.stop()
        self._folder.close()

    def prefill(self, work: PrefillWork, sink: PrefillSink) -> PrefillHandle:
        """Hand `prompt[:-1]` to vLLM. Raises InvalidRequestError, CapacityError or EngineError."""
        self._check(work, at_least=1 + self._traits.first_tokens)
        file = self._folder.open(build_manifest(self.info.layout, len(work.prompt) - 1))
        job = PrefillJob(
            self._ranked(work), sink, Exports(file, self._traits.ranks), api=self._api, loop=self._loop, over=self._over
        )
        self._launch(job)
        return job

    def reserve(self, work: GenerateWork) -> KVSlot:
        """Shared memory for the prompt's KV; vLLM finds room for the rest when it is asked to generate."""
        self._check(work, at_least=2)
        return self.reserve_tokens(len(work.prompt) - 1)

    def reserve_tokens(self, num_tokens: int) -> KVFile:
        """The same for a prompt of which only its length is known. Raises CapacityError, InvalidRequestError."""
        if not 1 <= num_tokens < self.info.max_context_tokens:
            raise InvalidRequestError(f"KV of {num_tokens} tokens does not fit the context", param="num_tokens")
        return self._folder.open(build_manifest(self.info.layout, num_tokens))

    def import_of(self, slot: KVSlot, valid_tokens: int, digest: str) -> dict[str, object]:
        """`kv_transfer_params` for somebody else's request: use `slot` if the prompt is that of `digest`."""
        assert isinstance(slot, KVFile)
        params = ImportParams(slot.key, str(slot.path), slot.nbytes, slot.manifest.num_tokens, valid_tokens, digest)
        return import_params(params)

    def prepare(self, sampling: SamplingParams) -> Future[None]:
        """Compile a grammar within our bounds: vLLM, which compiles it again, has none."""
        if sampling.grammar and not self._traits.grammars:
            refused: Future[None] = Future()
            refused.set_exception(InvalidRequestError(_NO_GRAMMARS, param="response_format"))
            return refused
        return prepare_grammar(self._vocabulary, sampling)

    def generate(
        self, work: GenerateWork, sink: TokenSink, *, slot: KVSlot | None = None, valid_tokens: int = 0
    ) -> Cancellable:
        """Hand the prompt to vLLM, with what `slot` holds of its KV. When this raises, `slot` is still the caller's."""
        self._check(work, at_least=self._traits.first_tokens)
        most_tokens = output_tokens(self.info, work)
        if work.sampling.grammar and not self._traits.grammars:
            raise InvalidRequestError(_NO_GRAMMARS, param="response_format")
        num_tokens = len(work.prompt) - 1
        if slot is None:
            if valid_tokens:
                raise InvalidRequestError("valid_tokens needs a slot that holds them", param="valid_tokens")
        elif isinstance(slot, KVFile):
            check_valid_tokens(slot.manifest, num_tokens, valid_tokens)
        else:
            raise InvalidRequestError("the slot was reserved for other work", param="slot")
        seeded = work.sampling.seed is not None and work.sampling.temperature > 0
        several_steps = valid_tokens < num_tokens >= self._traits.first_tokens
        compute_first = self._traits.seeds_in_one_step and seeded and several_steps
        fields = sampling_fields(work.sampling, most_tokens)
        file = slot
        if compute_first and file is None:
            file = self._folder.open(build_manifest(self.info.layout, num_tokens))
        job = GenerateJob(
            self._ranked(work),
            sink,
            file,
            valid_tokens=0 if compute_first else valid_tokens,
            exports=Exports(file, self._traits.ranks) if compute_first and file is not None else None,
            fields=fields,
            vocabulary=self._vocabulary,
            api=self._api,
            loop=self._loop,
            over=self._over,
            watch=uuid.uuid4().hex if self._traits.tells_begun else "",
            processes=self._traits.processes,
        )
        self._launch(job)
        return job

    def check_integrity(self) -> None:
        """Raise AssertionError if, while idle, shared memory has no owner."""
        if not self._jobs:
            orphans = self._folder.orphans()
            assert not orphans, f"files of shared memory without an owner: {orphans}"

    def _check(self, work: PrefillWork | GenerateWork, *, at_least: int) -> None:
        if self._dead:
            raise EngineError(f"the engine died: {self._dead}", reason="engine_dead")
        if self._closed:
            raise EngineError("the engine is closed")
        if len(self._jobs) >= self._max_queue:
            raise CapacityError(f"{self._max_queue} requests are under way", reason="queue_full")
        check_work(self.info, self.media, work, at_least=at_least)

    def _ranked(self, work: _Work) -> _Work:
        """vLLM refuses priorities unless it was started to heed them."""
        return work if self._traits.prioritizes else replace(work, priority=0)

    def _launch(self, job: Job) -> None:
        self._jobs.add(job)
        if job.exports is not None:
            self._exporting[job.exports.file.key] = job
        if isinstance(job, GenerateJob) and job.key:
            self._generating[job.key] = job
        self._loop.call_soon_threadsafe(job.launch)

    def _over(self, job: Job) -> None:
        self._jobs.discard(job)
        if job.exports is not None:
            self._exporting.pop(job.exports.file.key, None)
        if isinstance(job, GenerateJob):
            self._generating.pop(job.key, None)
            job.free()

    def _heard(self, message: Message) -> None:
        self._heard_s = time.monotonic()
        if isinstance(message, Alive):
            for job in list(self._exporting.values()):
                job.alive()
            return
        if isinstance(message, Begun | Loaded):
            generating = self._generating.get(message.key)
            if generating is None:
                return  # it is over
            if isinstance(message, Begun):
                generating.begun(message.cached_tokens)
            else:
                generating.loaded(message.rank)
        elif isinstance(message, LoadFailed):
            self._not_loaded(message)
        elif isinstance(message, Exported | ExportFailed):
            job = self._exporting.get(message.key)
            if job is None:
                return  # withdrawn meanwhile
            if isinstance(message, Exported):
                job.exported(message.pieces, message.rank)
            else:
                job.end(EngineError(f"vLLM did not export the prompt's KV: {message.detail}"))

    def _not_loaded(self, message: LoadFailed) -> None:
        reason = "refused" if message.refused else "broken"
        jobs = [job for job in self._jobs if isinstance(job, GenerateJob)]
        if not sum(job.not_loaded(message.key, f"{reason}: {message.detail}") for job in jobs):
            return  # other ranks and choices told as much, or the request is over
        self._loads_refused += message.refused
        self._loads_broken += not message.refused
        _log.warning("kv_not_loaded", key=message.key, reason=reason, detail=message.detail)

    def _line_ended(self) -> None:
        self._die("one of vLLM's worker processes is gone")

    async def _watch(self) -> None:
        """Look at vLLM every now and then; whatever is wrong for good ends everything here."""
        while not self._dead:
            await asyncio.sleep(WATCH_S)
            quiet_s = time.monotonic() - max([self._heard_s, *(job.began_s for job in self._jobs)])
            if not self._server.running:
                self._die("vLLM ended by itself")
            elif self._jobs and quiet_s > self._stall_s:
                self._die(f"vLLM did not end a step for {quiet_s:.0f} s with {len(self._jobs)} requests under way")
            else:
                await self._look()

    async def _look(self) -> None:
        try:
            status = await self._api.health(ANSWER_S)
            if status == 503:
                self._die("vLLM says that its engine is dead")
                return
            vitals = read_vitals(await self._api.metrics(ANSWER_S))
        except (EngineError, ValueError) as error:
            if self._vitals.ready:
                _log.warning("vllm_not_ready", detail=str(error))
            self._vitals = replace(self._vitals, ready=False)
            return
        self._vitals = replace(vitals, ready=status == 200)

    def _die(self, why: str) -> None:
        """On the loop: nothing works any more. The worker hears of it through `load` and ends."""
        if self._closed or self._dead:
            return
        self._dead = why
        _log.error("vllm_died", detail=why, log=self._server.tail())
        self._server.kill()
        for job in list(self._jobs):
            job.end(EngineError(f"the engine died: {why}", reason="engine_dead"))

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _begin(self) -> None:
        await self._api.open()
        await self._api.find_dialect()
        self._watching = asyncio.ensure_future(self._watch())

    async def _end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        jobs = list(self._jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*(job.ended.wait() for job in jobs))
        await self._api.close()
