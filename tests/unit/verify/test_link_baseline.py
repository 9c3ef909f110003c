"""Baselines of a link: kept, refused when they are something else, and compared within tolerances."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from farfill.core.errors import ConfigError
from farfill.verify.link import REPORT_VERSION, LinkReport, LinkStep
from farfill.verify.link_baseline import check_writable, compare, read_baseline, too_short, write_baseline
from farfill.verify.link_report import check_drawable, print_changes


def report(mbits: float = 900.0, resent: float = 0.001, spread: float | None = None, **values: Any) -> LinkReport:
    steps = [
        LinkStep(connections=1, bits_per_s=mbits * 5e5, resent_share=0.5, rtt_ms=31.0),
        LinkStep(
            connections=4,
            bits_per_s=mbits * 1e6,
            resent_share=resent,
            rtt_ms=None,
            spread_bits_per_s=None if spread is None else spread * 1e6,
        ),
    ]
    known: dict[str, Any] = {
        "version": REPORT_VERSION,
        "source": "prefill-far",
        "target": "decode-near",
        "unix_s": 0.0,
        "encryption": "tls",
        "rtt_ms": 30.0,
        "jitter_ms": 1.0,
        "steps": steps,
        "best_connections": 4,
        "codecs_source": {},
        "codecs_target": {},
        "samples": [(0.1, 1.0)],
    }
    return LinkReport(**{**known, **values})


def changed(before: LinkReport, now: LinkReport) -> list[str]:
    return [change.tolerance.title for change in compare(before, now) if change.is_change]


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path):
    write_baseline(tmp_path / "link.json", report())
    assert read_baseline(tmp_path / "link.json") == report()


@pytest.mark.parametrize(
    ("now", "figures"),
    [
        (report(), []),
        (report(mbits=900 * 0.86, rtt_ms=35.9, jitter_ms=3.9, resent=0.0509), []),
        (report(mbits=900 * 0.84), ["goodput"]),
        (report(mbits=900 * 1.16), ["goodput"]),
        (report(rtt_ms=36.1), ["round trip"]),
        (report(jitter_ms=4.1), ["jitter"]),
        (report(resent=0.0511), ["segments resent"]),
        (report(best_connections=1), ["goodput", "segments resent"]),
    ],
)
def test_only_what_leaves_its_tolerance_is_a_change(now: LinkReport, figures: list[str]):
    assert changed(report(), now) == figures


@pytest.mark.parametrize(
    ("before", "now", "figures"),
    [
        (report(spread=300), report(mbits=650), []),
        (report(), report(mbits=650, spread=300), []),
        (report(spread=300), report(mbits=590, spread=10), ["goodput"]),
        (report(spread=10), report(mbits=900 * 0.86, spread=10), []),
        (report(spread=10), report(mbits=900 * 0.84, spread=10), ["goodput"]),
    ],
)
def test_goodput_may_differ_by_what_it_swings_in_either_measurement(
    before: LinkReport, now: LinkReport, figures: list[str]
):
    assert changed(before, now) == figures


def printed(before: LinkReport, now: LinkReport) -> str:
    out = io.StringIO()
    print_changes(Console(file=out, width=200), compare(before, now), too_short(before, now))
    return out.getvalue()


def test_verdict_says_that_the_rate_swings_and_that_a_measurement_was_short():
    steady = printed(report(seconds=3.0, spread=20), report(seconds=2.0))
    assert "tolerance of goodput" not in steady
    assert "Too short" not in steady
    swinging = printed(report(seconds=1.0), report(seconds=0.5, spread=300))
    assert "The tolerance of goodput is how much it swung within a measurement: 300.00 Mbit/s" in swinging
    assert "Too short for a sound verdict: the baseline (1 s) and this measurement (0.5 s)" in swinging
    assert "Too short" not in printed(report(), report()), "older files do not say"


def test_where_a_file_cannot_be_written_is_known_before_and_nothing_is_changed(tmp_path: Path):
    kept, folder = tmp_path / "kept.json", tmp_path / "folder"
    kept.write_bytes(b"kept")
    folder.mkdir()
    check_writable(kept)
    check_writable(tmp_path / "new.json")
    check_drawable(tmp_path / "new.png")
    assert kept.read_bytes() == b"kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "kept.json"]
    for bad in (folder, tmp_path / "none" / "link.json"):
        with pytest.raises(ConfigError, match=r"cannot be written: \w+"):
            check_writable(bad)
    with pytest.raises(ConfigError, match=r"none/link\.png: cannot be written"):
        check_drawable(tmp_path / "none" / "link.png")
    with pytest.raises(ConfigError, match=r"one of .*png"):
        check_drawable(tmp_path / "link.doc")


def test_baselines_of_other_workers_are_not_compared():
    with pytest.raises(ConfigError, match="not prefill-other to decode-near"):
        compare(report(), report(source="prefill-other"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "no link baseline"),
        (b'{"version": 1}', "no link baseline"),
        (b'{"version": 999}', "version 999"),
        (msgspec.json.encode(report(best_connections=3)), "best number"),
        (None, "--baseline"),
    ],
)
def test_what_is_no_baseline_is_refused_with_the_reason(content: bytes | None, message: str, tmp_path: Path):
    path = tmp_path / "link.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_baseline(path)
