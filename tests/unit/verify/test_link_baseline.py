"""Baselines of a link: kept, refused when they are something else, and compared within tolerances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from farfill.core.errors import ConfigError
from farfill.verify.link import REPORT_VERSION, LinkReport, LinkStep
from farfill.verify.link_baseline import compare, read_baseline, write_baseline


def report(mbits: float = 900.0, resent: float = 0.001, **values: Any) -> LinkReport:
    steps = [
        LinkStep(connections=1, bits_per_s=mbits * 5e5, resent_share=0.5, rtt_ms=31.0),
        LinkStep(connections=4, bits_per_s=mbits * 1e6, resent_share=resent, rtt_ms=None),
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
