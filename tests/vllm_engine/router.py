"""The stock vllm-router between one prefill and one decode server."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm_engine.calls import wait_until
from tests.vllm_engine.serve import free_port

from farfill.config.processes import start_child

needs_router = pytest.mark.skipif(
    importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed here: `make vllm` installs it"
)


@contextlib.contextmanager
def routing(prefill: str, decode: str, log: Path) -> Iterator[str]:
    """Run `vllm-router --vllm-pd-disaggregation` between both URLs; its own URL."""
    port, metrics = free_port(), free_port()
    command = [
        str(Path(sys.executable).parent / "vllm-router"),
        "--host=127.0.0.1",
        f"--port={port}",
        "--vllm-pd-disaggregation",
        "--kv-connector=nixl",
        "--policy=round_robin",
        "--prometheus-host=127.0.0.1",
        f"--prometheus-port={metrics}",
        "--prefill",
        prefill,
        "--decode",
        decode,
    ]
    with log.open("wb") as output:
        process = start_child(command, output, {})
    url = f"http://127.0.0.1:{port}"

    def up() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
        return False

    try:
        wait_until(up, "vllm-router is up", 60)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(url: str, body: dict[str, Any]) -> Any:
    """The answer to one request."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())
