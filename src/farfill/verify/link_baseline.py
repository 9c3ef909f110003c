"""Baseline files of a link, and whether a link is still as its baseline says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farfill.core.errors import ConfigError
from farfill.verify.link import REPORT_VERSION, LinkReport


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A figure may differ from its baseline by `share` of it or by `least`, whichever is more."""

    title: str
    unit: str
    value: Callable[[LinkReport], float]
    share: float
    least: float


@dataclass(frozen=True, slots=True)
class Change:
    """One figure then and now."""

    tolerance: Tolerance
    before: float
    now: float

    @property
    def allowed(self) -> float:
        """Largest difference that is no change."""
        return max(self.tolerance.share * self.before, self.tolerance.least)

    @property
    def is_change(self) -> bool:
        """Whether the link is another one, for better or worse."""
        return abs(self.now - self.before) > self.allowed


# Even on a clean line BBR sends several percent again, now more, now less. Codecs are not of the link, and the best
# number of connections follows from the rest.
TOLERANCES = (
    Tolerance("goodput", "Mbit/s", lambda report: report.best.bits_per_s / 1e6, 0.15, 1.0),
    Tolerance("round trip", "ms", lambda report: report.rtt_ms, 0.20, 3.0),
    Tolerance("jitter", "ms", lambda report: report.jitter_ms, 1.0, 3.0),
    Tolerance("segments resent", "%", lambda report: report.best.resent_share * 100, 1.0, 5.0),
)


def compare(before: LinkReport, now: LinkReport) -> list[Change]:
    """Every figure. Raises ConfigError for reports that are not of the same two workers."""
    if (before.source, before.target) != (now.source, now.target):
        raise ConfigError(f"the baseline is of {before.source} to {before.target}, not {now.source} to {now.target}")
    return [Change(tolerance, tolerance.value(before), tolerance.value(now)) for tolerance in TOLERANCES]


def write_baseline(path: Path, report: LinkReport) -> None:
    """Raises ConfigError when it cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def read_baseline(path: Path) -> LinkReport:
    """Raises ConfigError when it cannot be read or is of another version."""
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != REPORT_VERSION:
            raise ConfigError(f"{path}: a baseline of version {version}, this is {REPORT_VERSION}: measure a new one")
        report = msgspec.json.decode(data, type=LinkReport)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; write one with --baseline") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: no link baseline: {error}") from error
    if not any(step.connections == report.best_connections for step in report.steps):
        raise ConfigError(f"{path}: no link baseline: its best number of connections was not measured")
    return report


class _Versioned(msgspec.Struct):
    version: int
