"""Sampling: greedy, filters, penalties, bans, seeds, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from farfill.core.errors import EngineError, InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.engine.sampling import Sampler

PROBABILITIES = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
LOGITS = np.log(PROBABILITIES).astype(np.float32)
finite = arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32))


def sampler(prompt: tuple[int, ...] = (), eos: tuple[int, ...] = (), index: int = 0, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), prompt, eos, index)


def support(draws: int = 400, **params: Any) -> set[int]:
    """The tokens that come up in many draws from `LOGITS`."""
    one = sampler(seed=1, **params)
    return {one.sample(LOGITS).token_id for _ in range(draws)}


@given(finite)
def test_temperature_zero_takes_the_best_token(logits: np.ndarray) -> None:
    before = logits.copy()
    assert sampler(temperature=0).sample(logits).token_id == int(np.argmax(logits))
    assert np.array_equal(logits, before)


@given(finite, st.integers(1, 5), st.floats(0.05, 1), st.floats(0, 1), st.integers(0, 2**64))
def test_filters_always_leave_the_best_token_a_chance(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    token = sampler(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed).sample(logits).token_id
    weights = np.exp((logits - logits.max()).astype(np.float64) / 0.7)
    assert weights[token] >= min_p * (1 - 1e-5)
    assert (weights > weights[token]).sum() < top_k


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.29}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"temperature": 0.01}, {0}),
    ],
)
def test_filter_keeps_exactly_these_tokens(params: dict[str, Any], expected: set[int]) -> None:
    assert support(**params) == expected


def test_draws_follow_the_distribution() -> None:
    one = sampler(seed=3)
    counts = Counter(one.sample(LOGITS).token_id for _ in range(20_000))
    for token, probability in enumerate(PROBABILITIES):
        assert counts[token] / 20_000 == pytest.approx(probability, abs=4 * math.sqrt(probability / 20_000))


def test_top_p_over_a_flat_large_vocabulary_keeps_enough() -> None:
    one = sampler(seed=3, top_p=0.9)
    flat = np.zeros(5000, np.float32)
    drawn = {one.sample(flat).token_id for _ in range(4000)}
    assert 4000 < max(drawn) < 4500


def test_equal_seeds_repeat_and_choices_differ() -> None:
    wide = np.zeros(1000, np.float32)

    def tokens(seed: int, index: int) -> list[int]:
        one = sampler(seed=seed, index=index)
        return [one.sample(wide).token_id for _ in range(20)]

    assert tokens(5, 1) == tokens(5, 1) == tokens(6, 0)
    assert tokens(5, 0) != tokens(5, 1)
    assert len(tokens(-3, 0)) == 20


def test_frequency_and_presence_penalties_count_output_only() -> None:
    logits = np.array([1.0, 0.9, 0.0], np.float32)
    one = sampler(prompt=(0,), temperature=0, frequency_penalty=0.06)
    assert [one.sample(logits).token_id for _ in range(4)] == [0, 0, 1, 0]
    two = sampler(prompt=(0,), temperature=0, presence_penalty=0.5)
    assert [two.sample(logits).token_id for _ in range(4)] == [0, 1, 0, 0]


def test_repetition_penalty_counts_the_prompt_and_both_signs() -> None:
    one = sampler(prompt=(0, 99), temperature=0, repetition_penalty=2.0)
    assert one.sample(np.array([1.5, 1.0, -9.0], np.float32)).token_id == 1
    two = sampler(prompt=(0,), temperature=0, repetition_penalty=2.0)
    assert two.sample(np.array([-1.0, -1.5], np.float32)).token_id == 1


def test_logit_bias_moves_one_token() -> None:
    assert sampler(temperature=0, logit_bias={4: 100.0, 77: 5.0}).sample(LOGITS).token_id == 4


def test_ends_are_banned_until_min_tokens() -> None:
    one = sampler(eos=(0,), temperature=0, stop_token_ids=(1,), min_tokens=2, logit_bias={0: 100.0})
    assert [one.sample(LOGITS).token_id for _ in range(3)] == [2, 2, 0]


def test_logprobs_are_of_the_raw_distribution() -> None:
    sampled = sampler(temperature=0, logprobs=2, logit_bias={4: 100.0}).sample(LOGITS)
    assert sampled.token_id == 4
    assert sampled.logprob == pytest.approx(math.log(0.03), abs=1e-5)
    assert [token for token, _ in sampled.top] == [0, 1]
    assert sampled.top[0][1] == pytest.approx(math.log(0.5), abs=1e-5)
    assert sampler(temperature=0, logprobs=0).sample(LOGITS).top == ()
    assert sampler(temperature=0).sample(LOGITS).logprob is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_logits_without_a_choice_are_an_error(temperature: float, bad: float) -> None:
    with pytest.raises(EngineError) as failed:
        sampler(temperature=temperature).sample(np.full(4, bad, np.float32))
    assert failed.value.reason == "bad_logits"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"min_tokens": 4, "allowed_token_ids": (2,), "stop_token_ids": (2,)}, "allowed_token_ids, min_tokens"),
        ({"bad_words": tuple((token,) for token in range(len(LOGITS)))}, "bad_words"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ],
)
def test_a_request_that_leaves_no_token_is_its_own_fault(
    temperature: float, params: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named) as failed:
        sampler(prompt=tuple(range(len(LOGITS))), temperature=temperature, **params).sample(np.abs(LOGITS) + 1)
    assert failed.value.reason == "no_token_allowed"


def reference_draw(
    logits: np.ndarray, uniform: float, temperature: float, filters: dict[str, Any]
) -> tuple[int, float]:
    """The plain definition in double precision: the token, and how near `uniform` is to another one."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.arange(len(logits))
    order = order[weights >= filters.get("min_p", 0.0)]
    if filters.get("top_k", len(order)) < len(order) or "top_p" in filters:
        order = order[np.argsort(-weights[order], kind="stable")][: filters.get("top_k") or None]
    reached = np.cumsum(weights[order]) / weights[order].sum()
    if "top_p" in filters:
        order = order[: int((reached < filters["top_p"]).sum()) + 1]
        reached = np.cumsum(weights[order]) / weights[order].sum()
    at = min(int((reached <= uniform).sum()), len(order) - 1)
    return int(order[at]), float(np.abs(reached - uniform).min())


@given(
    st.integers(1, 3000),
    st.integers(0, 2**32),
    st.sampled_from([0.2, 0.7, 1.0, 2.0]),
    st.fixed_dictionaries(
        {}, optional={"top_k": st.integers(1, 80), "top_p": st.floats(0.05, 0.99), "min_p": st.floats(0.001, 0.5)}
    ),
)
def test_draws_are_those_of_the_plain_definition(
    size: int, seed: int, temperature: float, filters: dict[str, Any]
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
    uniform = np.random.Generator(np.random.PCG64(seed)).random()
    expected, distance = reference_draw(logits, uniform, temperature, filters)
    assume(distance > 1e-4)
    assert sampler(seed=seed, temperature=temperature, **filters).sample(logits).token_id == expected


def test_top_k_of_equal_logits_keeps_the_first_ids() -> None:
    one = sampler(seed=1, top_k=3)
    assert {one.sample(np.zeros(2000, np.float32)).token_id for _ in range(100)} == {0, 1, 2}


def test_masked_tokens_never_come_out_of_a_large_vocabulary() -> None:
    logits = np.full(1500, -np.inf, np.float32)
    logits[[3, 700, 1499]] = 0.0
    one = sampler(seed=1)
    assert {one.sample(logits).token_id for _ in range(200)} == {3, 700, 1499}


def test_bad_words_ban_the_token_that_would_complete_them() -> None:
    one = sampler(temperature=0, bad_words=((0,), (1, 2)))
    assert [one.sample(LOGITS).token_id for _ in range(3)] == [1, 1, 1]
    logits = np.array([0.0, 1.0, 2.0, 0.5], np.float32)
    two = sampler(temperature=0, bad_words=((2, 1), (2, 2)))
    assert [two.sample(logits).token_id for _ in range(4)] == [2, 3, 2, 3]


def test_allowed_ids_are_the_only_tokens() -> None:
    assert support(allowed_token_ids=(1, 3, 99)) == {1, 3}
    with pytest.raises(InvalidRequestError):
        sampler(allowed_token_ids=(0,), bad_words=((0,),)).sample(LOGITS)


def test_smallest_temperatures_are_greedy_without_warnings() -> None:
    logits = np.array([1e30, -1e30, 0.0], np.float32)
    assert sampler(temperature=1e-300, top_p=0.5, min_p=0.1).sample(logits).token_id == 0


def test_logprob_of_the_impossible_is_a_number() -> None:
    sampled = sampler(temperature=0, logprobs=2).sample(np.array([0.0, -np.inf], np.float32))
    assert sampled.top == ((0, 0.0), (1, -9999.0))
