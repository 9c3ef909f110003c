"""Rank 0's executor: it tells the other ranks what step comes, then does its own share of it."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from farfill.engine.executor import SequenceKV
from farfill.engine.protocol import RankLoads
from farfill.engine.torch.executor import TorchExecutor
from farfill.engine.torch.ranks.group import Lost
from farfill.engine.torch.ranks.layers import ExpertLoad
from farfill.engine.torch.ranks.messages import Abandon, Allocate, Attach, Continue, Decode, Prefill, Truncate
from farfill.engine.torch.ranks.processes import Ranks
from farfill.engine.torch.ranks.shared_kv import SharedKV, SharedSpec, shared_memory


class LeadKV(SharedKV):
    """Rank 0's view of a sequence; what it is told, the other ranks hear as well."""

    def __init__(
        self, spec: SharedSpec, capacity_tokens: int, buffer: npt.NDArray[np.uint8], lead: LeadExecutor
    ) -> None:
        super().__init__(spec, capacity_tokens, buffer)
        self._lead = lead
        self.number = lead.numbered(self)

    def attach(self, tokens: int) -> None:
        """All ranks have it when this returns, if they take copies."""
        super().attach(tokens)
        self._lead.tell_attached(self, tokens)

    def fork(self) -> LeadKV:
        """An independent copy with the same room, on all ranks."""
        return self._lead.forked(self)

    def truncate(self, tokens: int) -> None:
        """On all ranks."""
        super().truncate(tokens)
        self._lead.ranks.send(Truncate(self.number, tokens))

    def take_bytes(self, other: LeadKV) -> None:
        """Copy what is in the shared buffer."""
        self._bytes.copy_(other._bytes)


class LeadExecutor(TorchExecutor):
    """Implements `engine.executor.Executor` over several processes; raises Lost when one of them is gone."""

    def __init__(self, model: Any, spec: SharedSpec, ranks: Ranks, experts: ExpertLoad) -> None:
        super().__init__(model, spec)
        self.ranks = ranks
        self._experts = experts
        self._step_s = 0.0
        self._shared_spec = spec
        self._numbers = itertools.count()
        self._allocating = threading.Lock()

    def allocate(self, capacity_tokens: int, *, dense: bool = False) -> LeadKV:
        """An empty sequence on all ranks; `dense` makes no difference to shared memory."""
        return self._allocate(capacity_tokens, None)

    def forked(self, kv: LeadKV) -> LeadKV:
        """A copy of `kv`. Outside of steps only."""
        copy = self._allocate(kv.capacity_tokens, kv)
        copy.take_bytes(kv)
        copy.follow(kv)
        if self._shared_spec.has_copies:
            self.ranks.wait()
        return copy

    def numbered(self, kv: LeadKV) -> int:
        """A number for a new sequence; the other ranks let go of it when nobody here has it any more."""
        number = next(self._numbers)
        weakref.finalize(kv, self.ranks.freed.append, number).atexit = False
        return number

    def tell_attached(self, kv: LeadKV, tokens: int) -> None:
        """See `LeadKV.attach`."""
        self.ranks.send(Attach(kv.number, tokens))
        if self._shared_spec.has_copies:
            self.ranks.wait()

    def prefill(
        self, kv: SequenceKV, token_ids: Sequence[int], layer_done: Callable[[int], None] | None = None
    ) -> None:
        """As on one rank. The others wait after each layer for whether to go on, and with what."""
        assert isinstance(kv, LeadKV)
        chunked = self.capabilities.chunked_prefill
        outlet = None if layer_done is None else _Interruptible(self.ranks, layer_done)
        self.ranks.send(Prefill(kv.number, tuple(token_ids), outlet is not None, chunked))
        with self._step(outlet):
            super().prefill(kv, token_ids, outlet)

    def decode(self, rows: Sequence[tuple[SequenceKV, int]]) -> npt.NDArray[np.float32]:
        """As on one rank."""
        numbered = tuple((kv.number, token) for kv, token in rows if isinstance(kv, LeadKV))
        assert len(numbered) == len(rows)
        self.ranks.send(Decode(numbered, self.capabilities.merged_decode))
        with self._step(None):
            return super().decode(rows)

    def loads(self) -> RankLoads:
        """How busy each rank was. Any thread."""
        others = [self.ranks.steps[rank] for rank in sorted(self.ranks.steps)]
        return RankLoads(
            step_s=(self._step_s, *(other.step_s for other in others)),
            exchange_s=(self.ranks.group.exchange_s, *(other.exchange_s for other in others)),
            expert_tokens=tuple(self._experts.routed.tolist()),
        )

    def idle(self) -> None:
        """Also have the other ranks let go of sequences that are no more."""
        super().idle()
        if self.ranks.freed:
            self.ranks.wait()

    @contextmanager
    def _step(self, outlet: _Interruptible | None) -> Iterator[None]:
        """Around this rank's share of a step: afterwards, all ranks have done theirs."""
        began_s = time.perf_counter()
        try:
            yield
        except Lost as error:
            self.ranks.lose(str(error))
            raise
        except Exception as error:
            self.ranks.require()
            if outlet is None or not outlet.abandoned:
                self.ranks.collect_failures(error)
                raise
            self.ranks.collect()
            raise
        self._step_s += time.perf_counter() - began_s - (0.0 if outlet is None else outlet.paused_s)
        self.ranks.collect()

    def _allocate(self, capacity_tokens: int, copied: LeadKV | None) -> LeadKV:
        descriptor, buffer = shared_memory(self._shared_spec.buffer_bytes(capacity_tokens))
        try:
            # Any thread allocates; numbers must be known to the others before they are used.
            with self._allocating:
                kv = LeadKV(self._shared_spec, capacity_tokens, buffer, self)
                order = Allocate(kv.number, capacity_tokens, None if copied is None else copied.number)
                self.ranks.send(order, descriptor)
        finally:
            os.close(descriptor)
        return kv


class _Interruptible:
    """Called between layers: does what the scheduler wants there, then lets the other ranks go on."""

    def __init__(self, ranks: Ranks, layer_done: Callable[[int], None]) -> None:
        self._ranks = ranks
        self._layer_done = layer_done
        self.abandoned = False
        self.paused_s = 0.0

    def __call__(self, index: int) -> None:
        began_s = time.perf_counter()
        try:
            self._layer_done(index)
        except Lost:
            raise
        except BaseException:
            self.abandoned = True
            self._ranks.send(Abandon())
            raise
        self.paused_s += time.perf_counter() - began_s
        self._ranks.send(Continue())
