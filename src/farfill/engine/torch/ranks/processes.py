"""The processes of ranks 1 and up, as rank 0 has them: start, orders, answers, and their end.

A rank that dies, or does not answer in time, cannot be replaced: all of them are ended, and `Lost` ends the engine.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from farfill.config.paths import child_environment, default_environment
from farfill.engine.torch.ranks.group import Lost, RankGroup
from farfill.engine.torch.ranks.messages import Channel, Disconnected, Done, Message, Wait

_log = logging.getLogger(__name__)

# Ranks talk to each other on this machine only.
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo"}
_CHILD_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
_MODULE = "farfill.engine.torch.ranks.follow"
_STOP_S = 5.0
# How long the others may take to fail as well, when rank 0 failed in a step.
_AGREE_S = 2.0


class Ranks:
    """`size` processes, this one included. `timeout_s` bounds every exchange, and every answer after one."""

    def __init__(self, size: int, timeout_s: float, *, threads: int = 0) -> None:
        default_environment(_ENVIRONMENT)
        self.size = size
        self.timeout_s = timeout_s
        self.steps = {rank: Done() for rank in range(1, size)}
        self.lost: str | None = None
        self._closing = False
        # Sequences that are no more: whoever drops the last reference may be in the middle of anything.
        self.freed: deque[int] = deque()
        self._lock = threading.Lock()
        self._meeting = tempfile.TemporaryDirectory(prefix="farfill-ranks-")
        store = Path(self._meeting.name) / "store"
        self._channels: dict[int, Channel] = {}
        self._process = self._start(store, threads)
        threading.Thread(target=self._watch, name="farfill-ranks", daemon=True).start()
        try:
            self.group = RankGroup.join(0, size, store, timeout_s)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise Lost(f"the ranks did not meet: {error}") from error

    @property
    def pid(self) -> int:
        """The process whose children the other ranks are."""
        return self._process.pid

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Give all ranks an order. Any thread. Raises Lost."""
        self.require()
        with self._lock:
            freed = tuple(self.freed.popleft() for _ in range(len(self.freed)))
            if freed:
                message = _with_freed(message, freed)
            for rank, channel in self._channels.items():
                try:
                    channel.send(message, descriptor)
                except Disconnected as error:
                    self.lose(f"rank {rank} is gone: {error}")
        self.require()

    def collect(self) -> None:
        """Wait until all ranks have done their step. Raises Lost, also when a step failed on any of them."""
        for rank in self._channels:
            answer = self._answer(rank, self.timeout_s)
            if answer.error is not None:
                self.lose(f"rank {rank} failed in a step: {answer.error}")
        self.require()

    def collect_failures(self, error: Exception) -> None:
        """Rank 0 failed in a step: go on if all others did as well, since all did the same. Raises Lost if not."""
        for rank in self._channels:
            if self._answer(rank, _AGREE_S).error is None:
                self.lose(f"a step failed on rank 0, and not on rank {rank}: {type(error).__name__}: {error}")
        self.require()

    def wait(self) -> None:
        """Wait until all ranks have done all they were told. Raises Lost."""
        self.send(Wait())
        self.collect()

    def lose(self, reason: str) -> None:
        """Remember the first reason, and end all ranks: they may be waiting for each other."""
        if self.lost is None and not self._closing:
            self.lost = reason
            _log.error("the engine's ranks are lost: %s", reason)
        self._process.kill()

    def require(self) -> None:
        """Raise Lost when a rank is gone."""
        if self.lost is not None:
            raise Lost(self.lost)

    def close(self) -> None:
        """End all ranks. Idempotent."""
        if self._closing:
            return
        self._closing = True
        for channel in self._channels.values():
            channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._process.kill()
        self._process.wait()
        RankGroup.leave()
        self._meeting.cleanup()

    def _start(self, store: Path, threads: int) -> subprocess.Popen[bytes]:
        """One process that forks all other ranks."""
        pairs = {rank: socket.socketpair() for rank in range(1, self.size)}
        for rank, (ours, _) in pairs.items():
            # Others than us may be stopped: an order that nobody reads must not block for ever.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, int(self.timeout_s)), 0))
            self._channels[rank] = Channel(ours)
        descriptors = [theirs.fileno() for _, theirs in pairs.values()]
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(store), str(self.timeout_s), str(threads), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=child_environment(_CHILD_ENVIRONMENT),
        )
        for _, theirs in pairs.values():
            theirs.close()
        return process

    def _watch(self) -> None:
        code = self._process.wait()
        which = f"rank {code}" if 0 < code < self.size else "the process of the other ranks"
        if not self._closing:
            self.lose(f"{which} ended")

    def _answer(self, rank: int, timeout_s: float) -> Done:
        try:
            self.steps[rank] = answer = self._channels[rank].done(timeout_s)
        except (Disconnected, TimeoutError) as error:
            self.lose(f"rank {rank} did not answer: {error}")
            raise Lost(self.lost) from error
        return answer


def _with_freed(message: Message, freed: tuple[int, ...]) -> Message:
    return msgspec.structs.replace(message, freed=freed)


def is_supported() -> bool:
    """Whether this system has what ranks share memory by."""
    return hasattr(os, "memfd_create")
