"""`farfill prefill`: a worker that computes prompts and pushes their KV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farfill.cli.decode import run_worker_role
from farfill.core.cluster import Role


def prefill(
    config: Annotated[Path, typer.Option(help="Cluster file.")] = Path("cluster.yaml"),
    name: Annotated[str | None, typer.Option(help="Which worker, if several prefill.")] = None,
) -> None:
    """Run a prefill worker."""
    run_worker_role(config, Role.PREFILL, name)
