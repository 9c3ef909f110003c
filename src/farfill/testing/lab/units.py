"""Rates, times, shares and sizes as people write them: `1gbit`, `30ms`, `0.1%`, `4mb`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# No bare number: 0.1 would be a tenth to one reader and a thousandth to the next.
_SHARES = {"%": 0.01}
_SIZES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)\s*([a-z%]*)")


def bits_per_s(text: str) -> float:
    """`900kbit`, `100mbit`, `1gbit`, or `unlimited`. Raises ValueError for anything else, as all here do."""
    return math.inf if text == "unlimited" else _parse(text, _RATES)


def seconds(text: str) -> float:
    """`250us`, `30ms`, `0.5s`."""
    return _parse(text, _TIMES)


def share(text: str) -> float:
    """`0.1%`; the percent sign is part of it."""
    return _parse(text, _SHARES)


def size_bytes(text: str) -> int:
    """`65536`, `64kb`, `4mb`; decimal."""
    return round(_parse(text, _SIZES))


def _parse(text: str, units: Mapping[str, float]) -> float:
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not a number with one of: {', '.join(unit or 'no unit' for unit in units)}")
    return float(match[1]) * units[match[2]]
