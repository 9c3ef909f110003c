"""The fallback budget: how much local prefill the decode pool may be burdened with when the far side fails. Pure.

Local fallback hides a broken far side until decode breaks as well. So it is counted, bounded in tokens/s and
concurrency, and stops while the streams that run already suffer. Beyond it the answer is 503 with Retry-After.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from farfill.policy.tokens import TokenBucket

LONGEST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLimits:
    """Of one decode pool, as one gateway sees it. `burst_s` seconds of `tokens_per_s` may come at once.

    While the pool's p99 gap between tokens is over `itl_limit_s` nothing falls back; it must come down to
    `itl_release` × the limit before anything does again.
    """

    tokens_per_s: float
    burst_s: float = 10.0
    max_concurrent: int = 4
    itl_limit_s: float = 0.25
    itl_release: float = 0.8
    guard_retry_s: float = 2.0


class BudgetVerdict(StrEnum):
    """Stable: metric label and error code."""

    GRANTED = "granted"
    TOKENS = "fallback_tokens"
    CONCURRENCY = "fallback_concurrency"
    ITL_GUARD = "fallback_itl_guard"


@dataclass(frozen=True, slots=True)
class BudgetAnswer:
    """`retry_after_s` is 0 when granted."""

    verdict: BudgetVerdict
    retry_after_s: float = 0.0

    @property
    def granted(self) -> bool:
        """Whether the prompt may be prefilled locally; report its end then."""
        return self.verdict is BudgetVerdict.GRANTED


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetInputs:
    """All that one answer depends on. `tokens_wait_s`: until the bucket would let it pass; `mean_s`: of a fallback."""

    tokens_wait_s: float
    running: int
    max_concurrent: int
    guarded: bool
    mean_s: float
    guard_retry_s: float


def decide_budget(inputs: BudgetInputs) -> BudgetAnswer:
    """The guard comes first: it protects streams that are running."""
    if inputs.guarded:
        return BudgetAnswer(BudgetVerdict.ITL_GUARD, inputs.guard_retry_s)
    if inputs.running >= inputs.max_concurrent:
        return BudgetAnswer(BudgetVerdict.CONCURRENCY, _bounded(inputs.mean_s / max(1, inputs.max_concurrent)))
    if inputs.tokens_wait_s > 0:
        return BudgetAnswer(BudgetVerdict.TOKENS, _bounded(inputs.tokens_wait_s))
    return BudgetAnswer(BudgetVerdict.GRANTED)


class FallbackBudget:
    """Ask with `ask`; report exactly once per granted answer with `end`."""

    def __init__(self, limits: BudgetLimits) -> None:
        self._limits = limits
        self._bucket = TokenBucket(limits.tokens_per_s, max(1.0, limits.tokens_per_s * limits.burst_s))
        self._running = 0
        self._guarded = False
        self._mean_s = 1.0

    def observe_itl(self, p99_s: float | None) -> None:
        """The pool's latest p99 gap between tokens; None: nothing runs."""
        limit_s = self._limits.itl_limit_s
        if p99_s is None:
            self._guarded = False
        elif p99_s > limit_s:
            self._guarded = True
        elif p99_s <= limit_s * self._limits.itl_release:
            self._guarded = False

    def inputs(self, tokens: int, now_s: float) -> BudgetInputs:
        """What `ask` would decide on now."""
        return BudgetInputs(
            tokens_wait_s=self._bucket.wait_s(tokens, now_s),
            running=self._running,
            max_concurrent=self._limits.max_concurrent,
            guarded=self._guarded,
            mean_s=self._mean_s,
            guard_retry_s=self._limits.guard_retry_s,
        )

    def ask(self, tokens: int, now_s: float) -> BudgetAnswer:
        """May `tokens` be prefilled locally instead of far away? When granted, they are taken."""
        answer = decide_budget(self.inputs(tokens, now_s))
        if answer.granted:
            self._bucket.take(tokens, now_s)
            self._running += 1
        return answer

    def end(self, seconds: float, unused_tokens: int, now_s: float) -> None:
        """A granted fallback took `seconds`; of its tokens so many were not computed after all."""
        assert self._running > 0, "one end per granted answer"
        self._running -= 1
        self._mean_s += 0.2 * (seconds - self._mean_s)
        self._bucket.give_back(unused_tokens, now_s)

    def remaining_ratio(self, now_s: float) -> float:
        """0..1, the tighter of tokens and concurrency; 0 while guarded. For the metric."""
        if self._guarded:
            return 0.0
        tokens = self._bucket.level(now_s) / self._bucket.burst
        slots = 1.0 - self._running / max(1, self._limits.max_concurrent)
        return max(0.0, min(tokens, slots))


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.1), LONGEST_RETRY_S)
