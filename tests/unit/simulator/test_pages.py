"""What docs and examples show can be run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farfill.cli.main import app
from farfill.scaling.file import read_autoscale
from farfill.simulator.scenario import read_scenario
from farfill.simulator.scenario_file import ScenarioFile
from unit.simulator.scenes import SCENARIO, scene

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "simulator.md").read_text()
SHOWN, AUTOSCALE = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_the_scenario_of_the_page_is_one(tmp_path: Path) -> None:
    path = scene(tmp_path, SHOWN.replace("baseline:", "# baseline:"))
    assert read_scenario(path).file.traffic.arrivals == "mmpp"


def test_the_page_names_every_key() -> None:
    missing = [name for name in ScenarioFile.model_fields if f"{name}:" not in SHOWN and name != "monitor_s"]
    assert not missing


def test_the_autoscale_file_of_the_page_is_one(tmp_path: Path) -> None:
    path = tmp_path / "autoscale.yaml"
    path.write_text(AUTOSCALE)
    assert set(read_autoscale(path).groups) == {"far/prefill", "near/decode"}


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "simulation").glob("*.yaml")), ids=lambda p: p.stem)
def test_an_example_runs_from_the_command(path: Path) -> None:
    ran = CliRunner().invoke(app, ["simulate", str(path), "--requests", "300", "--json"])
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert result["requests"] == 300


def test_the_command_prints_tables_and_another_seed_changes_them(tmp_path: Path) -> None:
    path = str(scene(tmp_path, SCENARIO.replace("600", "100")))
    ran, other = (CliRunner().invoke(app, ["simulate", path, "--seed", seed]).stdout for seed in ("1", "2"))
    assert "time to first token" in ran
    assert "below_threshold" in ran
    assert ran != other


def test_autoscale_without_anybody_to_tell_says_so(tmp_path: Path) -> None:
    path = tmp_path / "autoscale.yaml"
    path.write_text("prometheus: {url: http://x}\ngroups: {near/decode: {minimum: 1, maximum: 2}}\n")
    ran = CliRunner().invoke(app, ["autoscale", str(path)])
    assert "say --dry-run" in str(ran.exception)
