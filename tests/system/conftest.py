"""Real models and running clusters. Each cluster is started once for all tests that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.cluster import Cluster, local_plan, running
from tests.system.models import write_full_attention, write_hybrid

from farfill.cli.model_store import find_source, is_fetched, model_folder

REAL_MODEL = "smollm2"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts processes."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real model's folder."""
    source = find_source(REAL_MODEL)
    if not is_fetched(source):
        pytest.fail("SmolLM2 is not here yet; run: farfill model fetch smollm2")
    return model_folder(source)


@pytest.fixture(scope="session")
def real_cluster(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """SmolLM2 in bfloat16, prefill chunks of 256 tokens, prompts from 512 tokens on go far."""
    plan = local_plan(
        smollm2_folder, REAL_MODEL, dtype="bfloat16", chunk_tokens=256, threshold_tokens=512, timeout_ms=60_000
    )
    with running(plan, tmp_path_factory.mktemp("real")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def hybrid_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A tiny Gemma 3 (sliding windows and full attention) in float32."""
    folder = tmp_path_factory.mktemp("hybrid")
    with running(local_plan(write_hybrid(folder / "model"), "hybrid"), folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def relayed_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A tiny Llama in float32 whose KV passes a port where the test puts a relay."""
    folder = tmp_path_factory.mktemp("relayed")
    plan = local_plan(write_full_attention(folder / "model"), "full", timeout_ms=1_500)
    with running(plan, folder, relayed=True) as cluster:
        yield cluster
