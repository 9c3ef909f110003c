"""The vLLM server process: started with the right flags, waited for, ended with its whole process group.

What it writes goes to our stderr line by line; the last lines are kept, to say why it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import IO

from farfill.config.processes import start_child
from farfill.core.errors import CancelledWorkError, ConfigError, EngineError
from farfill.engine.vllm.api import Endpoint
from farfill.engine.vllm.kv_events import EVENTS_SOCKET
from farfill.engine.vllm.line import ConnectorLine
from farfill.engine.vllm.messages import LINE_SOCKET, Hello

API_SOCKET = "api.sock"
TRANSFER_FLAG = "--kv-transfer-config"
_POLL_S = 0.25
_STOP_S = 20.0
_HEALTH_S = 5.0
_TAIL_LINES = 30
_KEPT_LINES = 500
# Mamba-2 on CPU: vLLM's kernel drops the states between blocks that prefix caching needs, and the engine dies.
_NO_PREFIX_CACHE = ("GraniteMoeHybrid", "FalconH1", "Bamba", "Mamba2", "NemotronH", "Zamba2")


class VllmServer:
    """One running vLLM, reached through Unix sockets in `folder`."""

    def __init__(self, model: Path, folder: Path, options: Sequence[str], *, chunk_tokens: int) -> None:
        self.endpoint = Endpoint(socket=folder / API_SOCKET)
        self.line = ConnectorLine(folder / LINE_SOCKET)
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            f"--model={model}",
            f"--uds={folder / API_SOCKET}",
            # Its endpoint for tokens alone; not --tokens-only, which leaves out the tokenizer that grammars need.
            "--enable-scale-out",
            "--disable-uvicorn-access-log",
            "--structured-outputs-config.backend=guidance",
            "--scheduling-policy=priority",
            "--enable-prompt-tokens-details",
            # Prompts with images are rendered with a template of ours; nobody else reaches this server.
            "--trust-request-chat-template",
            *_transfer(folder, chunk_tokens),
            f"--kv-events-config={json.dumps(_events(folder))}",
            *_prefix_cache(model),
            *options,
        ]
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process = start_child(command, subprocess.PIPE, _ENVIRONMENT)
        assert self._process.stdout is not None
        Thread(target=self._pass_on, args=(self._process.stdout,), name="farfill-vllm-output", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float, stopped: Callable[[], bool]) -> list[Hello]:
        """What its cache is made of, once it answers.

        Raises EngineError with the end of its log otherwise, CancelledWorkError when `stopped` says so.
        """
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if stopped():
                raise CancelledWorkError("told to stop while vLLM was starting")
            if not self.running:
                raise EngineError(f"vLLM ended with {self._process.returncode} while starting:\n{self.tail()}")
            hellos = self.line.wait(_POLL_S)
            if hellos is not None and self._healthy():
                return hellos
            time.sleep(_POLL_S if hellos is not None else 0)
        raise EngineError(f"vLLM was not ready after {timeout_s:.0f} s:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL to the whole group: it does not listen any more."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to the whole group after a while. Idempotent."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self.line.close()

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of its output."""
        return "\n".join(list(self._lines)[-lines:])

    def _pass_on(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                text = line.decode(errors="replace")
                self._lines.append(text.rstrip("\n"))
                with contextlib.suppress(OSError, ValueError):  # nobody reads ours any more
                    sys.stderr.write(text)

    def _healthy(self) -> bool:
        """Whether /health answers 200. The socket is there long before."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_HEALTH_S)
            sock.connect(str(self.endpoint.socket))
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: vllm\r\nConnection: close\r\n\r\n")
            return sock.recv(64).startswith(b"HTTP/1.1 200")
        return False

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _transfer(folder: Path, chunk_tokens: int) -> list[str]:
    """One by one, so that an option of the operator's changes one of them. Without the last one vLLM fails requests."""
    options: dict[str, object] = {
        "kv_connector": "FarfillConnector",
        "kv_connector_module_path": "farfill.engine.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config.folder": folder,
        "kv_connector_extra_config.prefill_chunk_tokens": chunk_tokens,
        "kv_load_failure_policy": "recompute",
    }
    return [f"{TRANSFER_FLAG}.{name}={value}" for name, value in options.items()]


def _events(folder: Path) -> dict[str, object]:
    """Who reads them: `kv_events`."""
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{folder / EVENTS_SOCKET}"}


def _prefix_cache(model: Path) -> list[str]:
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {model}/config.json cannot be read: {error}") from error
    names = " ".join(config.get("architectures") or [])
    return ["--no-enable-prefix-caching"] if any(name in names for name in _NO_PREFIX_CACHE) else []


# vLLM's processes speak to each other on this host only; idle threads of one engine leave the cores to the other.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONUNBUFFERED": "1",
}
