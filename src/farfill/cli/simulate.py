"""`farfill simulate`: run a scenario on virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from farfill.cli.progress import progress
from farfill.simulator.report import draw_result, print_result
from farfill.simulator.run import simulate as run_scenario
from farfill.simulator.scenario import read_scenario


def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="Scenario file: docs/simulator.md.")],
    *,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the file's. Same seed, same result.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many come, instead of the file's.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Mooncake JSONL trace instead of generated traffic.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw plots into this folder.")] = None,
) -> None:
    """Simulate sites, links and traffic under the policies that serve."""
    with progress() as report:
        report("reading the scenario")
        found = read_scenario(scenario, seed=seed, requests=requests, replay=replay)
        report("simulating")
        result = run_scenario(found)
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    else:
        print_result(Console(), result)
    if plot is not None:
        for path in draw_result(result, plot):
            typer.echo(str(path), err=True)
