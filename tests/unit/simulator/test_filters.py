"""The filters and scorers a simulated gateway leaves out would change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import farfill.simulator.gateway as simulated
from farfill.policy.placement import PREFILL_FILTERS
from unit.simulator.test_same_results import run


def test_all_filters_and_scorers_give_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, every = tmp_path / "few", tmp_path / "every"
    few.mkdir()
    every.mkdir()
    shorter = run("everything", few)
    # Those of prefill, but for the role: one request is for decode and prefill alike.
    monkeypatch.setattr(simulated, "TELLING_FILTERS", tuple(n for n in PREFILL_FILTERS if n != "role"))
    monkeypatch.setattr(simulated, "_ALIKE_SCORES", frozenset[str]())
    assert run("everything", every) == shorter
