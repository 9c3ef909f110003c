"""The processes of ranks 1 and up: they do what rank 0 says until it closes their sockets. Started by `processes`."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farfill.engine.executor import Capabilities
from farfill.engine.torch.executor import TorchExecutor
from farfill.engine.torch.host import set_threads
from farfill.engine.torch.kv import TorchKV
from farfill.engine.torch.linear import pack_linears
from farfill.engine.torch.norms import compile_norms
from farfill.engine.torch.ranks.cutting import CutModel, load_cut
from farfill.engine.torch.ranks.group import RankGroup
from farfill.engine.torch.ranks.messages import (
    Abandon,
    Allocate,
    Attach,
    Channel,
    Continue,
    Decode,
    Disconnected,
    Done,
    Load,
    Order,
    Pack,
    Prefill,
    Truncate,
    Wait,
    channel_of,
)
from farfill.engine.torch.ranks.shared_kv import SharedKV, SharedSpec, mapped
from farfill.engine.torch.selfcheck import ModelCheck
from farfill.engine.torch.step import StepCache

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class _Abandoned(Exception):  # noqa: N818 (no error: rank 0 wants it)
    """The prefill chunk is given up."""


class FollowExecutor(TorchExecutor):
    """This rank's share of each step. Nobody reads its logits, so it computes only what the others need of them."""

    def __init__(self, model: Any, spec: SharedSpec, *, with_head: bool) -> None:
        super().__init__(model, spec)
        self.shared_spec = spec
        self._with_head = with_head

    def _next_logits(
        self, token_ids: Sequence[Sequence[int]], sequences: Sequence[TorchKV], cache: StepCache
    ) -> npt.NDArray[np.float32]:
        if self._with_head:
            return super()._next_logits(token_ids, sequences, cache)
        self._run(self._decoder, token_ids, [kv.next_position for kv in sequences], cache)
        return np.empty((len(sequences), 0), np.float32)


@dataclass(slots=True)
class _Model:
    cut: CutModel
    executor: FollowExecutor


class Follower:
    """Obeys one order after the other."""

    def __init__(self, channel: Channel, group: RankGroup) -> None:
        self._channel = channel
        self._group = group
        self._model: _Model | None = None
        self._sequences: dict[int, SharedKV] = {}
        self._step_s = self._paused_s = 0.0

    def run(self) -> None:
        """Until rank 0 closes the socket."""
        while True:
            self._next()

    def _next(self) -> Order:
        """Obey the next order."""
        order, descriptor = self._channel.order()
        for number in order.freed:
            self._sequences.pop(number, None)
        match order:
            case Load():
                self._load(order)
            case Pack():
                self._pack(order)
            case Allocate():
                assert descriptor is not None
                self._allocate(order, descriptor)
            case Attach():
                self._sequences[order.number].attach(order.tokens)
            case Truncate():
                self._sequences[order.number].truncate(order.tokens)
            case Prefill() | Decode():
                self._step(order)
            case Wait():
                self._answer()
            case Continue() | Abandon():
                pass
        return order

    def _step(self, order: Prefill | Decode) -> None:
        began_s, error = time.perf_counter(), None
        paused_before_s = self._paused_s
        try:
            self._prefill(order) if isinstance(order, Prefill) else self._decode(order)
        except _Abandoned:
            pass
        except Exception as failure:
            _log.exception("a step failed")
            error = f"{type(failure).__name__}: {failure}"
        self._step_s += time.perf_counter() - began_s - (self._paused_s - paused_before_s)
        self._answer(error)

    def _prefill(self, order: Prefill) -> None:
        executor = self._executor
        executor.capabilities = Capabilities(chunked_prefill=order.chunked)
        between = self._between_layers if order.interruptible else None
        executor.prefill(self._sequences[order.number], order.token_ids, between)

    def _decode(self, order: Decode) -> None:
        executor = self._executor
        chunked = executor.capabilities.chunked_prefill
        executor.capabilities = Capabilities(chunked_prefill=chunked, merged_decode=order.merged)
        executor.decode([(self._sequences[number], token) for number, token in order.rows])

    def _between_layers(self, _: int) -> None:
        """Do what rank 0 does there, until it goes on. Steps in there count for themselves."""
        began_s = time.perf_counter()
        order = self._next()
        while not isinstance(order, Continue | Abandon):
            order = self._next()
        self._paused_s += time.perf_counter() - began_s
        if isinstance(order, Abandon):
            raise _Abandoned

    def _load(self, order: Load) -> None:
        self._model = None
        self._sequences.clear()
        cut = load_cut(Path(order.folder), order.dtype, order.attention, order.prefill_chunk_tokens, self._group)
        self._model = _Model(cut, FollowExecutor(cut.net, cut.spec, with_head=not cut.head_everywhere))
        self._answer()

    def _pack(self, order: Pack) -> None:
        assert self._model is not None
        cut = self._model.cut
        if order.compares:
            ModelCheck(cut.net)
        pack_linears(cut.net, cut.called)
        compile_norms(cut.net)
        self._answer()

    def _allocate(self, order: Allocate, descriptor: int) -> None:
        spec = self._executor.shared_spec
        buffer = mapped(descriptor, spec.buffer_bytes(order.capacity_tokens))
        os.close(descriptor)
        kv = SharedKV(spec, order.capacity_tokens, buffer)
        if order.copies is not None:
            kv.follow(self._sequences[order.copies])
        self._sequences[order.number] = kv

    @property
    def _executor(self) -> FollowExecutor:
        assert self._model is not None
        return self._model.executor

    def _answer(self, error: str | None = None) -> None:
        self._channel.send(Done(error, self._group.exchange_s, self._step_s))


def main(arguments: Sequence[str]) -> int:
    """Fork ranks 1 and up and end with the first that ends; the exit status is its number, 0 when rank 0 ended.

    What all of them import is loaded once and shared; nothing has started a thread by then.
    """
    store, timeout_s, threads, *descriptors = arguments
    launcher = os.getpid()
    ranks: dict[int, int] = {}
    for rank, descriptor in enumerate(descriptors, start=1):
        pid = os.fork()
        if pid == 0:
            _die_with(launcher)
            for other in set(descriptors) - {descriptor}:
                os.close(int(other))
            set_threads(int(threads))
            # Without the interpreter's end: threads of torch.distributed may still wait for those that are gone.
            os._exit(_follow(rank, len(descriptors) + 1, Path(store), float(timeout_s), int(descriptor)))
        ranks[pid] = rank
    for descriptor in descriptors:
        os.close(int(descriptor))
    pid, status = os.wait()
    if status == 0:
        return 0
    code = os.waitstatus_to_exitcode(status)
    how = f"was ended by signal {-code}" if code < 0 else f"failed with status {code}"
    print(f"farfill: rank {ranks[pid]} (process {pid}) {how}", file=sys.stderr, flush=True)
    return ranks[pid]


def _follow(rank: int, size: int, store: Path, timeout_s: float, descriptor: int) -> int:
    """The exit status: 0 when rank 0 ended, 1 when the ranks lost each other or something broke."""
    channel = channel_of(descriptor)
    try:
        group = RankGroup.join(rank, size, store, timeout_s)
        Follower(channel, group).run()
    except Disconnected:
        return 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    return 1


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(1)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    os._exit(main(sys.argv[1:]))
