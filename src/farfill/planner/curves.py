"""Curves through measured points: a monotone cubic that passes through them, and a quadratic fitted to them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from farfill.core.errors import ConfigError

Floats = NDArray[np.float64]


class Curve(Protocol):
    """Seconds by number of tokens, for one value or an array of them."""

    def __call__(self, tokens: Floats | float) -> Floats: ...


@dataclass(frozen=True, slots=True)
class QuadraticCurve:
    """fixed + per_token·l + per_token_squared·l²: start-up cost, matrix products, attention."""

    fixed_s: float
    per_token_s: float
    per_token_squared_s: float

    def __call__(self, tokens: Floats | float) -> Floats:
        x = np.asarray(tokens, dtype=np.float64)
        return self.fixed_s + x * (self.per_token_s + x * self.per_token_squared_s)


class MonotoneCurve:
    """Cubic pieces through all points that never overshoot them (Fritsch and Carlson 1980, "PCHIP").

    Below the first point the time stays that of the first; above the last it goes on with the last slope, which
    underestimates attention: `last_tokens` tells callers where knowledge ends.
    """

    def __init__(self, tokens: Sequence[float], seconds: Sequence[float]) -> None:
        self._x = np.asarray(tokens, dtype=np.float64)
        self._y = np.asarray(seconds, dtype=np.float64)
        self._slopes = _slopes(self._x, self._y)

    @property
    def last_tokens(self) -> float:
        return float(self._x[-1])

    def __call__(self, tokens: Floats | float) -> Floats:
        asked = np.asarray(tokens, dtype=np.float64)
        x, y, d = self._x, self._y, self._slopes
        if len(x) == 1:
            return np.broadcast_to(y[0], asked.shape).astype(np.float64)
        at = np.clip(np.searchsorted(x, asked, side="right") - 1, 0, len(x) - 2)
        h = x[at + 1] - x[at]
        s = np.clip((asked - x[at]) / h, 0.0, 1.0)
        inside = (
            (1 + 2 * s) * (1 - s) ** 2 * y[at]
            + s * (1 - s) ** 2 * h * d[at]
            + s * s * (3 - 2 * s) * y[at + 1]
            + s * s * (s - 1) * h * d[at + 1]
        )
        return inside + np.maximum(asked - x[-1], 0.0) * max(d[-1], 0.0)


def fit_quadratic(tokens: Sequence[float], seconds: Sequence[float]) -> QuadraticCurve:
    """Least squares through at least three points. Raises ConfigError when time would fall or be negative."""
    if len(tokens) < 3:
        raise ConfigError(f"a quadratic needs at least 3 points, got {len(tokens)}; leave out fit, or measure more")
    scale = max(tokens)
    basis = np.vander(np.asarray(tokens, dtype=np.float64) / scale, 3)
    (square, linear, fixed), *_ = np.linalg.lstsq(basis, np.asarray(seconds, dtype=np.float64), rcond=None)
    curve = QuadraticCurve(float(fixed), float(linear) / scale, float(square) / scale**2)
    seen = curve(np.linspace(0.0, scale, 65))
    if seen[0] < 0 or bool(np.any(np.diff(seen) < 0)):
        raise ConfigError(
            "a quadratic through these points falls or is negative; leave out fit, so that they are joined"
        )
    return curve


def _slopes(x: Floats, y: Floats) -> Floats:
    """Derivatives at the points: weighted harmonic means inside, one-sided three-point formulas at the ends."""
    h = np.diff(x)
    m = np.diff(y) / h
    d = np.zeros_like(x)
    if len(x) == 2:
        d[:] = m[0]
    elif len(x) > 2:
        left, right = 2 * h[1:] + h[:-1], h[1:] + 2 * h[:-1]
        same = m[:-1] * m[1:] > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            d[1:-1] = np.where(same, (left + right) / (left / m[:-1] + right / m[1:]), 0.0)
        d[0] = _end(h[0], h[1], m[0], m[1])
        d[-1] = _end(h[-1], h[-2], m[-1], m[-2])
    return d


def _end(h0: float, h1: float, m0: float, m1: float) -> float:
    slope = ((2 * h0 + h1) * m0 - h0 * m1) / (h0 + h1)
    if slope * m0 <= 0:
        return 0.0
    return 3 * m0 if m0 * m1 < 0 and abs(slope) > abs(3 * m0) else slope
