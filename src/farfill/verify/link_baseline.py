"""Baseline files of a link, and whether a link is still as its baseline says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farfill.core.errors import ConfigError
from farfill.verify.link import REPORT_VERSION, LinkReport

# Shorter steps see too little of how a rate swings.
MIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A figure may differ from its baseline by `share` of it or by `least`, whichever is more.

    `spread`: or by how much it swings within either measurement, if that is known.
    """

    title: str
    unit: str
    value: Callable[[LinkReport], float]
    share: float
    least: float
    spread: Callable[[LinkReport], float | None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Change:
    """One figure then and now. `spread`: how much it swung within the measurement where it did so more; 0: unknown."""

    tolerance: Tolerance
    before: float
    now: float
    spread: float = 0.0

    @property
    def allowed(self) -> float:
        """Largest difference that is no change."""
        return max(self.tolerance.share * self.before, self.tolerance.least, self.spread)

    @property
    def is_swinging(self) -> bool:
        """Whether the spread makes the tolerance."""
        return self.spread > 0 and self.spread == self.allowed

    @property
    def is_change(self) -> bool:
        """Whether the link is another one, for better or worse."""
        return abs(self.now - self.before) > self.allowed


def _goodput_spread(report: LinkReport) -> float | None:
    spread = report.best.spread_bits_per_s
    return None if spread is None else spread / 1e6


# Even on a clean line BBR sends several percent again, now more, now less. Codecs are not of the link, and the best
# number of connections follows from the rest.
TOLERANCES = (
    Tolerance("goodput", "Mbit/s", lambda report: report.best.bits_per_s / 1e6, 0.15, 1.0, _goodput_spread),
    Tolerance("round trip", "ms", lambda report: report.rtt_ms, 0.20, 3.0),
    Tolerance("jitter", "ms", lambda report: report.jitter_ms, 1.0, 3.0),
    Tolerance("segments resent", "%", lambda report: report.best.resent_share * 100, 1.0, 5.0),
)


def compare(before: LinkReport, now: LinkReport) -> list[Change]:
    """Every figure. Raises ConfigError for reports that are not of the same two workers."""
    if (before.source, before.target) != (now.source, now.target):
        raise ConfigError(f"the baseline is of {before.source} to {before.target}, not {now.source} to {now.target}")
    return [
        Change(
            tolerance,
            tolerance.value(before),
            tolerance.value(now),
            max(tolerance.spread(before) or 0.0, tolerance.spread(now) or 0.0),
        )
        for tolerance in TOLERANCES
    ]


def too_short(before: LinkReport, now: LinkReport) -> str:
    """Which measurement is too short for a verdict on goodput, in words; empty: neither."""
    short = [
        f"{which} ({report.seconds:g} s)"
        for which, report in (("the baseline", before), ("this measurement", now))
        if report.seconds is not None and report.seconds < MIN_SECONDS
    ]
    return " and ".join(short)


def check_writable(path: Path) -> None:
    """Whether a file can be written there, before the work that fills it. Raises ConfigError; changes nothing."""
    try:
        target = path.resolve()  # not the link to it is to be removed again
        existed = target.exists()
        target.open("ab").close()
        if not existed:
            target.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


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
