"""A two-site cluster on one machine: registry, gateway, decode worker `decode-near`, prefill worker `prefill-far`.

Each role is a process of its own; everything they write lies in one private folder. After `close`, or the end
of the `with` block, no process, port or file is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from farfill.cli.child import Child
from farfill.cli.local_ports import HOST, free_ports
from farfill.cli.pki import create_pki, members_of
from farfill.config.load import load_config
from farfill.core.errors import ConfigError, FarfillError

DECODE = "decode-near"
PREFILL = "prefill-far"
STOP_S = 8.0
HURRY_S = 1.5
PKI_DAYS = 7
# Idle OpenMP threads of one worker must not spin on the cores the other one needs.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlan:
    """What to start. `port` is the gateway's; all others are free ones. `overrides` is laid over the cluster file."""

    model_name: str
    model_dir: Path
    port: int
    threshold_tokens: int
    chunk_tokens: int = 512
    timeout_ms: int = 15_000
    dtype: str = "float32"
    # 10 chats of a whole context of SmolLM2 in float32 at a time: without max_tokens a chat reserves all of it. The
    # pages are mapped, and cost memory only once they are used.
    kv_cache_mb: int = 4096
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])


class ChildDiedError(FarfillError):
    """A role ended by itself; `tail` is what it wrote last."""

    reason = "child_died"

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.name} ended by itself with exit code {child.exit_code}")
        self.name = child.name
        self.tail = child.tail()


class LocalCluster:
    """Owns the run folder and the four processes."""

    def __init__(self, plan: LocalPlan, *, keep_logs: Path | None = None) -> None:
        self.plan = plan
        self.url = f"http://{HOST}:{plan.port}"
        self._keep_logs = keep_logs
        self._children: list[Child] = []
        self._folder = Path(tempfile.mkdtemp(prefix="farfill-up-"))  # 0700

    @property
    def config_file(self) -> Path:
        """The cluster file of this run."""
        return self._folder / "cluster.yaml"

    @property
    def children(self) -> tuple[Child, ...]:
        """The running roles."""
        return tuple(self._children)

    def start(self) -> None:
        """Write the cluster file, make certificates, start all roles; returns at once."""
        self.config_file.write_text(yaml.safe_dump(cluster_values(self.plan), sort_keys=False))
        create_pki(self._folder / "pki", members_of(load_config(self.config_file).config), days=PKI_DAYS)
        # Nobody needs to sign another certificate for this cluster.
        (self._folder / "pki" / "ca.key").unlink()
        for name, arguments in (
            ("registry", ["registry"]),
            (PREFILL, ["prefill", "--name", PREFILL]),
            (DECODE, ["decode", "--name", DECODE]),
            ("gateway", ["gateway"]),
        ):
            log_file = self._folder / f"{name}.log"
            child = Child(name, [*arguments, "--config", str(self.config_file)], log_file, _ENVIRONMENT)
            self._children.append(child)

    def check(self) -> None:
        """Raises ChildDiedError when a role has ended."""
        for child in self._children:
            if child.exit_code is not None:
                raise ChildDiedError(child)

    def close(self) -> None:
        """Stop every process and remove every file. Idempotent.

        An interrupt meanwhile kills at once, once clients of the gateway were told.
        """
        try:
            # Workers and gateway first: they say goodbye to the registry.
            self._stop([child for child in self._children if child.name != "registry"], STOP_S)
            self._stop(self._children, STOP_S / 2)
        finally:
            try:
                self._kill()
                self._save_logs()
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stop(self, children: list[Child], within_s: float) -> None:
        for child in children:
            if child.exit_code is None:
                child.signal(signal.SIGTERM)
        deadline_s = time.monotonic() + within_s
        for child in children:
            child.wait(max(0.0, deadline_s - time.monotonic()))

    def _kill(self) -> None:
        for child in self._children:
            if child.name == "gateway" and child.exit_code is None:
                child.signal(signal.SIGTERM)  # the second one
                child.wait(HURRY_S)
        for child in self._children:
            if child.exit_code is None:
                child.signal(signal.SIGKILL)
                child.wait(STOP_S)

    def _save_logs(self) -> None:
        if self._keep_logs is None:
            return
        try:
            for log_file in self._folder.glob("*.log"):
                shutil.copy(log_file, self._keep_logs)
        except OSError as error:
            raise FarfillError(f"cannot copy the logs to {self._keep_logs}: {error}", reason="logs_not_kept") from error


def prepare_logs_folder(folder: Path) -> None:
    """Make `folder` for logs. Raises ConfigError when it cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"cannot keep logs in {folder}: {error.strerror}; choose another --keep-logs") from error


def cluster_values(plan: LocalPlan) -> dict[str, Any]:
    """The cluster file of `plan`, as plain values."""
    registry, decode, transfer, prefill = (f"{HOST}:{port}" for port in free_ports(4))
    values = {
        "version": 1,
        "cluster": "up",
        "model": {"name": plan.model_name, "path": str(plan.model_dir), "dtype": plan.dtype},
        "engine": {
            "threads": max(1, (os.cpu_count() or 2) // 2),
            "kv_cache_mb": plan.kv_cache_mb,
            # Unlike what requests reserve, this fills up and stays.
            "prefix_cache_mb": min(256, plan.kv_cache_mb // 4),
        },
        "gateway": {"site": "near", "listen": f"{HOST}:{plan.port}"},
        "registry": {"site": "near", "listen": registry},
        "workers": {
            DECODE: {"role": "decode", "site": "near", "listen": decode, "transfer_listen": transfer},
            PREFILL: {"role": "prefill", "site": "far", "listen": prefill},
        },
        "routing": {
            "remote_prefill_threshold_tokens": plan.threshold_tokens,
            "allow_placement_override": True,
        },
        "kv_transfer": {"timeout_ms": plan.timeout_ms},
        "prefill": {"chunked_prefill_tokens": plan.chunk_tokens},
        "tls": {"ca": "file:pki/ca.pem", "cert": "file:pki/{name}.pem", "key": "file:pki/{name}.key"},
        "tickets": {"signing_key": "file:pki/ticket.key", "public_key": "file:pki/ticket.pub"},
        "logging": {"format": "text"},
    }
    return merged(values, plan.overrides)


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes` laid over them, section by section."""
    result = dict(values)
    for key, change in changes.items():
        old = result.get(key)
        result[key] = merged(old, change) if isinstance(old, dict) and isinstance(change, Mapping) else change
    return result
