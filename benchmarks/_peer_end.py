"""One end of a competitor, run by the Python of `make bench-peers`, told what to do by JSON lines on stdin.

Run as `_peer_end.py mooncake|nixl receive|send ADDRESS NBYTES`. Both move one registered buffer, their best case, in
clear and without a checksum. The receiver says when the last byte of each MiB carries the round's mark. Requests and
answers are as in `_transfer_end.py`, one at a time. Only numpy and the competitor are imported here.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import sys
import time
from typing import Any, Protocol

import numpy as np

_STEP_BYTES = 1024 * 1024
_POLL_S = 0.0005


class Peer(Protocol):
    """A competitor with its buffer registered."""

    def where(self) -> str:
        """What the other side needs to reach the buffer."""
        ...

    def connect(self, where: str) -> None: ...

    def write(self, nbytes: int, slice_bytes: int) -> None:
        """In slices where that helps. Returns when it says that it is done; raises RuntimeError when it failed."""
        ...


class Mooncake:
    """Transfer engine over TCP, peers found by their handshake."""

    def __init__(self, address: str, buffer: np.ndarray) -> None:
        from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

        self._address = address
        self._start = buffer.ctypes.data
        self._engine = TransferEngine()
        _must(self._engine.initialize(address, "P2PHANDSHAKE", "tcp", "") == 0, "initialize")
        _must(self._engine.register_memory(self._start, buffer.nbytes) == 0, "register_memory")

    def where(self) -> str:
        return f"{self._address}:{self._engine.get_rpc_port()} {self._start}"

    def connect(self, where: str) -> None:
        self._target, start = where.split()
        self._their_start = int(start)

    def write(self, nbytes: int, slice_bytes: int) -> None:
        # One write travels on one connection: only many use all of them.
        starts = range(0, nbytes, slice_bytes)
        done = self._engine.batch_transfer_sync_write(
            self._target,
            [self._start + start for start in starts],
            [self._their_start + start for start in starts],
            [min(slice_bytes, nbytes - start) for start in starts],
        )
        _must(done == 0, f"batch_transfer_sync_write: {done}")


class Nixl:
    """The UCX backend; `UCX_*` in the environment say over what."""

    def __init__(self, address: str, buffer: np.ndarray) -> None:
        from nixl_cu13 import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]

        self._start = buffer.ctypes.data
        self._agent = nixl_agent(f"{address}-{os.getpid()}", nixl_agent_config(backends=["UCX"]))
        self._registered = self._agent.register_memory([(self._start, buffer.nbytes, 0, "")], "DRAM")

    def where(self) -> str:
        return f"{base64.b64encode(self._agent.get_agent_metadata()).decode()} {self._start}"

    def connect(self, where: str) -> None:
        metadata, start = where.split()
        name = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._target = name.decode() if isinstance(name, bytes) else name
        self._their_start = int(start)

    def write(self, nbytes: int, slice_bytes: int) -> None:
        agent = self._agent
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs([(self._start, nbytes, 0)], "DRAM"),
            agent.get_xfer_descs([(self._their_start, nbytes, 0)], "DRAM"),
            self._target,
        )
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(_POLL_S)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        _must(state == "DONE", f"transfer: {state}")


class End:
    """Answers requests."""

    def __init__(self, peer: Peer, buffer: np.ndarray) -> None:
        self._peer = peer
        self._buffer = buffer
        # A peer connects when it first writes; the marks of the first round differ from untouched memory.
        self._marks = buffer[_STEP_BYTES - 1 :: _STEP_BYTES]

    def where(self) -> dict[str, Any]:
        """For the other side's `connect`."""
        return {"where": self._peer.where()}

    def connect(self, where: str) -> dict[str, Any]:
        """Where the other side's buffer is."""
        self._peer.connect(where)
        return {}

    def write(self, nbytes: int, slice_bytes: int, mark: int) -> dict[str, Any]:
        """Mark every MiB, and send."""
        self._marks[: nbytes // _STEP_BYTES] = mark
        start_s = time.monotonic()
        self._peer.write(nbytes, slice_bytes)
        return {"start_s": start_s, "done_s": time.monotonic()}

    def arrived(self, nbytes: int, mark: int, deadline_s: float) -> dict[str, Any]:
        """When every mark was there."""
        end_s = time.monotonic() + deadline_s
        marks = self._marks[: nbytes // _STEP_BYTES]
        while not (marks == mark).all():
            _must(time.monotonic() < end_s, "the bytes never arrived")
            time.sleep(_POLL_S)
        return {"done_s": time.monotonic()}

    def usage(self) -> dict[str, Any]:
        """CPU seconds of this process."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"cpu_s": used.ru_utime + used.ru_stime}


def _must(ok: bool, what: str) -> None:
    if not ok:
        raise RuntimeError(what)


def main() -> None:
    """Serve until stdin closes. The competitors write to stdout themselves: answers get a stdout of their own."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    kind, _, address, nbytes = sys.argv[1:]
    buffer = np.zeros(int(nbytes), np.uint8)
    end = End({"mooncake": Mooncake, "nixl": Nixl}[kind](address, buffer), buffer)
    for line in sys.stdin:
        request = json.loads(line)
        number, verb = request.pop("id"), request.pop("do")
        try:
            answer = getattr(end, verb)(**request)
        except Exception as error:  # whoever asked decides what it means
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"id": number, **answer}) + "\n")
    os._exit(0)  # their threads do not end by themselves


if __name__ == "__main__":
    main()
