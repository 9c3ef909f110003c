"""Sampling fields that were checked before give the same again; others, and wrong ones, are checked each time."""

from __future__ import annotations

import msgspec
import pytest

from farfill.core.errors import InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.gateway.openai.requests import ChatBody
from farfill.gateway.openai.sampling import chat_sampling


def sampling(vocab_size: int = 100, **fields: object) -> SamplingParams:
    return chat_sampling(msgspec.convert({"messages": [], **fields}, ChatBody), vocab_size)[0]


def test_the_same_fields_give_the_same_and_any_other_one_does_not():
    first = sampling(temperature=0.5, max_tokens=8)
    assert sampling(temperature=0.5, max_tokens=8) is first
    for other in (
        {"temperature": 0.25, "max_tokens": 8},
        {"temperature": 0.5, "max_tokens": 9},
        {"temperature": 0.5, "max_tokens": 8, "seed": 1},
        {"temperature": 0.5, "max_tokens": 8, "stop": "x"},
        {"temperature": 0.5, "max_tokens": 8, "stop": ["x"]},
        {"temperature": 0.5, "max_tokens": 8, "logit_bias": {"7": 1.0}},
        {"temperature": 0.5, "max_tokens": 8, "logprobs": True, "top_logprobs": 2},
    ):
        assert sampling(**other) == sampling(**other)
        assert sampling(**other) != first
    assert sampling(seed=2).seed == 2


def test_what_is_wrong_is_told_every_time():
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="temperature must be between"):
            sampling(temperature=3.0)
    assert sampling(stop_token_ids=[50]).stop_token_ids == (50,)
    with pytest.raises(InvalidRequestError, match="token id 50 is not in"):
        sampling(vocab_size=50, stop_token_ids=[50])
