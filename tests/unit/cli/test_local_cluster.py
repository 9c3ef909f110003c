"""The throw-away cluster: what it has room for, and that its folder goes whatever fails."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from farfill.cli.local_cluster import LocalCluster, LocalPlan, cluster_values
from farfill.core.errors import FarfillError

# SmolLM2: 30 layers, keys and values, 3 heads of 64 float32.
_CONTEXT_BYTES = 8192 * 30 * 2 * 3 * 64 * 4


@pytest.fixture
def plan(tmp_path: Path) -> LocalPlan:
    return LocalPlan(model_name="m", model_dir=tmp_path, port=1, threshold_tokens=1)


def test_ten_whole_contexts_fit_beside_the_prefix_cache(plan: LocalPlan):
    engine = cluster_values(plan)["engine"]
    assert (engine["kv_cache_mb"] - engine["prefix_cache_mb"]) * 2**20 >= 10 * _CONTEXT_BYTES


def test_folder_goes_even_when_the_logs_cannot_be_kept(
    plan: LocalPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    cluster = LocalCluster(plan, keep_logs=tmp_path / "gone" / "logs")
    cluster.config_file.with_name("gateway.log").write_text("said\n")
    with pytest.raises(FarfillError, match="cannot copy the logs") as caught:
        cluster.close()
    assert caught.value.reason == "logs_not_kept"
    assert list(scratch.iterdir()) == []
