"""A WAN on one machine, for tests and benchmarks: `Lab`. By hand: `python -m farfill.testing.lab --help`."""

from __future__ import annotations

from farfill.testing.lab.errors import LabError
from farfill.testing.lab.lab import Lab, missing_requirement
from farfill.testing.lab.link import Direction, Link, Wire
from farfill.testing.lab.process import Counters

__all__ = ["Counters", "Direction", "Lab", "LabError", "Link", "Wire", "missing_requirement"]
