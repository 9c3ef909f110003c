"""An `Engine` over any executor in this process: checks requests, owns the KV budget, and runs the scheduler."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from farfill.clock import Clock, WallClock
from farfill.core.errors import CapacityError, InvalidRequestError
from farfill.engine.blocks import BlockLedger
from farfill.core.priority import check_priority
from farfill.core.sampling import SamplingParams
from farfill.engine.checkpoints import checkpoint_bytes
from farfill.engine.executor import Executor
from farfill.engine.jobs import Demand, GenerateJob, PrefillJob
from farfill.engine.limits import EngineLimits
from farfill.engine.media import MediaProcessor
from farfill.engine.memory import KVMemory
from farfill.engine.output import Vocabulary
from farfill.engine.prefix import PrefixCache
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
from farfill.engine.retention import Keep
from farfill.engine.scheduler import Scheduler
from farfill.engine.slots import Slot
from farfill.kv.manifest import build_manifest


class LocalEngine:
    """Implements `engine.protocol.Engine`."""

    def __init__(
        self,
        info: EngineInfo,
        executor: Executor,
        vocabulary: Vocabulary,
        limits: EngineLimits,
        clock: Clock | None = None,
        *,
        media: MediaProcessor | None = None,
    ) -> None:
        self.info = info
        self.media = media
        self.vocabulary = vocabulary
        self._executor = executor
        self._limits = limits
        clock = clock or WallClock()
        self._memory = KVMemory(info.kv_total_bytes)
        self._prefix = PrefixCache(info.layout, limits.prefix_cache_bytes, ttl_s=limits.prefix_ttl_s, clock=clock)
        self._scheduler = Scheduler(executor, self._memory, self._prefix, limits, clock)
        self._memory.on_release = self._scheduler.wake
    @property
    def blocks(self) -> BlockLedger | None:
        """What the prefix cache holds; None when it is off."""
        return self._prefix.ledger if self._limits.prefix_cache_bytes else None


    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return self._scheduler.load()

    def start(self) -> None:
        """Start the scheduler thread."""
        self._scheduler.start()

    def close(self) -> None:
        """Fail all work with CancelledWorkError and join the thread. Idempotent."""
        self._scheduler.close()

    def prefill(self, work: PrefillWork, sink: PrefillSink) -> PrefillHandle:
        """Queue a prefill of `prompt[:-1]`, which needs at least one token.

        Raises InvalidRequestError, CapacityError (queue_full) or EngineError. While KV memory is short it waits.
        """
        self._check_work(work, at_least=2)
        capacity = len(work.prompt) - 1
        manifest = build_manifest(self.info.layout, capacity)
        demand = Demand(1, capacity, capacity, self._executor.kv_bytes, checkpoint_bytes(manifest))
        self._memory.require_possible(demand.most_bytes)
        job = PrefillJob(work, sink, manifest=manifest, keys=self._keys(work), demand=demand, wake=self._scheduler.wake)
        self._scheduler.submit(job)
        return job

    def reserve(self, work: GenerateWork) -> KVSlot:
        """KV memory for all of `work`. Raises CapacityError (kv_memory, queue_full), InvalidRequestError, EngineError.

        It never takes memory that a queued request is waiting for.
        """
        self._check_work(work, at_least=2)
        manifest = build_manifest(self.info.layout, len(work.prompt) - 1)
        demand = replace(self._demand(work), checkpoint_bytes=checkpoint_bytes(manifest))
        self._memory.require_possible(demand.most_bytes)
        self._scheduler.require_open(queues=True)
        if self._scheduler.memory_is_contended():
            raise CapacityError("queued requests are waiting for KV memory", reason="kv_memory")
        slot = Slot(manifest, demand.capacity_tokens)
        slot.fill(self._memory, demand.first_bytes)
        try:
            kv = self._executor.allocate(demand.capacity_tokens, dense=demand.is_whole)
            slot.open(kv, self._prefix.find(self._keys(work)))
        except BaseException:
            slot.release()
            raise
        return slot

    def prepare(self, sampling: SamplingParams) -> Future[None]:
        """Compile the grammar off this thread; done at once without one."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # others may wait for the same grammar: nobody may cancel it
        if not sampling.grammar:
            done.set_result(None)
            return done

        def pass_on(compiled: Future[Any]) -> None:
            error = compiled.exception()
            done.set_result(None) if error is None else done.set_exception(error)

        self.vocabulary.grammars.prepare(sampling.grammar).add_done_callback(pass_on)
        return done

    def generate(
        self, work: GenerateWork, sink: TokenSink, *, slot: KVSlot | None = None, valid_tokens: int = 0
    ) -> Cancellable:
        """Queue a generation. When this raises, `slot` is still the caller's to release.

        Raises InvalidRequestError, CapacityError (queue_full, only without `slot`) or EngineError.
        """
        self._check_work(work, at_least=1)
        demand = self._demand(work)
        job = GenerateJob(
            work, sink, vocabulary=self.vocabulary, keys=self._keys(work), demand=demand, wake=self._scheduler.wake
        )
        if slot is None:
            if valid_tokens:
                raise InvalidRequestError("valid_tokens needs a slot that holds them", param="valid_tokens")
            self._scheduler.submit(job)
            return job
        assert isinstance(slot, Slot), "the slot comes from another engine"
        self._check_valid_tokens(slot, demand, job.num_tokens, valid_tokens)
        self._scheduler.require_open(queues=False)
        taken = slot.take(job)
        if taken is None:
            raise InvalidRequestError("the slot was released or used before", param="slot")
        job.kv, job.hold, job.hit, job.checkpoints = taken.kv, taken.hold, taken.hit, taken.checkpoints
        job.valid_tokens = valid_tokens
        try:
            self._scheduler.submit(job)
        except BaseException:
            job.done = True
            job.free()
            raise
        return job

    def check_integrity(self) -> None:
        """Raise AssertionError if any KV memory is held without an owner, or, while idle, a snapshot is pinned."""
        self._memory.check_integrity()
        self._prefix.check_integrity()
        if self._scheduler.idle and not self._memory.used_bytes:
            pinned = self._prefix.pinned()
            assert not pinned, f"{pinned} prefix snapshots are pinned by nobody"

    def keep_prefix(self, work: GenerateWork | PrefillWork, how: Keep) -> None:
        """Say how snapshots of this prompt's beginning are to be kept, those to come as well: pinned, or by weight.

        Only whole prefill chunks before the last token count. Pins take up to half of the prefix cache.
        """
        self._prefix.keep(self._keys(work), how)

    def _keys(self, work: GenerateWork | PrefillWork) -> tuple[bytes, ...]:
        return self._prefix.keys(work.prompt, work.cache_salt, work.adapter, work.media)

    def _check_work(self, work: GenerateWork | PrefillWork, *, at_least: int) -> None:
        prompt = work.prompt
        check_priority(work.priority)
        if work.media_inputs is not None and self.media is None:
            raise InvalidRequestError(
                f"{self.info.model} takes no images here", param="media", reason="unsupported_media"
            )
        if len(prompt) < at_least:
            raise InvalidRequestError(
                f"the prompt needs at least {at_least} tokens, it has {len(prompt)}", param="prompt"
            )
        longest = self.info.max_context_tokens - 1
        if len(prompt) > longest:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens; the context of {self.info.max_context_tokens} tokens leaves "
                f"room for {longest}",
                param="prompt",
            )
        if not all(0 <= token < self.info.vocab_size for token in prompt):
            raise InvalidRequestError(f"token ids must be from 0 to {self.info.vocab_size - 1}", param="prompt")

    def _demand(self, work: GenerateWork) -> Demand:
        if work.sampling.max_tokens < 1 or work.sampling.n < 1:
            raise InvalidRequestError("max_tokens and n must be at least 1", param="max_tokens")
        max_tokens = min(work.sampling.max_tokens, self.info.max_context_tokens - len(work.prompt))
        num_tokens = len(work.prompt) - 1
        reserve = self._limits.output_reserve_tokens
        # Further choices are whole copies, room included.
        first = max_tokens if reserve is None or work.sampling.n > 1 else min(max_tokens, reserve)
        demand = Demand(work.sampling.n, num_tokens + max_tokens, num_tokens + first, self._executor.kv_bytes)
        self._memory.require_possible(demand.most_bytes)
        return demand

    @staticmethod
    def _check_valid_tokens(slot: Slot, demand: Demand, num_tokens: int, valid_tokens: int) -> None:
        layout = slot.manifest.layout
        if slot.manifest.num_tokens != num_tokens or slot.capacity_tokens != demand.capacity_tokens:
            raise InvalidRequestError("the slot was reserved for other work", param="slot")
        partial = 0 < valid_tokens < num_tokens and layout.can_continue_at(valid_tokens)
        if not (valid_tokens in (0, num_tokens) or partial):
            raise InvalidRequestError(
                f"KV of {valid_tokens} of {num_tokens} tokens cannot be continued from", param="valid_tokens"
            )
