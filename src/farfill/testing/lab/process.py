"""The relay process: started with the sites' devices, asked over a pipe, ended with its last pipe end.

It also ends, and takes everything in the lab's namespaces with it, when this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from farfill.testing.lab.build import relay_binary
from farfill.testing.lab.errors import LabError

_ANSWER_DEADLINE_S = 10.0
_END_DEADLINE_S = 10.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Counters:
    """One direction since the lab came up, in wire packets of at most the MTU.

    `bytes` counts delivered packets with their Ethernet framing (38 bytes each); the `in_flight_` ones are queued or
    under way now. Drops: `lost` at random, `overflowed` in the full queue, `severed` by a cut, `refused` by the
    receiving device.
    """

    packets: int
    bytes: int
    lost: int
    overflowed: int
    severed: int
    refused: int
    in_flight_packets: int
    in_flight_bytes: int


class RelayProcess:
    """Carries packets from `start` to `close`. Requests may come from any thread."""

    def __init__(self, process: subprocess.Popen[str], sites: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._requests, self._answers, self._complaints = process.stdin, process.stdout, process.stderr
        self._sites = sites
        self._lock = threading.Lock()

    @classmethod
    def start(cls, sites: Sequence[tuple[int, int, str]], *, seed: int) -> RelayProcess:
        """`sites` are (TUN descriptor, namespace descriptor, address); the relay gets copies of the descriptors."""
        process = subprocess.Popen(
            [
                str(relay_binary()),
                str(os.getpid()),
                str(seed),
                *(f"{tun}:{ns}:{address}" for tun, ns, address in sites),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            pass_fds=[fd for tun, ns, _ in sites for fd in (tun, ns)],
            start_new_session=True,  # Ctrl-C in the terminal is for the owner
        )
        relay = cls(process, len(sites))
        try:
            if (line := relay._answer()) != "ready":
                raise LabError(f"the lab's relay said {line!r} instead of ready")
        except BaseException:
            relay.close()
            raise
        return relay

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """CPU time used so far; it includes the receiving sites' TCP, which runs where packets are delivered."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError as error:
            raise LabError("the lab's relay has ended") from error
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def set(
        self, source: int, target: int, *, bits_per_s: float, delay_s: float, jitter_s: float, loss: float, queue: int
    ) -> None:
        """Applies from the next packet on; packets under way keep their arrival time. `bits_per_s` 0: no limit."""
        settings = f"{bits_per_s:.17g} {round(delay_s * 1e9)} {round(jitter_s * 1e9)} {loss:.17g} {queue}"
        self._ask("set", source, target, settings)

    def cut(self, source: int, target: int, *, cut: bool) -> None:
        self._ask("cut", source, target, str(int(cut)))

    def counters(self, source: int, target: int) -> Counters:
        return self._ask("stats", source, target, "")

    def close(self) -> None:
        """Ends the relay, and with it everything that runs in the lab's namespaces."""
        with self._lock:
            # The relay may be gone already: nothing to tell it then.
            with contextlib.suppress(BrokenPipeError):
                self._requests.close()
            try:
                self._process.wait(_END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._answers.close()
            self._complaints.close()

    def _ask(self, verb: str, source: int, target: int, rest: str) -> Counters:
        with self._lock:
            try:
                self._requests.write(f"{verb} {source * self._sites + target} {rest}\n")
            except (BrokenPipeError, ValueError) as error:
                raise LabError("the lab's relay has ended") from error
            line = self._answer()
        word, *numbers = line.split()
        if word != "ok":
            raise LabError(f"the lab's relay refused: {line}")
        return Counters(*map(int, numbers))

    def _answer(self) -> str:
        """The next line. Exactly one is ever outstanding, so nothing of the next hides in the buffer."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if not selector.select(_ANSWER_DEADLINE_S):
                raise LabError("the lab's relay does not answer")
        line = self._answers.readline()
        if not line:
            raise LabError(f"the lab's relay has ended: {self._complaints.read().strip() or 'no message'}")
        return line.rstrip("\n")
