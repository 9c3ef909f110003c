"""What can be asked of a generation means with vLLM what it means with the embedded engine."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from tests.vllm_engine.calls import GREEDY, far, local, prompt_of, start_local, start_prefill
from tests.vllm_engine.conftest import Pair

from farfill.core.errors import InvalidRequestError
from farfill.core.sampling import SamplingParams

# Plain characters: a prompt that ends inside one would lend its rest to the text.
PROMPT = tuple(token % 90 for token in prompt_of(200))


def test_choices_have_seeds_of_their_own_and_one_prefill(pair: Pair) -> None:
    sampling = SamplingParams(max_tokens=16, temperature=1.0, seed=11, n=3, ignore_eos=True)
    choices = [choice.token_ids for choice in local(pair.decode, PROMPT, sampling)]
    assert len({tuple(choice) for choice in choices}) == 3
    again = [choice.token_ids for choice in far(pair.prefill, pair.decode, PROMPT, sampling).choices]
    assert again == choices
    second = local(pair.decode, PROMPT, replace(sampling, n=1, seed=12))[0]
    assert second.token_ids == choices[1]


def test_a_seed_is_kept_when_the_prompt_takes_several_steps(pair: Pair) -> None:
    """vLLM 0.32 on CPU would die of it."""
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=5, n=2, ignore_eos=True)
    prompt = prompt_of(900)
    sink = start_local(pair.decode, prompt, sampling)[1]
    near = [choice.token_ids for choice in sink.wait()]
    assert sink.stats is not None
    assert sink.stats.computed_tokens + sink.stats.cached_tokens == 899
    assert near == [choice.token_ids for choice in far(pair.prefill, pair.decode, prompt, sampling).choices]
    assert len(local(pair.decode, (65,), sampling)) == 2


def test_stop_string_ends_the_text_before_itself(pair: Pair) -> None:
    whole = local(pair.decode, PROMPT)[0]
    stop = whole.text[9:12]
    at = whole.text.index(stop)
    short = local(pair.decode, PROMPT, replace(GREEDY, stop=(stop,)))[0]
    assert (short.text, short.finish_reason, short.stop_reason) == (whole.text[:at], "stop", stop)
    assert len(short.token_ids) < len(whole.token_ids)
    kept = local(pair.decode, PROMPT, replace(GREEDY, stop=(stop,), include_stop_str_in_output=True))[0]
    assert kept.text == whole.text[: at + len(stop)]
    late = local(pair.decode, PROMPT, replace(GREEDY, stop=(stop,), min_tokens=20))[0]
    assert len(late.token_ids) >= 20


def test_stop_token_ends_and_min_tokens_holds_it_back(pair: Pair) -> None:
    whole = local(pair.decode, PROMPT)[0].token_ids
    stop = whole[5]
    first = whole.index(stop)
    ended = local(pair.decode, PROMPT, replace(GREEDY, stop_token_ids=(stop,)))[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (whole[: first + 1], "stop", stop)
    held = local(pair.decode, PROMPT, replace(GREEDY, stop_token_ids=(stop,), min_tokens=12))[0]
    assert len(held.token_ids) >= 12
    assert stop not in held.token_ids[:12]


def test_logprobs_are_natural_and_sorted(pair: Pair) -> None:
    choice = local(pair.decode, PROMPT, replace(GREEDY, max_tokens=4, logprobs=3))[0]
    assert len(choice.logprobs) == len(choice.token_ids) == 4
    for token, (chosen, others) in zip(choice.token_ids, choice.logprobs, strict=True):
        assert chosen.token_id == token == others[0].token_id
        assert len(others) == 3
        values = [other.logprob for other in others]
        assert values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) <= 1.0001
        assert len(chosen.text_bytes) == (1 if token < 256 else 0) or token in range(256, 260)
    only = local(pair.decode, PROMPT, replace(GREEDY, max_tokens=2, logprobs=0))[0]
    assert [others for _, others in only.logprobs] == [(), ()]
    assert local(pair.decode, PROMPT, replace(GREEDY, max_tokens=2))[0].logprobs == []


def test_logprobs_after_far_prefill_are_those_of_local(pair: Pair) -> None:
    sampling = replace(GREEDY, max_tokens=6, logprobs=2)
    near = local(pair.decode, PROMPT, sampling)[0].logprobs
    remote = far(pair.prefill, pair.decode, PROMPT, sampling).choices[0].logprobs
    assert [chosen.logprob for chosen, _ in remote] == pytest.approx([chosen.logprob for chosen, _ in near], abs=1e-5)


def test_tokens_may_be_biased_and_limited(pair: Pair) -> None:
    biased = local(pair.decode, PROMPT, replace(GREEDY, max_tokens=3, logit_bias={65: 100.0}))[0]
    assert biased.token_ids == [65, 65, 65]
    limited = local(pair.decode, PROMPT, replace(GREEDY, max_tokens=8, allowed_token_ids=(40, 41)))[0]
    assert set(limited.token_ids) <= {40, 41}


def test_output_keeps_to_a_grammar_also_after_far_prefill(pair: Pair) -> None:
    sampling = replace(GREEDY, grammar="start: /[ab]{4}c/", ignore_eos=False, max_tokens=20)
    assert pair.decode.prepare(sampling).result(60) is None
    near = local(pair.decode, PROMPT, sampling)[0]
    assert near.finish_reason == "stop"
    assert len(near.text) == 5
    assert set(near.text[:4]) <= set("ab")
    assert near.text[4] == "c"
    assert far(pair.prefill, pair.decode, PROMPT, sampling).choices[0].text == near.text


def test_json_schema_inside_a_grammar(pair: Pair) -> None:
    grammar = 'start: %json {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], '
    grammar += '"additionalProperties": false}'
    choice = local(pair.decode, PROMPT, replace(GREEDY, grammar=grammar, ignore_eos=False, max_tokens=60))[0]
    if choice.finish_reason == "stop":
        assert json.loads(choice.text) in ({"n": 1}, {"n": 2})
    else:
        assert choice.text.lstrip().startswith("{")


def test_bad_grammar_is_the_clients_fault(pair: Pair) -> None:
    sampling = replace(GREEDY, grammar="start: /[/")
    assert isinstance(pair.decode.prepare(sampling).exception(60), InvalidRequestError)
    with pytest.raises(InvalidRequestError):
        local(pair.decode, PROMPT, sampling)


def test_what_vllm_cannot_do_is_refused_with_the_field(pair: Pair) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        local(pair.decode, PROMPT, replace(GREEDY, bad_words=((1, 2),)))
    assert caught.value.param == "bad_words"
    with pytest.raises(InvalidRequestError, match="token ids"):
        start_local(pair.decode, (1, 100_000))
    with pytest.raises(InvalidRequestError, match="room for 4095"):
        start_local(pair.decode, prompt_of(4096))
    with pytest.raises(InvalidRequestError, match="at least 2"):
        start_prefill(pair.prefill, (1,))


def test_end_of_text_ends_unless_ignored(pair: Pair) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0.0, logit_bias={257: 100.0})
    ended = local(pair.decode, PROMPT, sampling)[0]
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([257], "", "stop", None)
    ignored = local(pair.decode, PROMPT, replace(sampling, ignore_eos=True))[0]
    assert (ignored.token_ids, ignored.finish_reason) == ([257] * 5, "length")
