"""The fallback budget at work: who may prefill locally because far prefill failed, and what running streams feel."""

from __future__ import annotations

from collections import deque
from math import ceil, inf

from farfill.clock import Clock
from farfill.config.routing import FallbackBudgetConfig
from farfill.core.errors import CapacityError
from farfill.gateway.decisions import DecisionTrail
from farfill.gateway.observe import PolicyObserver
from farfill.policy.budget import BudgetLimits, FallbackBudget, decide_budget

ITL_WINDOW_S = 10.0
ITL_PERIOD_S = 0.5
MAX_GAPS = 4096
UNLIMITED_TOKENS_PER_S = 1e12


class FallbackGrant:
    """One prompt that may be prefilled locally. `end` it once; further calls do nothing."""

    def __init__(self, gate: FallbackGate, tokens: int, began_s: float) -> None:
        self._gate = gate
        self._tokens = tokens
        self._began_s = began_s
        self._ended = False

    def end(self, computed_tokens: int | None = None) -> None:
        """It is prefilled, or never will be; None: all its tokens were computed."""
        if not self._ended:
            self._ended = True
            unused = 0 if computed_tokens is None else max(0, self._tokens - computed_tokens)
            self._gate.ended(self._began_s, unused)


class FallbackGate:
    """Owned by the event loop."""

    def __init__(self, config: FallbackBudgetConfig, clock: Clock, observer: PolicyObserver) -> None:
        self._budget = FallbackBudget(
            BudgetLimits(
                tokens_per_s=config.tokens_per_s or UNLIMITED_TOKENS_PER_S,
                burst_s=config.burst_s,
                max_concurrent=config.max_concurrent,
                itl_limit_s=config.itl_limit_ms / 1000 if config.itl_limit_ms else inf,
            )
        )
        self.guarded = config.itl_limit_ms > 0
        """Whether it wants to hear of gaps between tokens."""
        self._clock = clock
        self._observer = observer
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MAX_GAPS)
        self._looked_s = -inf

    def token_gap(self, gap_s: float, now_s: float) -> None:
        """A running stream's next token took so long."""
        self._gaps.append((now_s, gap_s))

    def open(self, tokens: int) -> bool:
        """Whether it would be granted now."""
        self._look()
        return decide_budget(self._budget.inputs(tokens, self._clock.now_s())).granted

    def ask(self, tokens: int, trail: DecisionTrail) -> FallbackGrant:
        """Prefill `tokens` locally instead of far away. Raises CapacityError (503, Retry-After) beyond the budget."""
        self._look()
        now_s = self._clock.now_s()
        inputs = self._budget.inputs(tokens, now_s)
        answer = self._budget.ask(tokens, now_s)
        trail.add("fallback_budget", inputs, answer)
        self._observer.fallback_asked(str(answer.verdict), self._budget.remaining_ratio(now_s))
        if not answer.granted:
            raise CapacityError(
                "far prefill cannot be had, and decode has as much local prefill as it may"
                " (routing.fallback_budget); try again later",
                reason=str(answer.verdict),
                retry_after_s=answer.retry_after_s,
            )
        return FallbackGrant(self, tokens, now_s)

    def ended(self, began_s: float, unused_tokens: int) -> None:
        """A grant ended."""
        now_s = self._clock.now_s()
        self._budget.end(now_s - began_s, unused_tokens, now_s)

    def _look(self) -> None:
        """Bring the guard up to date, twice a second at most."""
        now_s = self._clock.now_s()
        if not self.guarded or now_s - self._looked_s < ITL_PERIOD_S:
            return
        self._looked_s = now_s
        while self._gaps and self._gaps[0][0] < now_s - ITL_WINDOW_S:
            self._gaps.popleft()
        gaps = sorted(gap_s for _, gap_s in self._gaps)
        self._budget.observe_itl(gaps[ceil(0.99 * len(gaps)) - 1] if gaps else None)
