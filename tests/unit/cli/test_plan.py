"""`farfill plan` as a person calls it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from farfill.cli.main import main
from farfill.planner.answer import read_answer
from farfill.planner.profile_file import read_profile
from unit.planner.published import MODELS

EXAMPLES = Path(__file__).parents[3] / "examples" / "planning"


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["farfill", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "kimi-linear"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Kimi-Linear-48B-A3B"].config))
    return folder


def test_kv_tells_layers_bytes_and_sizes(monkeypatch, capsys, model: Path):
    assert call(monkeypatch, "kv", model) == 0
    told = capsys.readouterr().out
    assert "kimi-linear (kimi_linear)" in told
    assert "20 recurrent state, 7 latent attention" in told
    assert "8,064 bytes per token" in told
    assert "1M" in told


def test_kv_as_json_with_an_estimate_and_a_plot(monkeypatch, capsys, model: Path, tmp_path: Path):
    plot = tmp_path / "kv.svg"
    code = call(
        monkeypatch,
        "kv",
        model,
        "--json",
        "--accelerator",
        "h200",
        "--lengths",
        "32768,1024",
        "--tp",
        8,
        "--plot",
        plot,
    )
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in report["rows"]] == [1024, 32768]
    row = report["rows"][1]
    assert row["gbit_per_s"] == pytest.approx(row["kv_bytes"] * 8 / row["prefill_s"] / 1e9)
    assert report["prefill_source"].startswith("roofline estimate, not measured")
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--accelerator", "H200", "--profile", "x"], "--profile and --accelerator contradict each other"),
        (["--lengths", "1k"], "--lengths takes whole numbers from 1 to 999,999,999"),
        (["--plot", "kv.gif"], "--plot: kv.gif must end in one of .png, .svg, .pdf"),
        (["--like", "nothing"], "model_type 'nothing' is not known"),
    ],
)
def test_kv_mistakes(monkeypatch, capsys, model: Path, arguments: list[str], told: str):
    assert call(monkeypatch, "kv", model, *arguments) == 2
    assert told in capsys.readouterr().err


def test_plots_without_matplotlib_name_the_extra(monkeypatch, capsys, model: Path, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert call(monkeypatch, "kv", model, "--plot", tmp_path / "kv.png") == 2
    assert "plots need matplotlib: pip install 'farfill[plot]'" in capsys.readouterr().err


def test_profile_writes_an_estimate(monkeypatch, capsys, model: Path, tmp_path: Path):
    out = tmp_path / "est.yaml"
    assert call(monkeypatch, "profile", out, "--estimate", model, "--accelerator", "H100", "--gpus", 8) == 0
    assert read_profile(out).name == "est"
    assert "roofline estimate, not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "say exactly one of --gateway, --estimate and --aiconfigurator, not none"),
        (["--gateway", "http://127.0.0.1:9", "--estimate", "x"], "not --gateway and --estimate"),
        (["--gateway", "nowhere"], "--gateway takes a URL"),
        (["--gateway", "http://127.0.0.1:9", "--where", "there"], "--where is local or remote, not 'there'"),
    ],
)
def test_profile_mistakes(monkeypatch, capsys, tmp_path: Path, arguments: list[str], told: str):
    assert call(monkeypatch, "profile", tmp_path / "p.yaml", *arguments) == 2
    assert told in capsys.readouterr().err


def test_capacity_writes_everything(monkeypatch, capsys, tmp_path: Path):
    files = [tmp_path / name for name in ("base.json", "cluster.yaml", "plan.png")]
    options = [part for pair in zip(("--baseline", "--cluster", "--plot"), files, strict=True) for part in pair]
    assert call(monkeypatch, "capacity", EXAMPLES / "prfaas-paper.yaml", *options) == 0
    told = capsys.readouterr().out
    assert "19,421" in told
    assert "Cross-site prefill pays: 15% more for the money" in " ".join(told.split())
    assert read_answer(files[0]).plan.near_prefill == 3
    assert files[2].read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["farfill", "config", "check", "--no-files", str(files[1])])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "valid; 12 workers" in capsys.readouterr().out


def test_capacity_as_json(monkeypatch, capsys):
    assert call(monkeypatch, "capacity", EXAMPLES / "prfaas-paper.yaml", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["threshold_tokens"] == pytest.approx(19_400, rel=0.015)


def test_capacity_names_a_missing_plan(monkeypatch, capsys, tmp_path: Path):
    assert call(monkeypatch, "capacity", tmp_path / "none.yaml") == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["--estimate", "--aiconfigurator"])
def test_a_profile_without_an_accelerator_is_told_which_there_are(monkeypatch, capsys, model, tmp_path, way: str):
    assert call(monkeypatch, "profile", tmp_path / "p.yaml", way, model) == 2
    told = capsys.readouterr().err
    assert f"{way} needs --accelerator" in told
    assert "H200" in told
    assert not (tmp_path / "p.yaml").exists()


def test_an_estimated_profile_says_that_its_prefill_is_a_formula(monkeypatch, capsys, model, tmp_path: Path):
    assert call(monkeypatch, "profile", tmp_path / "p.yaml", "--estimate", model, "--accelerator", "H200") == 0
    assert "p.yaml: a formula of prefill and " in capsys.readouterr().out
    assert read_profile(tmp_path / "p.yaml").prefill is not None


def test_an_empty_accelerator_is_not_called_unknown(monkeypatch, capsys, model: Path):
    assert call(monkeypatch, "kv", model, "--accelerator", "") == 2
    assert "no accelerator is named; known are:" in capsys.readouterr().err
