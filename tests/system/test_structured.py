"""Constrained output and tool calls by real models, near and far, and text as a real tokenizer makes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tests.system.cluster import Cluster
from tests.system.conftest import REAL_MODEL
from tokenizers import Tokenizer

from farfill.engine.grammar import Grammars
from farfill.engine.output import OutputText, Vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["é", "日本", "😀"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ASK: Any = [{"role": "user", "content": "Describe a person called Anna, 30 years old."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Köln", "Ulm"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(real_cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_cluster.url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        yield client


@pytest.fixture
def tools_client(hybrid_cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hybrid_cluster.url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        yield client


def assert_person(text: str | None) -> None:
    person = json.loads(text or "")
    assert list(person) == ["name", "age", "tags"]
    assert len(person["name"]) <= 20
    assert 0 <= person["age"] <= 120
    assert set(person["tags"]) <= {"é", "日本", "😀"}


def test_schema_holds_for_every_choice_streamed_or_not(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": REAL_MODEL,
        "messages": ASK,
        "response_format": FORM,
        "max_tokens": 120,
        "seed": 4,
    }
    whole = client.chat.completions.create(**asked, n=2)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        assert_person(choice.message.content)
    with client.chat.completions.create(**asked, stream=True) as stream:
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == whole.choices[0].message.content


def test_far_prefill_changes_nothing_of_a_constrained_answer(client: openai.OpenAI) -> None:
    story = "Anna walked along the river and counted the boats. " * 60
    asked: dict[str, Any] = {
        "model": REAL_MODEL,
        "messages": [{"role": "user", "content": story + "Describe Anna."}],
        "response_format": FORM,
        "max_tokens": 120,
        "temperature": 0,
    }
    near, far = (
        client.chat.completions.with_raw_response.create(
            **asked, extra_headers={"x-farfill-force-placement": placement}, extra_body={"cache_salt": placement}
        )
        for placement in ("local", "remote")
    )
    assert far.headers["x-farfill-placement"] == "remote"
    assert near.parse().choices[0].message.content == far.parse().choices[0].message.content
    assert_person(far.parse().choices[0].message.content)


def test_completions_follow_regex_choice_and_stop(client: openai.OpenAI) -> None:
    def complete(**fields: Any) -> openai.types.CompletionChoice:
        answer = client.completions.create(
            model=REAL_MODEL, prompt="The answer is", max_tokens=24, seed=3, extra_body=fields
        )
        return answer.choices[0]

    dated = complete(guided_regex=r" \d{4}-\d{2}-\d{2}")
    assert re.fullmatch(r" \d{4}-\d{2}-\d{2}", dated.text)
    assert dated.finish_reason == "stop"
    stopped = complete(guided_regex=r" \d{4}-\d{2}-\d{2}", stop=["-"])
    assert re.fullmatch(r" \d{4}", stopped.text)
    assert complete(structured_outputs={"choice": [" yes", " naïve"]}).text in (" yes", " naïve")
    assert "yes" not in complete(bad_words=["yes"], guided_choice=[" yes", " no"]).text


def test_impossible_schema_is_refused_and_others_go_on(client: openai.OpenAI) -> None:
    hostile = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5_000)}}
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema in (hostile, deep, {"type": "array", "uniqueItems": True}):
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=REAL_MODEL, messages=ASK, response_format=form, max_tokens=5)
        assert refused.value.param == "response_format.json_schema.schema"
    answer = client.chat.completions.create(model=REAL_MODEL, messages=ASK, max_tokens=5)
    assert answer.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_demanded_calls_are_valid_even_from_a_random_model(tools_client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "hybrid",
        "messages": [{"role": "user", "content": "weather?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 1_000,
        "seed": 1,
    }
    answer = tools_client.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert not message.content
    (call,) = message.tool_calls or []
    arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
    assert arguments["city"] in ("Köln", "Ulm")
    assert 1 <= arguments["days"] <= 9
    with tools_client.chat.completions.create(**asked, stream=True) as stream:
        deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == arguments  # type: ignore[union-attr]
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    after = tools_client.chat.completions.create(
        model="hybrid", messages=[*asked["messages"], message.model_dump(), result], tools=[WEATHER], max_tokens=4
    )
    assert after.choices[0].finish_reason


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))


TEXTS = st.text(alphabet=st.sampled_from("ab é日本😀👨‍👩‍👧\n.,{}\"'"), min_size=1, max_size=40)


@settings(max_examples=60)
@given(TEXTS)
def test_real_tokens_make_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    output = OutputText(tokenizer, tokenizer.encode("prompt", add_special_tokens=False).ids)
    pieces = [output.push(token)[0] for token in tokenizer.encode(text, add_special_tokens=False).ids]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + output.finish() == text


@settings(max_examples=60)
@given(TEXTS, st.text(alphabet=st.sampled_from("ab é日😀"), min_size=1, max_size=3))
def test_real_tokens_stop_before_the_stop_string(tokenizer: Tokenizer, text: str, stop: str) -> None:
    output = OutputText(tokenizer, tokenizer.encode("prompt", add_special_tokens=False).ids, stop=[stop])
    shown, matched = "", None
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        piece, matched = output.push(token)
        shown += piece
        if matched is not None:
            break
    before, found, _ = text.partition(stop)
    assert (shown + output.finish(), matched) == (before, found or None)


@settings(max_examples=30, deadline=None)  # the first one builds tables of the vocabulary
@given(st.lists(st.integers(0, 10_000), min_size=200, max_size=200))
def test_random_choices_of_a_real_tokenizer_are_valid_json(tokenizer: Tokenizer, draws: list[int]) -> None:
    grammars = _grammars(tokenizer)
    schema = {**PERSON, "x-guidance": {"whitespace_flexible": False}}
    constraint = grammars.constraint(LLMatcher.grammar_from_json_schema(schema))
    output = OutputText(tokenizer, [])
    text = ""
    for draw in draws:
        allowed = constraint.allowed().nonzero()[0]
        token = int(allowed[draw % len(allowed)])
        constraint.advance(token)
        text += output.push(token)[0]
        if constraint.complete:
            assert_person(text)
            return


_made: list[Grammars] = []


def _grammars(tokenizer: Tokenizer) -> Grammars:
    if not _made:
        _made.append(Vocabulary.of(tokenizer, frozenset({2}), tokenizer.get_vocab_size()).grammars)
    return _made[0]
