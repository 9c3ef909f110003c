"""`farfill config`: look at a cluster file without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from farfill.cli import config_versions
from farfill.config.load import check_model_files, load_config

app = typer.Typer(no_args_is_help=True, help="Check and show the cluster file; put versions of it in force.")
app.command("apply")(config_versions.apply)
app.command("history")(config_versions.history)
app.command("diff")(config_versions.diff)
app.command("rollback")(config_versions.rollback)


ClusterFile = Annotated[Path, typer.Argument(help="Cluster file.")]
ConfigOption = Annotated[Path | None, typer.Option(help="The same, as the other commands write it.")]
DEFAULT = Path("cluster.yaml")


@app.command("check")
def check(
    file: ClusterFile = DEFAULT,
    config: ConfigOption = None,
    files: Annotated[bool, typer.Option("--files/--no-files", help="Also look for the model's files.")] = True,
) -> None:
    """Validate the cluster file without starting anything."""
    file = config or file
    loaded = load_config(file)
    if files:
        check_model_files(loaded)
    workers = loaded.config.workers
    sites = sorted({worker.site for worker in workers.values()} | {loaded.config.gateway.site})
    typer.echo(f"{file}: valid; {len(workers)} workers, sites {', '.join(sites)}, model {loaded.config.model.name}")
    typer.echo("Secrets and certificates were not looked at; farfill pki init makes them.")


@app.command("show")
def show(file: ClusterFile = DEFAULT, config: ConfigOption = None) -> None:
    """Print the cluster file with all defaults filled in. Secrets stay references."""
    values = load_config(config or file).config.model_dump(mode="json")
    typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)
