"""How long prompts are: any distribution as a fine weighted grid, split by thresholds at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from farfill.core.errors import ConfigError
from farfill.planner.curves import Floats

GRID = 1 << 14
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Part:
    """One side of a threshold: its share of all requests, and the mean number of tokens to prefill there.

    `start` and `end` are where it lies among the lengths.
    """

    share: float
    mean_tokens: float
    start: int
    end: int


class Lengths:
    """Tokens to prefill (not found in a cache) per request. `tokens` ascend; `weights` sum to 1."""

    def __init__(self, tokens: Floats, weights: Floats) -> None:
        order = np.argsort(tokens, kind="stable")
        self.tokens: Floats = tokens[order]
        self.weights: Floats = weights[order] / float(weights.sum())
        self._share = np.concatenate(([0.0], np.cumsum(self.weights)))
        self._sum = np.concatenate(([0.0], np.cumsum(self.weights * self.tokens)))

    @property
    def mean(self) -> float:
        """Mean tokens."""
        return float(self._sum[-1])

    @property
    def least(self) -> float:
        """The shortest."""
        return float(self.tokens[0])

    @property
    def most(self) -> float:
        """The longest."""
        return float(self.tokens[-1])

    def quantile(self, share: float) -> float:
        """Tokens that `share` of the requests do not exceed."""
        at = int(np.searchsorted(self._share[1:], share - 1e-12))
        return float(self.tokens[min(at, len(self.tokens) - 1)])

    def above(self, threshold: float) -> Part:
        """Requests with more tokens than `threshold`."""
        at = int(np.searchsorted(self.tokens, threshold, side="right"))
        share = float(self._share[-1] - self._share[at])
        mean = float(self._sum[-1] - self._sum[at]) / share if share > 1e-12 else threshold
        return Part(share, mean, at, len(self.tokens))

    def up_to(self, threshold: float) -> Part:
        """Requests with at most `threshold` tokens."""
        at = int(np.searchsorted(self.tokens, threshold, side="right"))
        share = float(self._share[at])
        mean = float(self._sum[at]) / share if share > 1e-12 else threshold
        return Part(share, mean, 0, at)

    def split(self, threshold: float) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """(tokens, weights) up to the threshold, and above it."""
        at = int(np.searchsorted(self.tokens, threshold, side="right"))
        return (self.tokens[:at], self.weights[:at]), (self.tokens[at:], self.weights[at:])


def lognormal(mu: float, sigma: float, least: float, most: float) -> Lengths:
    """exp(N(mu, sigma²)), truncated to [least, most]."""
    low, high = (_NORMAL.cdf((math.log(x) - mu) / sigma) for x in (least, most))
    if high - low < 1e-9:
        raise ConfigError(
            f"a log-normal with mu {mu:g} and sigma {sigma:g} has nothing between {least:g} and {most:g} tokens;"
            " mu is the logarithm of the median"
        )
    shares = low + (high - low) * (np.arange(GRID) + 0.5) / GRID
    normal = np.array([_NORMAL.inv_cdf(float(share)) for share in shares])
    return Lengths(np.exp(mu + sigma * normal), np.full(GRID, 1.0 / GRID))


def uniform(least: float, most: float) -> Lengths:
    """Every length between equally likely."""
    return Lengths(least + (most - least) * (np.arange(GRID) + 0.5) / GRID, np.full(GRID, 1.0 / GRID))


def observed(tokens: Sequence[float], weights: Sequence[float] | None = None) -> Lengths:
    """As counted. Raises ConfigError when there is nothing, or something negative."""
    if not len(tokens):
        raise ConfigError("no request, so there is nothing to plan for")
    values = np.asarray(tokens, dtype=np.float64)
    if float(values.min()) < 0:
        raise ConfigError(f"a length is negative: {float(values.min()):g}")
    shares = np.full(len(values), 1.0) if weights is None else np.asarray(weights, dtype=np.float64)
    return Lengths(values, shares)
