"""Profiles and their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from farfill.core.errors import ConfigError
from farfill.planner.accelerators import ACCELERATORS, find_accelerator
from farfill.planner.estimates import estimate_file
from farfill.planner.geometry import derive_geometry
from farfill.planner.profile import DecodePoint, Profile
from farfill.planner.profile_file import read_profile, write_profile
from farfill.planner.roofline import Efficiency, estimate_profile
from unit.planner.published import MODELS

GOOD = """\
name: tiny
source: made up
prefill:
  - {tokens: 1000, seconds: 0.1}
  - {tokens: 2000, seconds: 0.2}
  - {tokens: 2000, batch: 4, seconds: 0.4, source: another day}
decode:
  - {batch: 1, context_tokens: 1000, step_s: 0.010}
  - {batch: 9, context_tokens: 1000, step_s: 0.018}
  - {batch: 1, context_tokens: 5000, step_s: 0.014}
  - {batch: 9, context_tokens: 5000, step_s: 0.054}
max_batch: 16
"""


def read(tmp_path: Path, text: str) -> Profile:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return read_profile(path)


def test_figures_are_met_and_joined(tmp_path: Path):
    profile = read(tmp_path, GOOD)
    assert profile.seconds_at(1500) == pytest.approx(0.15)
    assert profile.batch_speedup == pytest.approx(2.0)
    assert float(profile.service_s(2000)) == pytest.approx(0.1)
    assert profile.step_s(5, 1000) == pytest.approx(0.014)
    assert profile.step_s(5, 3000) == pytest.approx(0.024)
    assert profile.step_s(17, 1000) == pytest.approx(0.026)
    assert profile.sources == ("made up", "another day")


def test_best_batch_is_the_largest_within_the_limit(tmp_path: Path):
    profile = read(tmp_path, GOOD)
    assert [profile.best_batch(limit, 1000) for limit in (0.009, 0.010, 0.0145, 1.0)] == [0, 1, 5, 16]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("seconds: 0.2}", "seconds: -0.2}", "p.yaml:5: prefill.1.seconds: -0.2 is out of range; give more than 0"),
        ("source: made up", "origin: x", "p.yaml:2: origin: unknown key"),
        ("seconds: 0.2}", "seconds: 0.01}", "p.yaml:3: prefill: prefill of 2000 tokens takes 0.01 s, less than 0.1 s"),
        ("tokens: 1000, seconds", "tokens: 2000, seconds", "two prefill times for the same tokens"),
        ("step_s: 0.010}", "step_s: fast}", "p.yaml:8: decode.0.step_s: expected a number, found the text 'fast'"),
        ("  - {tokens: 1000, seconds: 0.1}\n  - {tokens: 2000, seconds: 0.2}\n", "", "no prefill time with batch 1"),
        ("max_batch: 16", "fit: quadratic", "a quadratic needs at least 3 points"),
        (
            "max_batch: 16",
            "prefill_formula: {fixed_s: 1, per_token_s: 1, source: x}",
            "prefill_formula: stands beside prefill; keep one of them",
        ),
    ],
)
def test_mistakes_name_line_and_key(tmp_path: Path, old: str, new: str, told: str):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert told in str(caught.value)


def test_an_empty_profile_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="neither prefill nor decode times"):
        read(tmp_path, "name: x\nsource: y\n")


def test_what_a_profile_lacks_is_said_when_it_is_needed(tmp_path: Path):
    profile = read(tmp_path, "name: x\nsource: y\ndecode: [{batch: 1, context_tokens: 1, step_s: 1}]\n")
    with pytest.raises(ConfigError, match="profile x has no prefill times"):
        profile.seconds_at(1)


def test_an_estimate_survives_its_file(tmp_path: Path):
    config = MODELS["Llama-3.1-8B"].config
    profile = estimate_profile(config, derive_geometry(config), find_accelerator("h100"), 1)
    write_profile(tmp_path / "p.yaml", estimate_file("h100", profile))
    again = read_profile(tmp_path / "p.yaml")
    assert again.seconds_at(8192) == pytest.approx(profile.seconds_at(8192))
    assert again.step_s(8, 4096) == pytest.approx(profile.step_s(8, 4096))
    assert "roofline estimate, not measured: 7.0B of 8.0B parameters" in again.source


def test_estimates_move_as_they_must():
    config = MODELS["Qwen3-235B-A22B"].config
    geometry = derive_geometry(config)
    slow, fast = (estimate_profile(config, geometry, ACCELERATORS[name], 8) for name in ("H20", "H200"))
    assert slow.seconds_at(32768) > 3 * fast.seconds_at(32768)  # 6.7 times less arithmetic
    assert slow.step_s(1, 1024) < 1.5 * fast.step_s(1, 1024)  # nearly the same memory
    assert fast.step_s(64, 8192) > fast.step_s(1, 8192)
    assert fast.seconds_at(131072) > 4 * fast.seconds_at(32768)  # attention


def test_a_model_that_does_not_fit_is_refused():
    config = MODELS["DeepSeek-V3"].config
    with pytest.raises(ConfigError, match=r"1 × A10 hold 24 GB, but the weights take 134\d GB"):
        estimate_profile(config, derive_geometry(config), find_accelerator("A10"), 1)
    small = Efficiency(weight_bytes=1.0)
    assert (
        estimate_profile(config, derive_geometry(config), find_accelerator("H200"), 8, efficiency=small).max_batch > 1
    )


def test_unknown_accelerators_are_named_with_the_known():
    with pytest.raises(ConfigError, match="accelerator 'TPU' is not known; known are: A10, "):
        find_accelerator("TPU")


def test_steps_between_contexts_are_joined():
    points = (DecodePoint(batch=4, context_tokens=0, step_s=0.01), DecodePoint(batch=4, context_tokens=10, step_s=0.02))
    profile = Profile(
        name="x", accelerator="", gpus_per_instance=1, prefill=None, decode=points, max_batch=4, sources=()
    )
    assert profile.step_s(4, 5) == pytest.approx(0.015)
