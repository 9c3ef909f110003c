"""An `Engine` over any executor in this process: checks requests, owns the KV budget, and runs the scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from farfill.clock import Clock, WallClock
from farfill.core.errors import CapacityError, InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.engine.blocks import BlockLedger
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
    KeptPrefix,
    KVSlot,
    PrefillHandle,
    PrefillSink,
    PrefillWork,
    TokenSink,
)
from farfill.engine.requests import check_valid_tokens, check_work, output_tokens, prepare_grammar
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
        self._clock = clock = clock or WallClock()
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
        check_work(self.info, self.media, work, at_least=2)
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
        check_work(self.info, self.media, work, at_least=2)
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
        return prepare_grammar(self.vocabulary, sampling)

    def generate(
        self, work: GenerateWork, sink: TokenSink, *, slot: KVSlot | None = None, valid_tokens: int = 0
    ) -> Cancellable:
        """Queue a generation. When this raises, `slot` is still the caller's to release.

        Raises InvalidRequestError, CapacityError (queue_full, only without `slot`) or EngineError.
        """
        check_work(self.info, self.media, work, at_least=1)
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
        if slot.capacity_tokens != demand.capacity_tokens:
            raise InvalidRequestError("the slot was reserved for other work", param="slot")
        check_valid_tokens(slot.manifest, job.num_tokens, valid_tokens)
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

    def keep_prefix(
        self, tokens: Sequence[int], cache_salt: str, *, pinned: bool, weight: float, ttl_s: float
    ) -> KeptPrefix:
        """See `protocol.KeepsPrefixes`."""
        # One more, since the last token of a prompt is never part of a snapshot.
        keys = self._prefix.keys((*tokens, 0), cache_salt)
        step = self.info.layout.prefill_chunk_tokens
        there = 0
        if keys:
            until_s = self._clock.now_s() + ttl_s if ttl_s else math.inf
            there = self._prefix.keep(keys, Keep(weight, pinned, until_s))
            self._scheduler.wake()
        return KeptPrefix(tokens=len(keys) * step, there_tokens=there * step)

    def _keys(self, work: GenerateWork | PrefillWork) -> tuple[bytes, ...]:
        return self._prefix.keys(work.prompt, work.cache_salt, work.adapter, work.media)

    def _demand(self, work: GenerateWork) -> Demand:
        max_tokens = output_tokens(self.info, work)
        num_tokens = len(work.prompt) - 1
        reserve = self._limits.output_reserve_tokens
        # Further choices are whole copies, room included.
        first = max_tokens if reserve is None or work.sampling.n > 1 else min(max_tokens, reserve)
        demand = Demand(work.sampling.n, num_tokens + max_tokens, num_tokens + first, self._executor.kv_bytes)
        self._memory.require_possible(demand.most_bytes)
        return demand
