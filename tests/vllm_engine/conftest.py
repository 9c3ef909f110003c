"""Pairs of real vLLM engines, one prefilling and one decoding: started once for all tests of a model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tests.system.cluster import Cluster, local_plan, running
from tests.vllm_engine import torchvision_for_cpu
from tests.vllm_engine.fronts import FRONTS

if TYPE_CHECKING:
    from farfill.engine.vllm.engine import VllmEngine

MODELS = ("llama", "gemma3", "granite", "qwen3", "falcon_h1")
IMAGE_MODELS = ("qwen2_5_vl", "gemma3_vl")
# vLLM's linear attention on CPU knows nothing else.
BFLOAT16 = frozenset({"qwen3_5"})
# vLLM imports their image processors, whose defaults need it.
WITH_TORCHVISION = frozenset({"qwen3_5", *IMAGE_MODELS})
LAST_FILE = "test_death.py"
CHUNK_TOKENS = 256
START_DEADLINE_S = 400.0
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Pair:
    """Two engines of one model. Whoever breaks them calls `Fleet.drop`."""

    name: str
    folder: Path
    prefill: VllmEngine
    decode: VllmEngine


class Fleet:
    """Owns the engines that run: those of one model at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pair: Pair | None = None

    def pair(self, name: str) -> Pair:
        """The engines of model `name`, started now unless they run."""
        if self._pair is None or self._pair.name != name:
            self.drop()
            with ThreadPoolExecutor(2) as threads:
                folder = self.model(name)
                prefill, decode = threads.map(lambda _: start_engine(folder), range(2))
            self._pair = Pair(name, folder, prefill, decode)
        return self._pair

    def model(self, name: str) -> Path:
        """The folder of model `name`."""
        from tests.vllm_engine.models import make_model

        folder = self._folder / name
        return folder if folder.exists() else make_model(name, folder, _dtype(name))

    def drop(self) -> None:
        """End what runs."""
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.prefill.close()
            pair.decode.close()


def _dtype(name: str) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if name in BFLOAT16 else "float32"


def start_engine(folder: Path, *arguments: str, eager: bool = True, kv_cache_mb: int = 256) -> VllmEngine:
    """One vLLM on the model in `folder`."""
    if folder.name in WITH_TORCHVISION:
        # Whoever does not need it does not see it.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(torchvision_for_cpu.FOLDER), prepend=os.pathsep)
            return _start(folder, arguments, eager, kv_cache_mb)
    return _start(folder, arguments, eager, kv_cache_mb)


def _start(folder: Path, arguments: tuple[str, ...], eager: bool, kv_cache_mb: int) -> VllmEngine:
    from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
    from farfill.engine.vllm.loader import load_engine

    engine = load_engine(
        ModelConfig(name=folder.name, path=folder, dtype=_dtype(folder.name)),
        EngineConfig(
            kv_cache_mb=kv_cache_mb,
            prefix_cache_mb=0,
            max_batch=16,
            vllm_args=[*(["--enforce-eager"] if eager else []), *arguments],
        ),
        PrefillConfig(chunked_prefill_tokens=CHUNK_TOKENS),
        Path("/"),
        stall_s=20.0,
    )
    engine.start()
    return engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a model one after the other; those that end its engines last."""

    names = (*MODELS, *IMAGE_MODELS)

    def place(item: pytest.Item) -> tuple[int, bool]:
        name = "llama" if "pair" in getattr(item, "fixturenames", ()) else ""
        name = item.callspec.params.get("pair", name) if hasattr(item, "callspec") else name
        return names.index(name) if name in names else len(names), item.path.name == LAST_FILE

    ours = [index for index, item in enumerate(items) if item.path.is_relative_to(_HERE)]
    for index, item in zip(ours, sorted((items[index] for index in ours), key=place), strict=True):
        items[index] = item
        item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_here() -> None:
    """Idle threads of vLLM leave the cores to the other engine; where it is not installed, nothing can be tested."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here: `make test-vllm` runs these tests in an environment that has it")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("models"))
    yield fleet
    fleet.drop()


@pytest.fixture(scope="session")
def cluster(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A tiny Llama on vLLM; prompts from 256 tokens on go far. Both workers answer as vLLM does, for stock routers."""
    fleet.drop()
    overrides: dict[str, Any] = {
        "engine": {"type": "vllm", "vllm_args": ["--enforce-eager"], "kv_cache_mb": 256},
        "registry": {"lease_s": 5.0},
        "workers": {name: {"vllm_listen": f"127.0.0.1:{port}"} for name, port in FRONTS.items()},
    }
    plan = local_plan(fleet.model("llama"), "tiny", chunk_tokens=256, timeout_ms=20_000, overrides=overrides)
    with running(plan, tmp_path_factory.mktemp("cluster"), start_deadline_s=START_DEADLINE_S) as cluster:
        yield cluster


@pytest.fixture
def pair(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Engines of the model that the test is parametrized with (`llama` without). Nothing may be left in them."""
    from tests.vllm_engine.calls import wait_until

    pair = fleet.pair(getattr(request, "param", "llama"))
    yield pair
    for engine in () if request.path.name == LAST_FILE else (pair.prefill, pair.decode):
        wait_until(lambda engine=engine: not engine.load().running_sequences, "no request runs", 10)
        wait_until(lambda engine=engine: not engine.load().kv_used_bytes, "KV memory is free", 10)
        engine.check_integrity()
