"""What every benchmark shares: figures as JSON lines on stdout, facts on stderr, the exit status."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass
class Figures:
    """Collects the figures of one run; `exit_code` is 1 when any falls short."""

    all_ok: bool = True
    lines: list[dict[str, object]] = field(default_factory=list)

    def at_most(self, name: str, value: float, limit: float) -> None:
        """`value` must not be over `limit`."""
        self._print(name, value, f"<= {limit:g}", value <= limit)

    def at_least(self, name: str, value: float, limit: float) -> None:
        """`value` must not be under `limit`."""
        self._print(name, value, f">= {limit:g}", value >= limit)

    def between(self, name: str, value: float, low: float, high: float) -> None:
        """`value` must be within `low` and `high`."""
        self._print(name, value, f"{low:g}..{high:g}", low <= value <= high)

    def reported(self, name: str, value: float) -> None:
        """A value nothing is required of."""
        self._print(name, value, "reported", True)

    def not_measured(self, name: str, must: str) -> None:
        """What could not be measured falls short."""
        self._print(name, None, must, False)

    @property
    def exit_code(self) -> int:
        return 0 if self.all_ok and self.lines else 1

    def _print(self, name: str, value: float | None, must: str, ok: bool) -> None:
        rounded = None if value is None else round(value, 4)
        line: dict[str, object] = {"name": name, "value": rounded, "must": must, "ok": ok}
        self.all_ok = self.all_ok and ok
        self.lines.append(line)
        print(json.dumps(line), flush=True)


def note(text: str) -> None:
    """A fact for people."""
    print(text, file=sys.stderr, flush=True)


def note_machine() -> None:
    """CPU, memory, load and versions, so that numbers can be placed; a busy machine is said to be busy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count()
    memory_gib = psutil.virtual_memory().total / 2**30
    load = os.getloadavg()[0]
    note(f"machine: {_cpu_name()}, {cores} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}")
    note(f"python {platform.python_version()}, load average {load:.2f}")
    if load > 0.5:
        note("warning: the machine is busy with other work; ratios between processes may suffer")


def median(values: Sequence[float]) -> float:
    """The median; raises StatisticsError without values."""
    return statistics.median(values)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
