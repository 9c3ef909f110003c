"""Choosing the next token from logits, for one choice, on the host; independent of the model executor.

Order: raw log-probabilities are taken first; then penalties, logit bias and the ban on ends before `min_tokens`;
temperature; min_p; top_k; top_p; one draw. Names and meaning follow the OpenAI API and vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farfill.core.errors import EngineError
from farfill.core.sampling import SamplingParams

Logits = npt.NDArray[np.float32]

# Sorting a whole vocabulary costs more than a decode step may; top_p nearly always ends within these.
_TOP_P_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token; with logprobs asked for, its own and the most likely (id, log-probability) pairs, best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The sampling state of choice `index` of a request."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], eos_ids: Iterable[int], index: int) -> None:
        self._params = params
        self._ends = np.array(sorted({*eos_ids, *params.stop_token_ids}), np.int64)
        self._prompt_ids = np.array(sorted(set(prompt)), np.int64) if params.repetition_penalty != 1.0 else None
        self._counts: dict[int, int] = {}
        self._tokens = 0
        seed = None if params.seed is None else (params.seed + index) % 2**64
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._shapes_logits = bool(
            params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
            or params.logit_bias
            or params.min_tokens
        )

    def sample(self, logits: Logits) -> Sampled:
        """The next token from raw `logits` of shape (vocab_size,), which stay as they are."""
        shaped = self._shape(logits) if self._shapes_logits else logits
        token = int(np.argmax(shaped)) if self._params.temperature == 0 else self._draw(shaped)
        if not np.isfinite(shaped[token]):
            raise EngineError("the model's logits leave no token to choose", reason="bad_logits")
        self._tokens += 1
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._params.logprobs is None:
            return Sampled(token)
        return _with_logprobs(logits, token, self._params.logprobs)

    def _shape(self, logits: Logits) -> Logits:
        params, shaped = self._params, logits.copy()
        if self._prompt_ids is not None:
            seen = np.union1d(self._prompt_ids, np.fromiter(self._counts, np.int64, len(self._counts)))
            seen = seen[seen < len(shaped)]
            values = shaped[seen]
            penalty = np.float32(params.repetition_penalty)
            shaped[seen] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            shaped[ids] -= params.frequency_penalty * counts + params.presence_penalty
        for token, bias in params.logit_bias.items():
            if 0 <= token < len(shaped):
                shaped[token] += bias
        if self._tokens < params.min_tokens:
            shaped[self._ends[self._ends < len(shaped)]] = -np.inf
        return shaped

    def _draw(self, logits: Logits) -> int:
        """One draw from the softmax of `logits` under temperature, min_p, top_k and top_p."""
        params = self._params
        best = logits.max()
        if not np.isfinite(best):
            raise EngineError("the model's logits leave no token to choose", reason="bad_logits")
        # Differences first: exact near the top, no overflow however small the temperature.
        weights = np.exp((logits - best).astype(np.float64) / params.temperature)
        ids: npt.NDArray[np.int64] | None = None
        if params.min_p > 0:
            ids = np.flatnonzero(weights >= params.min_p)
            weights = weights[ids]
        if 0 < params.top_k < len(weights):
            kept = _largest(weights, params.top_k)
            ids = kept if ids is None else ids[kept]
            weights = weights[kept]
        if params.top_p < 1:
            kept = _nucleus(weights, params.top_p)
            ids = kept if ids is None else ids[kept]
            weights = weights[kept]
        cumulative = np.cumsum(weights)
        at = int(np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right"))
        at = min(at, len(weights) - 1)
        return at if ids is None else int(ids[at])


def _largest(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest, best first, ties by index."""
    if count >= len(weights):
        candidates = np.arange(len(weights))
    else:
        threshold = np.partition(weights, -count)[-count]
        candidates = np.flatnonzero(weights >= threshold)
    order = np.argsort(-weights[candidates], kind="stable")
    return candidates[order][:count]


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """Indices of the fewest most likely tokens that together reach `top_p`, best first; at least one."""
    total = weights.sum()
    kept = _largest(weights, _TOP_P_CANDIDATES)
    reached = np.cumsum(weights[kept])
    if reached[-1] < top_p * total:
        kept = _largest(weights, len(weights))
        reached = np.cumsum(weights[kept])
    return kept[: int(np.searchsorted(reached, top_p * total, side="left")) + 1]


def _with_logprobs(logits: Logits, token: int, count: int) -> Sampled:
    wide = logits.astype(np.float64)
    best = wide.max()
    log_total = best + np.log(np.exp(wide - best).sum())
    top = _largest(wide, min(count, len(wide))) if count else np.empty(0, np.int64)
    return Sampled(
        token,
        float(wide[token] - log_total),
        tuple((int(i), float(wide[i] - log_total)) for i in top),
    )
