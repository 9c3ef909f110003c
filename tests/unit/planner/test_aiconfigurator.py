"""Imports from aiconfigurator's database, played by a module of the same shape."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType

import pytest

from farfill.core.errors import ConfigError
from farfill.planner.aiconfigurator import import_profile
from farfill.planner.profile_file import ProfileFile, to_profile


class FakeHandle:
    """Prefill of 1 ms per 100 tokens; a step of 10 ms, and 1 ms more per 16 sequences."""

    @classmethod
    def compile(cls, model: str, system: str, backend: str, *, tp_size: int, moe_ep_size: int) -> FakeHandle:
        print("chatter that must not reach stdout")
        if model == "acme/unknown":
            raise ValueError("Failed to download its config.json")
        assert (system, tp_size, moe_ep_size) == ("h200_sxm", 8, 8)
        return cls()

    def predict_prefill_latency(self, batch: int, tokens: int) -> float:
        if tokens > 100_000:
            raise RuntimeError("perf database error: no rows")
        return batch * tokens / 100

    def predict_decode_latency(self, batch: int, tokens: int, output: int) -> float:
        assert output == 2
        return 10.0 + batch / 16


@pytest.fixture
def _database(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("aiconfigurator_core.sdk.engine")
    module.EngineHandle = FakeHandle  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.9")


def load(
    model: str = "acme/model", accelerator: str = "h200", backend: str = "vllm", longest: int = 8192
) -> ProfileFile:
    return import_profile("p", model, accelerator, 8, backend=backend, lengths=(1000, longest), batches=(1, 16))


@pytest.mark.usefixtures("_database")
def test_figures_are_taken_over_in_seconds(capsys):
    file = load()
    profile = to_profile(file)
    assert profile.seconds_at(1000) == pytest.approx(0.010)
    assert profile.step_s(16, 1000) == pytest.approx(0.011)
    assert "aiconfigurator-core 9.9, h200_sxm/vllm" in file.source
    assert not capsys.readouterr().out


@pytest.mark.usefixtures("_database")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"model": "acme/unknown"}, "cannot model acme/unknown on 8 × h200_sxm with vllm: Failed to download"),
        ({"accelerator": "TPU"}, "TPU is not in aiconfigurator; known: A100-80G"),
        ({"backend": "llama.cpp"}, "--backend is one of vllm, sglang, trtllm, not 'llama.cpp'"),
        ({"longest": 200_000}, "has no figures of acme/model on 8 × h200: perf database error"),
    ],
)
def test_what_the_database_lacks_is_named(arguments: dict[str, str], told: str):
    with pytest.raises(ConfigError) as caught:
        load(**arguments)  # pyright: ignore[reportArgumentType]
    assert told in str(caught.value)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(ConfigError, match=r"pip install 'farfill\[aiconfigurator\]'"):
        load()
