"""`farfill simulate`: run a scenario on virtual time, or a recording again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from farfill.cli.progress import progress
from farfill.core.errors import ConfigError
from farfill.planner.trace import is_recording, read_trace_lines
from farfill.simulator.fit import scenario_of_recording
from farfill.simulator.replay import DEFAULT_BOUND
from farfill.simulator.report import draw_result, print_result
from farfill.simulator.run import simulate as run_scenario
from farfill.simulator.scenario import Scenario, read_scenario


def simulate(
    scenario: Annotated[
        Path | None,
        typer.Argument(metavar="[SCENARIO]", help="Scenario file: docs/simulator.md. A recording needs none."),
    ] = None,
    *,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the file's. Same seed, same result.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many come, instead of the file's.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="A gateway's recording or a Mooncake JSONL trace instead of generated traffic.")
    ] = None,
    bound: Annotated[
        float, typer.Option(min=0, help="With a recording: how far off it may be; over it the exit code is 1.")
    ] = DEFAULT_BOUND,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw plots into this folder.")] = None,
) -> None:
    """Simulate sites, links and traffic under the policies that serve; hold a replay against what was recorded."""
    with progress() as report:
        report("reading the scenario")
        found = _scenario(scenario, replay, seed=seed, requests=requests)
        report("simulating")
        result = run_scenario(found, bound=bound)
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    else:
        print_result(Console(), result)
    if plot is not None:
        for path in draw_result(result, plot):
            typer.echo(str(path), err=True)
    if result.replayed is not None and not result.replayed.within:
        raise typer.Exit(1)


def _scenario(path: Path | None, replay: Path | None, *, seed: int | None, requests: int | None) -> Scenario:
    if path is not None:
        return read_scenario(path, seed=seed, requests=requests, replay=replay)
    if replay is None:
        raise ConfigError("SCENARIO is missing; give one, or --replay with a gateway's recording (gateway.record_file)")
    read_trace_lines(replay)  # what is broken or empty is told as such
    if not is_recording(replay):
        raise ConfigError(
            f"{replay}: no gateway's recording, and a trace does not say how fast instances are; give a SCENARIO too"
        )
    if seed is not None or requests is not None:
        raise ConfigError("--seed and --requests are of generated traffic; leave them out with a recording")
    return scenario_of_recording(replay)
