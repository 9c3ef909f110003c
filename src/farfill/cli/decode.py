"""`farfill decode`: a worker that receives KV, decodes, and prefills locally when asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import structlog
import typer

from farfill.cli.run_role import pick_worker, run_until_stopped, start_logging
from farfill.config.checks import lets_in_nobody
from farfill.config.load import LoadedConfig, check_model_files, load_config
from farfill.core.cluster import Role

log = structlog.get_logger(__name__)


def decode(
    config: Annotated[Path, typer.Option(help="Cluster file.")] = Path("cluster.yaml"),
    name: Annotated[str | None, typer.Option(help="Which worker, if several decode.")] = None,
) -> None:
    """Run a decode worker (or a mixed one)."""
    run_worker_role(config, Role.DECODE, name)


def run_worker_role(config: Path, role: Role, name: str | None) -> None:
    """Run worker `name`, or the only one of `role`, until it is told to stop."""
    loaded = load_config(config)
    run_worker_named(loaded, pick_worker(loaded, role, name))


def run_worker_named(loaded: LoadedConfig, name: str) -> None:
    """Run worker `name` until it is told to stop."""
    loaded = loaded.for_worker(name)
    check_model_files(loaded)
    worker = loaded.config.workers[name]
    start_logging(loaded, role=str(worker.role), site=worker.site, name=name)
    if lets_in_nobody(loaded.config, name):
        log.warning(
            "allowed_peers_let_in_nobody",
            allowed_peers=loaded.config.kv_transfer.allowed_peers,
            fix="name the workers that this one exchanges KV with in kv_transfer.allowed_peers, such as far/prefill/*",
        )
    # Workers load torch; the other commands must not.
    from farfill.worker.serve import run_worker

    run_until_stopped(lambda stop: run_worker(loaded, name, stop))
