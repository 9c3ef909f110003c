from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.errors import InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.gateway.openai.fields import HARMLESS, UNSUPPORTED
from farfill.gateway.openai.requests import ChatBody, CompletionBody, DetokenizeBody, parse, parse_prompts
from farfill.gateway.openai.sampling import chat_sampling, completion_sampling
from farfill.gateway.pipeline.tokenize import fit_context

VOCAB = 1000


def chat(**fields: Any) -> ChatBody:
    return parse(json.dumps({"messages": [], **fields}).encode(), ChatBody)


def completion(**fields: Any) -> CompletionBody:
    return parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionBody)


def test_no_field_is_in_two_groups() -> None:
    used = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    assert not used & HARMLESS
    assert not used & set(UNSUPPORTED)
    assert not HARMLESS & set(UNSUPPORTED)


def test_nulls_mean_the_defaults_of_the_api() -> None:
    nulls = {name: None for name in ChatBody.__struct_fields__ if name != "messages"}
    sampling, demanded = chat_sampling(chat(**nulls), VOCAB)
    assert sampling == SamplingParams()
    assert demanded is None
    assert completion_sampling(completion(), VOCAB) == (SamplingParams(max_tokens=16), None)


@pytest.mark.parametrize(("fields", "demanded"), [({"max_tokens": 7}, 7), ({"max_completion_tokens": 7}, 7)])
def test_length_limit_has_two_names_on_both_endpoints(fields: dict[str, Any], demanded: int) -> None:
    for sampling, found in (
        chat_sampling(chat(**fields), VOCAB),
        completion_sampling(completion(**fields), VOCAB),
        completion_sampling(completion(max_tokens=demanded, max_completion_tokens=demanded), VOCAB),
    ):
        assert (sampling.max_tokens, found) == (demanded, demanded)


def test_two_different_length_limits_are_refused() -> None:
    for refuse in (
        lambda: chat_sampling(chat(max_tokens=1, max_completion_tokens=2), VOCAB),
        lambda: completion_sampling(completion(max_tokens=1, max_completion_tokens=2), VOCAB),
    ):
        with pytest.raises(InvalidRequestError, match="differ") as caught:
            refuse()
        assert caught.value.param == "max_completion_tokens"


def test_field_of_the_other_endpoint_is_pointed_there() -> None:
    with pytest.raises(InvalidRequestError, match=r"/v1/completions; chat takes 'messages'"):
        chat(prompt="x")
    with pytest.raises(InvalidRequestError, match=r"/v1/chat/completions; completions take 'prompt'"):
        completion(messages=[])
    with pytest.raises(InvalidRequestError, match="unknown field 'prompt'"):
        parse(b'{"tokens": [], "prompt": "x"}', DetokenizeBody)


@pytest.mark.parametrize("refused", sorted(UNSUPPORTED))
def test_refused_field_is_never_suggested(refused: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**{refused + "x": 1})
    assert caught.value.reason == "unknown_field"
    assert f"{refused!r}?" not in str(caught.value)


@pytest.mark.parametrize(("value", "stop"), [(None, ()), ([], ()), ("a", ("a",)), (["a", "b"], ("a", "b"))])
def test_stop_in_all_shapes(value: object, stop: tuple[str, ...]) -> None:
    assert chat_sampling(chat(stop=value), VOCAB)[0].stop == stop


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (7, 7)])
def test_top_k_off_in_both_spellings(top_k: int, expected: int) -> None:
    assert chat_sampling(chat(top_k=top_k), VOCAB)[0].top_k == expected


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_chat_logprobs(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat_sampling(chat(**fields), VOCAB)[0].logprobs == logprobs


@pytest.mark.parametrize(
    ("raw", "prompts"),
    [
        ('"text"', ["text"]),
        (' [ "a", "b" ]', ["a", "b"]),
        ("[1, 2]", [[1, 2]]),
        ("[\n[1], [2, 3]]", [[1], [2, 3]]),
        ('"[1, 2]"', ["[1, 2]"]),
    ],
)
def test_prompt_shapes(raw: str, prompts: object) -> None:
    assert parse_prompts(msgspec.Raw(raw.encode())) == prompts


@pytest.mark.parametrize("raw", ["[]", "null", "{}", "1", '[1, "a"]', '["a", 1]', "[[1], 2]", "[1.5]", "[[[1]]]"])
def test_other_prompt_shapes_are_refused(raw: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_prompts(msgspec.Raw(raw.encode()))
    assert caught.value.param == "prompt"


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_the_clients_error(data: bytes) -> None:
    try:
        parse(data, ChatBody)
    except InvalidRequestError as error:
        found = str(error)
    else:
        found = "parsed"
    assert found


@given(
    st.dictionaries(
        st.text(max_size=12),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=5,
        ),
        max_size=5,
    )
)
def test_any_object_parses_or_names_what_is_wrong(fields: dict[str, Any]) -> None:
    try:
        chat_sampling(parse(json.dumps({"messages": [], **fields}).encode(), ChatBody), VOCAB)
    except InvalidRequestError as error:
        named = error.param is not None or error.reason == "invalid_json"
    else:
        named = True
    assert named


@pytest.mark.parametrize(
    ("prompt", "demanded", "default", "max_tokens"),
    [
        (90, None, None, 10),
        (90, None, 16, 10),
        (10, None, 16, 16),
        (90, 10, None, 10),
        (90, 1, 16, 1),
        (99, None, 16, 1),
    ],
)
def test_output_fits_the_rest_of_the_context(
    prompt: int, demanded: int | None, default: int | None, max_tokens: int
) -> None:
    assert fit_context(prompt, SamplingParams(), demanded, default, 100).max_tokens == max_tokens


@pytest.mark.parametrize(("prompt", "demanded", "minimum"), [(100, None, 0), (90, 11, 0), (90, None, 11), (200, 1, 0)])
def test_what_cannot_fit_says_both_lengths(prompt: int, demanded: int | None, minimum: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fit_context(prompt, SamplingParams(min_tokens=minimum), demanded, None, 100)
    assert caught.value.reason == "context_length_exceeded"
    assert "100" in str(caught.value)
    assert str(prompt) in str(caught.value)
