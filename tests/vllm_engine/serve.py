"""`vllm serve` as an operator types it, with Farfill's connector and nothing else of Farfill's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.vllm_engine.calls import wait_until

from farfill.config.processes import start_child

MODULE = {"kv_connector_module_path": "farfill.engine.vllm.connector"}
START_S = 300.0
_LOCAL = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def free_port() -> int:
    """Free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Served:
    """One `vllm serve` and what it wrote."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log_path = log

    def log(self) -> str:
        """All of it."""
        return self.log_path.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Its processes, the server first."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def ask(self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> Any:
        """POST `body`, or GET without one."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}{path}", data, {"Content-Type": "application/json", **(headers or {})}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            raw = answer.read()
        return json.loads(raw) if raw else None

    def healthy(self) -> bool:
        """Whether it answers; AssertionError when it ended."""
        assert self.process.poll() is None, self.log()[-4000:]
        with contextlib.suppress(OSError, urllib.error.URLError):
            self.ask("/health")
            return True
        return False

    def stop(self) -> None:
        """End it. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def launch(
    model: Path,
    log: Path,
    *arguments: str,
    transfer: dict[str, Any] | None,
    port: int | None = None,
    environment: dict[str, str] | None = None,
) -> Served:
    """Start one; it is not ready yet."""
    port = port or free_port()
    command = [
        str(Path(sys.executable).parent / "vllm"),
        "serve",
        str(model),
        "--host=127.0.0.1",
        f"--port={port}",
        "--dtype=float32",
        "--enforce-eager",
        "--max-num-seqs=16",
        "--max-num-batched-tokens=256",
        f"--kv-cache-memory-bytes={256 << 20}",
        *arguments,
    ]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with log.open("wb") as output:
        process = start_child(command, output, {**_LOCAL, **(environment or {})})
    return Served(process, f"http://127.0.0.1:{port}", log)


@contextlib.contextmanager
def serving(servers: list[Served]) -> Iterator[None]:
    """Wait for all; end them afterwards."""
    try:
        for server in servers:
            wait_until(server.healthy, f"{server.url} is healthy", START_S)
        yield
    finally:
        for server in servers:
            server.stop()
