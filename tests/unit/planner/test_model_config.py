"""Finding a config.json: file, folder, cache; and clear words when there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farfill.core.errors import ConfigError
from farfill.planner.model_config import read_model_config

CONFIG = {"model_type": "llama", "num_hidden_layers": 1}


def cached(home: Path, revision: str, *, ref: str | None = None) -> None:
    folder = home / "hub" / "models--acme--tiny"
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "snapshots" / revision / "config.json").write_text(json.dumps({**CONFIG, "revision": revision}))
    if ref is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(ref)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)


def test_a_file_and_its_folder_are_the_same(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_model_config(str(tmp_path)) == read_model_config(str(tmp_path / "config.json"))


def test_a_cached_hub_id_is_found_at_main(tmp_path: Path):
    cached(tmp_path / "home", "b" * 40, ref="b" * 40)
    cached(tmp_path / "home", "a" * 40)
    assert read_model_config("acme/tiny")[0]["revision"] == "b" * 40


def test_without_a_ref_the_newest_snapshot_counts(tmp_path: Path):
    cached(tmp_path / "home", "a" * 40)
    assert read_model_config("acme/tiny")[0]["revision"] == "a" * 40


def test_nothing_is_fetched():
    with pytest.raises(ConfigError, match="not in the local Hugging Face cache; nothing is fetched"):
        read_model_config("acme/elsewhere")


@pytest.mark.parametrize(
    ("text", "told"),
    [("{\n,", r"config.json:2: not JSON"), ("[]", "holds no JSON object"), ("\xff", "not JSON")],
)
def test_what_is_no_config_is_refused(tmp_path: Path, text: str, told: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_model_config(str(tmp_path))


def test_a_folder_without_one_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model_config(str(tmp_path))
