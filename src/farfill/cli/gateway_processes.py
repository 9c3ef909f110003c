"""`farfill gateway --workers N`: the process that starts N gateways on one port and keeps them running.

It serves nothing itself. SIGTERM and SIGINT drain all, SIGHUP reloads all. A process that ends is started again, sooner
when it ran for long; its streams are lost, those of the others are not. When this one is gone, all others stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from farfill.cli.run_role import Stop
from farfill.config.checks import split_address
from farfill.config.load import LoadedConfig
from farfill.config.processes import start_child
from farfill.core.errors import ConfigError
from farfill.gateway.siblings import SUPERVISOR
from farfill.telemetry.metrics.families import exposition
from farfill.telemetry.metrics.processes import ProcessMetrics

log = structlog.get_logger()

POLL_S = 0.05
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
WELL_AFTER_S = 30.0
"""A process that ran for so long may start again at once."""


@dataclass(slots=True)
class _Place:
    """One of the N, in all its lives."""

    index: int
    child: subprocess.Popen[bytes]
    began_s: float
    pause_s: float = FIRST_PAUSE_S
    due_s: float | None = None
    """When it is to start again; None while it runs."""


class GatewayProcesses:
    """Owned by the event loop. Raises ConfigError for what several processes cannot share."""

    def __init__(self, loaded: LoadedConfig, count: int) -> None:
        for key in ("decision_log", "record_file"):
            path = getattr(loaded.config.gateway, key)
            if path is not None and "{pid}" not in str(path):
                raise ConfigError(f"gateway.{key}: several processes cannot write one file; put {{pid}} into its name")
        self._loaded = loaded
        self._count = count
        self._metrics = ProcessMetrics(site=loaded.config.gateway.site)
        self._folder = Path()

    async def run(self, stop: Stop) -> None:
        """Until `stop`; then until all have drained. Raises ConfigError when the address cannot be had."""
        loop = asyncio.get_running_loop()
        with reserved(self._loaded.config.gateway.listen), _folder() as self._folder:
            self._tell()
            places = [_Place(i, self._start(i), loop.time()) for i in range(self._count)]
            loop.add_signal_handler(signal.SIGHUP, _send, places, signal.SIGHUP)
            stop.hurry = partial(_send, places, signal.SIGTERM)
            while not stop.is_set():
                for place in places:
                    self._look_after(place, loop.time())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), POLL_S)
            _send(places, signal.SIGTERM)
            await asyncio.gather(*(asyncio.to_thread(place.child.wait) for place in places))

    def _look_after(self, place: _Place, now_s: float) -> None:
        if place.due_s is not None:
            if now_s >= place.due_s:
                place.child, place.began_s, place.due_s = self._start(place.index), now_s, None
            return
        status = place.child.poll()
        if status is None:
            return
        well = now_s - place.began_s >= WELL_AFTER_S
        place.pause_s = FIRST_PAUSE_S if well else min(LONGEST_PAUSE_S, place.pause_s * 2)
        place.due_s = now_s + place.pause_s
        log.error(
            "gateway_process_ended", process=place.index, pid=place.child.pid, status=status, again_s=place.pause_s
        )
        self._metrics.restarted("killed" if status < 0 else "exited")
        self._tell()

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "farfill.cli.main", "gateway", "--config", str(self._loaded.path)]
        command += ["--process", f"{index}/{self._count}", "--process-folder", str(self._folder)]
        child = start_child(command, sys.stderr.fileno(), {})
        log.info("gateway_process_started", process=index, pid=child.pid)
        return child

    def _tell(self) -> None:
        """For whoever is asked for metrics: replaced as a whole, never half written."""
        new = self._folder / f"{SUPERVISOR}.new"
        new.write_bytes(exposition(self._metrics.registry)[0])
        new.replace(self._folder / SUPERVISOR)


@contextlib.contextmanager
def reserved(listen: str) -> Iterator[None]:
    """Hold `listen` for processes of ours, bound but not listening: others are told at once that it is taken."""
    host, port = split_address(listen)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # Without it first: another program's processes may share the port, too, but not with ours.
            held.bind(address)
        except OSError as error:
            raise ConfigError(f"cannot listen at {listen}: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
        yield


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="farfill-gateway-"))  # 0700
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _send(places: list[_Place], number: signal.Signals) -> None:
    for place in places:
        with contextlib.suppress(ProcessLookupError):
            place.child.send_signal(number)
