"""`farfill config`: look at a cluster file without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from farfill.config.load import check_model_files, load_config

app = typer.Typer(no_args_is_help=True, help="Check and show the cluster file.")


@app.command("check")
def check(
    config: Annotated[Path, typer.Option(help="Cluster file.")] = Path("cluster.yaml"),
    files: Annotated[bool, typer.Option("--files/--no-files", help="Also look for the model's files.")] = True,
) -> None:
    """Validate the cluster file without starting anything."""
    loaded = load_config(config)
    if files:
        check_model_files(loaded)
    workers = loaded.config.workers
    sites = sorted({worker.site for worker in workers.values()} | {loaded.config.gateway.site})
    typer.echo(f"{config}: valid; {len(workers)} workers, sites {', '.join(sites)}, model {loaded.config.model.name}")


@app.command("show")
def show(config: Annotated[Path, typer.Option(help="Cluster file.")] = Path("cluster.yaml")) -> None:
    """Print the cluster file with all defaults filled in. Secrets stay references."""
    values = load_config(config).config.model_dump(mode="json")
    typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)
