"""Placement as filter → score → pick. Pure: the same profile, request and candidates always give the same choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from farfill.core.errors import ConfigError
from farfill.policy.candidates import Candidate, PlacementRequest
from farfill.policy.plugins import FILTERS, PICKERS, SCORERS, Filter, Picker, Scorer, plugin

DECODE_FILTERS = ("role", "model", "exclude", "protocol", "health", "capability", "capacity", "tenant_share", "version")
PREFILL_FILTERS = (
    "role", "model", "exclude", "fingerprint", "protocol", "health", "capability", "capacity", "version",
)  # fmt: skip
DECODE_WEIGHTS: Mapping[str, float] = {
    "least_work": 4.0,
    "session_affinity": 1.0,
    "prefix_affinity": 1.0,
    "queue_depth": 0.5,
    "kv_bytes": 0.5,
    "tenant_share": 0.25,
}
PREFILL_WEIGHTS: Mapping[str, float] = {"least_work": 1.0, "queue_depth": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Plugins by name, as in the cluster file. Filters in order; scorers with their weights (0 leaves one out)."""

    filters: tuple[str, ...] = DECODE_FILTERS
    weights: dict[str, float] = field(default_factory=lambda: dict(DECODE_WEIGHTS))
    picker: str = "best"


@dataclass(frozen=True, slots=True)
class Choice:
    """`index` is of the candidates given, None when no filter let any through.

    `scores` has, for each candidate that passed, its index, total, and the scores by scorer in the profile's order;
    `rejected` the index and the first filter that refused it, for all others.
    """

    index: int | None
    scores: tuple[tuple[int, float, tuple[float, ...]], ...]
    rejected: tuple[tuple[int, str], ...]

    def refusals(self) -> dict[str, int]:
        """How many candidates each filter refused."""
        counts: dict[str, int] = {}
        for _, name in self.rejected:
            counts[name] = counts.get(name, 0) + 1
        return counts


class PlacementProfile:
    """Settings with their plugins looked up. Raises ConfigError on a name there is no plugin for."""

    def __init__(self, settings: ProfileSettings) -> None:
        self.settings = settings
        self.scorers = tuple(name for name, weight in settings.weights.items() if weight)
        if any(weight < 0 for weight in settings.weights.values()):
            raise ConfigError("placement: weights must not be negative; leave a scorer out with 0")
        self._filters: list[tuple[str, Filter]] = [(n, plugin(FILTERS, n, "filter")) for n in settings.filters]
        self._scorers: list[tuple[float, Scorer]] = [
            (settings.weights[n], plugin(SCORERS, n, "scorer")) for n in self.scorers
        ]
        self._picker: Picker = plugin(PICKERS, settings.picker, "picker")

    def choose(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> Choice:
        """Filter, score, pick."""
        rejected: list[tuple[int, str]] = []
        passed, left = self._filtered(request, candidates, rejected)
        if not left:
            return Choice(None, (), tuple(rejected))
        columns: list[list[float]] = []
        totals = self._scored(request, left, columns)
        picked = self._picker(request, left, totals)
        rows = zip(*columns, strict=True) if columns else iter([()] * len(left))
        return Choice(passed[picked], tuple(zip(passed, totals, rows, strict=True)), tuple(rejected))

    def pick(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> int | None:
        """The index that `choose` chooses, without its reasons."""
        passed, left = self._filtered(request, candidates, [])
        return passed[self._picker(request, left, self._scored(request, left, []))] if left else None

    def _filtered(
        self, request: PlacementRequest, candidates: Sequence[Candidate], rejected: list[tuple[int, str]]
    ) -> tuple[Sequence[int], Sequence[Candidate]]:
        """(indices of those that pass all filters, themselves); the others are added to `rejected`."""
        passed, left = range(len(candidates)), candidates
        for name, keeps in self._filters:
            kept = keeps(request, left)
            if not all(kept):
                rejected += [(index, name) for index, keep in zip(passed, kept, strict=True) if not keep]
                passed = list(compress(passed, kept))
                left = list(compress(left, kept))
        return passed, left

    def _scored(self, request: PlacementRequest, left: Sequence[Candidate], columns: list[list[float]]) -> list[float]:
        """The total of each; the scores of each scorer are added to `columns`."""
        totals: list[float] = []
        for weight, scorer in self._scorers:
            column = scorer(request, left)
            columns.append(column)
            if not any(column):
                continue  # adds nothing to anybody: no session, no prefix
            if totals:
                totals = [total + weight * score for total, score in zip(totals, column)]  # noqa: B905 (costs, here)
            else:
                totals = [weight * score for score in column]
        return totals or [0.0] * len(left)
