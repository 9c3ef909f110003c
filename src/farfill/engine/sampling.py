"""Choosing the next token from logits, for one choice, on the host; independent of the model executor.

Order: raw log-probabilities are taken first; then penalties and logit bias; what may not come (ends before
`min_tokens`, bad words, all but the allowed ids, what the grammar excludes); temperature; min_p; top_k; top_p; a draw.
Names and meaning follow the OpenAI API and vLLM. A vocabulary has 50,000 to 260,000 tokens and a step has many rows:
whole-vocabulary passes are single precision and few, and nothing sorts or sums up more than it must.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farfill.core.errors import EngineError, FarfillError, InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.engine.grammar import Allowed, Constraint

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK_TOKENS = 256
_FEW_TOKENS = 512
# Below this every draw is the best token, and single precision would overflow.
_LOWEST_TEMPERATURE = 1e-5
# Stands for minus infinity, which JSON cannot say; the number OpenAI uses.
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token; with logprobs asked for, its own and the most likely (id, log-probability) pairs, best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The sampling state of choice `index` of a request: what it drew so far, its penalties and its grammar.

    With a seed the tokens depend on params, prompt, index and the logits alone, never on the batch.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        eos_ids: Iterable[int],
        index: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._ends = np.array(sorted({*eos_ids, *params.stop_token_ids}), np.int64)
        self._allowed_ids = np.array(sorted(set(params.allowed_token_ids)), np.int64)
        self._penalties = _Penalties(params, prompt) if _penalizes(params) else None
        self._output: list[int] = []
        seed = None if params.seed is None else (params.seed + index) % 2**64
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._excludes = bool(constraint or params.min_tokens or params.bad_words or params.allowed_token_ids)
        self._shapes_logits = bool(self._penalties or params.logit_bias or self._excludes)

    @property
    def complete(self) -> bool:
        """Whether the grammar is satisfied and allows nothing more."""
        return self._constraint is not None and self._constraint.complete

    def sample(self, logits: Logits) -> Sampled:
        """The next token from raw `logits` of shape (vocab_size,), which stay as they are.

        Raises EngineError (bad_logits) when the model leaves no token to choose, InvalidRequestError when the request
        does: no_token_allowed, or grammar_limit when the grammar is too complex.
        """
        shaped = self._shape(logits) if self._shapes_logits else logits
        token = int(np.argmax(shaped)) if self._params.temperature == 0 else self._draw(shaped, logits)
        if not np.isfinite(shaped[token]):
            raise self._nothing_left(logits)
        self._output.append(token)
        if self._penalties is not None:
            self._penalties.add(token)
        if self._constraint is not None:
            self._constraint.advance(token)
        if self._params.logprobs is None:
            return Sampled(token)
        return _with_logprobs(logits, token, self._params.logprobs)

    def _shape(self, logits: Logits) -> Logits:
        shaped = logits.copy()
        if self._penalties is not None:
            self._penalties.apply(shaped)
        for token, bias in self._params.logit_bias.items():
            if 0 <= token < len(shaped):
                shaped[token] += bias
        if self._excludes:
            np.putmask(shaped, ~self._allowed(len(shaped)), -np.inf)
        return shaped

    def _allowed(self, vocab_size: int) -> Allowed:
        """Which tokens may come now."""
        allowed = np.ones(vocab_size, np.bool_)
        if len(self._allowed_ids):
            allowed[:] = False
            allowed[self._allowed_ids[self._allowed_ids < vocab_size]] = True
        for *before, last in self._params.bad_words:
            if last < vocab_size and (not before or self._output[-len(before) :] == before):
                allowed[last] = False
        if self._constraint is not None:
            grammar = self._constraint.allowed()[:vocab_size]
            allowed[: len(grammar)] &= grammar
            allowed[len(grammar) :] = False
        if len(self._output) < self._params.min_tokens:
            ends = self._ends[self._ends < vocab_size]
            kept = allowed[ends]
            allowed[ends] = False
            if self._constraint is not None and not allowed.any():
                allowed[ends] = kept  # the grammar has nothing else to say
        return allowed

    def _draw(self, logits: Logits, raw: Logits) -> int:
        """One draw from the softmax of `logits` under temperature, min_p, top_k and top_p; `raw` is what they were."""
        params = self._params
        best = logits.max()
        if not np.isfinite(best):
            raise self._nothing_left(raw)
        with np.errstate(over="ignore"):  # what overflows has no weight
            # Differences first: exact near the top.
            weights = np.exp((logits - best) / np.float32(max(params.temperature, _LOWEST_TEMPERATURE)))
        ids: Ids | None = None
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
        at = _pick(weights, self._rng.random())
        return at if ids is None else int(ids[at])

    def _nothing_left(self, raw: Logits) -> FarfillError:
        """Whose fault it is that no token can come: `raw` are the model's own logits."""
        params = self._params
        if not np.isfinite(raw.max()):
            return EngineError("the model's logits leave no token to choose", reason="bad_logits")
        given = {
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": params.bad_words,
            "the grammar": self._constraint,
            "min_tokens": params.min_tokens > len(self._output),
            "logit_bias": params.logit_bias,
            "repetition_penalty": params.repetition_penalty != 1.0,
        }
        names = ", ".join(name for name, value in given.items() if value)
        return InvalidRequestError(
            f"after {len(self._output)} tokens, {names or 'the request'} leave no token that may come; allow some more",
            reason="no_token_allowed",
        )


class _Penalties:
    """Repetition (prompt and output), presence and frequency (output only)."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        repeats = params.repetition_penalty != 1.0
        self._seen = dict.fromkeys(prompt) if repeats else {}
        self._counts: dict[int, int] = {}

    def add(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._params.repetition_penalty != 1.0:
            self._seen[token] = None

    def apply(self, logits: Logits) -> None:
        params = self._params
        if self._seen:
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            seen = seen[seen < len(logits)]
            values = logits[seen]
            penalty = np.float32(params.repetition_penalty)
            with np.errstate(all="ignore"):  # a penalty next to 0: told when nothing is left
                logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            logits[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _penalizes(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _pick(weights: Logits, uniform: float) -> int:
    """Index of the token at share `uniform` of the summed weights: first its block, then itself."""
    starts = np.arange(0, len(weights), _BLOCK_TOKENS)
    reached = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = uniform * reached[-1]
    block = min(int(np.searchsorted(reached, target, side="right")), len(starts) - 1)
    first = block * _BLOCK_TOKENS
    within = np.cumsum(weights[first : first + _BLOCK_TOKENS], dtype=np.float64)
    if block:
        target -= reached[block - 1]
    # Rounding may put the target behind the last weight; that one must not be a token that has none.
    last = int(np.searchsorted(within, within[-1], side="left"))
    return first + min(int(np.searchsorted(within, target, side="right")), last)


def _largest(weights: npt.NDArray[np.floating], count: int) -> Ids:
    """Indices of the `count` largest, best first, ties by index."""
    candidates: Ids = np.arange(len(weights))
    if count < len(weights):
        # The count-th best of the blocks' best is no larger than the count-th best of all.
        tops = np.maximum.reduceat(weights, np.arange(0, len(weights), _BLOCK_TOKENS // 4))
        bounds = tops if count < len(tops) else weights
        candidates = np.flatnonzero(weights >= np.partition(bounds, -count)[-count])
    order = np.argsort(-weights[candidates], kind="stable")
    return candidates[order][:count]


def _nucleus(weights: Logits, top_p: float) -> Ids:
    """Indices of the fewest most likely tokens that together reach `top_p`, best first; at least one."""
    total = weights.sum(dtype=np.float64)
    # Nearly always a few are enough.
    kept = _largest(weights, _FEW_TOKENS)
    reached = np.cumsum(weights[kept], dtype=np.float64)
    if reached[-1] >= top_p * total:
        return kept[: int(np.searchsorted(reached, top_p * total, side="left")) + 1]
    # Tokens below this share are together less than what the nucleus may leave out.
    candidates = np.flatnonzero(weights >= (1 - top_p) * total / len(weights) * (1 - 1e-6))
    kept = candidates[np.argsort(-weights[candidates], kind="stable")]
    reached = np.cumsum(weights[kept], dtype=np.float64)
    return kept[: int(np.searchsorted(reached, top_p * total, side="left")) + 1]


def _with_logprobs(logits: Logits, token: int, count: int) -> Sampled:
    best = logits.max()
    log_total = float(best) + float(np.log(np.exp(logits - best).sum(dtype=np.float64)))
    top = _largest(logits, min(count, len(logits))) if count else np.empty(0, np.int64)

    def logprob(index: int) -> float:
        return max(float(logits[index]) - log_total, _LOWEST_LOGPROB)

    return Sampled(token, logprob(token), tuple((int(i), logprob(int(i))) for i in top))
