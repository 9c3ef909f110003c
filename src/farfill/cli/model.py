"""`farfill model fetch`: get a small model that is ready to serve."""

from __future__ import annotations

from typing import Annotated

import typer

from farfill.cli.model_store import fetch as fetch_model
from farfill.cli.model_store import find_source
from farfill.cli.progress import progress

app = typer.Typer(no_args_is_help=True, help="Small models to try Farfill with.")


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2 or gemma3.")],
    accept_gemma_terms: Annotated[
        bool, typer.Option("--accept-gemma-terms", help="You accept the Gemma Terms of Use.")
    ] = False,
) -> None:
    """Download a model once, check it, convert it, and print its folder."""
    with progress() as report:
        folder = fetch_model(find_source(name), accept_terms=accept_gemma_terms, report=report)
    typer.echo(str(folder))
