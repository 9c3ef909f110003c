"""The gateway of `gateway.py` as a process: everything a real one has but the registry and TLS to its workers.

Run as `_gateway_process.py MODEL_FOLDER WORKER_PORT`; prints its port.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import uvloop
from aiohttp import web

from farfill.cli.run_role import SHUTDOWN_TIMEOUT_S, spare_the_collector
from farfill.config.model import ClusterConfig
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.gateway.app import build_runner
from farfill.gateway.service import GatewayDeps
from farfill.gateway.tokenizer import load_tokenizer
from farfill.telemetry.logs import setup_logging
from farfill.telemetry.metrics import GatewayMetrics, exposition

MODEL = "bench"


@dataclass(frozen=True)
class FixedMembership:
    """Who is alive: always the same."""

    found: tuple[Instance, ...]

    def instances(self) -> tuple[Instance, ...]:
        return self.found


def config_of(folder: Path) -> ClusterConfig:
    """Defaults, but as many requests as come."""
    values = {
        "model": {"name": MODEL, "path": folder},
        "gateway": {"site": "near", "max_concurrent_requests": 10_000},
        "registry": {"site": "near"},
        "workers": {"d": {"role": "decode", "site": "near", "listen": "h:1", "transfer_listen": "h:2"}},
        "tls": {"ca": "file:ca", "cert": "file:cert", "key": "file:key"},
        "tickets": {"signing_key": "file:k", "public_key": "file:p"},
    }
    return ClusterConfig.model_validate(values)


def deps_of(folder: Path, worker_port: int, log: TextIO = sys.stderr) -> GatewayDeps:
    """One decode worker on this machine; lines go to `log`."""
    config = config_of(folder)
    setup_logging(config.logging.level, "json", stream=log, role="gateway", site="near", name="gateway")
    metrics = GatewayMetrics(site="near", model=MODEL)
    worker = Instance(
        name="decode-near",
        role=Role.DECODE,
        site="near",
        url=f"http://127.0.0.1:{worker_port}",
        transfer_address="127.0.0.1:1",
        model=MODEL,
        fingerprint="f",
        generation="g",
        state=InstanceState.READY,
        max_context_tokens=1_000_000,
        takes_text=True,
    )
    return GatewayDeps(
        config=config,
        model=dataclasses.replace(load_tokenizer(folder), context_tokens=1_000_000),
        membership=FixedMembership((worker,)),
        sign_ticket=lambda ticket: ticket.transfer_id,
        worker_tls=None,
        observer=metrics,
        policies=metrics.policies,
        metrics=functools.partial(exposition, metrics.registry),
    )


async def serve(folder: Path, worker_port: int) -> None:
    """Until stdin ends."""
    runner = build_runner(deps_of(folder, worker_port), shutdown_timeout_s=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    spare_the_collector()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
