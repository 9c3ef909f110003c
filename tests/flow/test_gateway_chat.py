"""Tool calls, reasoning and constrained output as the real `openai` client sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from farfill.gateway.errors import http_status
from farfill.gateway.pipeline.generation import failed
from farfill.wire.control import FailedEvent
from support.gateway_harness import Harness, running_gateway

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> answer with <tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ call.function.name }}:{{ call.function.arguments.city }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK: list[Any] = [{"role": "user", "content": "weather?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
BYTES = LLTokenizer("byte")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path, chat_template=TEMPLATE, context_tokens=2048) as harness:
        harness.decode.finish_reason = "stop"
        yield harness


def say(gateway: Harness, text: str, size: int = 3) -> None:
    """What the model answers, in pieces."""
    gateway.decode.texts = [text[i : i + size] for i in range(0, len(text), size)]


def prompt(gateway: Harness) -> str:
    return gateway.service.deps.model.decode(gateway.decode.decodes[-1].token_ids)


def accepts(gateway: Harness, text: str) -> bool:
    """Whether the grammar the worker was sent allows exactly this text."""
    matcher = LLMatcher(BYTES, gateway.decode.decodes[-1].sampling.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


async def test_calls_come_back_with_ids_and_their_finish_reason(gateway: Harness) -> None:
    say(gateway, f"Looking.\n{CALL}\n{CALL}")
    answer = await gateway.openai.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Looking."
        calls = choice.message.tool_calls or []
        assert [call.function.name for call in calls] == ["get_weather"] * 2  # type: ignore[union-attr]
        assert all(json.loads(call.function.arguments) == {"city": "Köln"} for call in calls)  # type: ignore[union-attr]
        assert len({call.id for call in calls}) == 2
    assert gateway.decode.decodes[0].sampling.grammar == ""
    assert '<tools>[{"type": "function", "function": {"name": "get_weather", "description"' in prompt(gateway)


async def test_streamed_calls_come_in_pieces_and_make_the_same_whole(gateway: Harness) -> None:
    say(gateway, f"Looking.\n{CALL}")
    stream = await gateway.openai.chat.completions.create(
        model="tiny", messages=ASK, tools=[WEATHER], stream=True, logprobs=True
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Looking."
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    assert (pieces[0].index, pieces[0].type, pieces[0].function.name) == (0, "function", "get_weather")  # type: ignore[union-attr]
    assert pieces[0].id
    assert all(piece.id is None for piece in pieces[1:])
    assert len(pieces) > 3
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces)) == {"city": "Köln"}  # type: ignore[union-attr]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    told = [entry.token for chunk in chunks for entry in (chunk.choices[0].logprobs or EMPTY).content or []]
    assert "".join(told) == f"Looking.\n{CALL}"


class EMPTY:
    content: list[Any] = []  # noqa: RUF012 -- stands for a missing object


async def test_stream_helper_of_the_client_builds_the_same_message(gateway: Harness) -> None:
    say(gateway, CALL)
    async with gateway.openai.chat.completions.stream(model="tiny", messages=ASK, tools=[WEATHER]) as stream:  # type: ignore[list-item]
        completion = await stream.get_final_completion()
    message = completion.choices[0].message
    assert not message.content
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}


async def test_conversation_goes_on_with_the_results(gateway: Harness) -> None:
    say(gateway, CALL)
    first = await gateway.openai.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER])
    message = first.choices[0].message
    calls = message.tool_calls or []
    say(gateway, "Rain.")
    second = await gateway.openai.chat.completions.create(
        model="tiny",
        messages=[*ASK, message.model_dump(), {"role": "tool", "tool_call_id": calls[0].id, "content": "rain"}],
        tools=[WEATHER],
    )
    assert "assistant\n<tool_call>get_weather:Köln</tool_call><|im_end|>\n<|im_start|>tool\nrain" in prompt(gateway)
    assert second.choices[0].message.content == "Rain."
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_demanded_call_is_held_to_the_schema(gateway: Harness, choice: Any) -> None:
    say(gateway, CALL)
    other = {"type": "function", "function": {"name": "now"}}
    answer = await gateway.openai.chat.completions.create(
        model="tiny", messages=ASK, tools=[WEATHER, other], tool_choice=choice
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert accepts(gateway, CALL)
    assert not accepts(gateway, CALL.replace('"city"', '"town"'))
    assert not accepts(gateway, "It rains.")
    now = CALL.replace("get_weather", "now").replace('{"city": "Köln"}', "{}")
    assert accepts(gateway, now) is (choice == "required")
    await gateway.openai.chat.completions.create(
        model="tiny", messages=ASK, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
    )
    assert accepts(gateway, CALL)
    assert not accepts(gateway, f"{CALL}\n{CALL}")


async def test_strict_tools_bind_calls_but_not_text(gateway: Harness) -> None:
    say(gateway, "x")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    await gateway.openai.chat.completions.create(model="tiny", messages=ASK, tools=[strict])  # type: ignore[list-item]
    assert accepts(gateway, "It rains.")
    assert accepts(gateway, "Looking. " + CALL)
    assert not accepts(gateway, CALL.replace('"Köln"', "3"))


async def test_choice_none_hides_the_tools_and_reads_no_calls(gateway: Harness) -> None:
    say(gateway, CALL)
    answer = await gateway.openai.chat.completions.create(
        model="tiny", messages=ASK, tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL
    assert "<tools>" not in prompt(gateway)


async def test_schema_of_a_tool_that_cannot_be_held_to_is_named(gateway: Harness) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "propertyNames": {}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.openai.chat.completions.create(
            model="tiny",
            messages=ASK,
            tools=[WEATHER, bad],
            tool_choice="required",  # type: ignore[list-item]
        )
    assert refused.value.param == "tools[1].function.parameters"
    assert refused.value.code == "grammar"
    assert gateway.decode.decodes == []


async def test_reasoning_is_a_field_of_its_own(gateway: Harness) -> None:
    for options, text in (({}, "<think>\nhm\n</think>\n\nyes"), ({"enable_thinking": True}, "hm\n</think>\n\nyes")):
        say(gateway, text)
        asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "extra_body": {"chat_template_kwargs": options}}
        answer = await gateway.openai.chat.completions.create(**asked)
        assert answer.choices[0].message.content == "yes"
        assert answer.choices[0].message.reasoning_content == "hm"  # type: ignore[attr-defined]
        stream = await gateway.openai.chat.completions.create(**asked, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(delta.content or "" for delta in deltas) == "yes"
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert prompt(gateway).endswith("<think>\n")


async def test_earlier_reasoning_is_given_to_the_template(gateway: Harness) -> None:
    say(gateway, "x")
    said = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    await gateway.openai.chat.completions.create(model="tiny", messages=[*ASK, said, *ASK])
    assert "assistant\n<think>hm</think>yes<|im_end|>" in prompt(gateway)


async def test_schema_binds_the_answer_but_not_the_reasoning(gateway: Harness) -> None:
    say(gateway, "x")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    await gateway.openai.chat.completions.create(model="tiny", messages=ASK, response_format=form)  # type: ignore[call-overload]
    assert accepts(gateway, '{"n": 3}')
    assert accepts(gateway, '<think>what?</think>\n{"n": 3}')
    assert not accepts(gateway, '{"n": "3"}')
    await gateway.openai.chat.completions.create(
        model="tiny", messages=ASK, response_format={"type": "json_object"}, tools=[WEATHER]
    )
    assert accepts(gateway, '{"any": ["thing"]}')
    assert accepts(gateway, CALL)
    assert not accepts(gateway, "It rains.")


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"guided_json": {"type": "array", "items": {"type": "boolean"}}}, "[true, false]", "[1]"),
        ({"guided_json": '{"enum": ["a", 1]}'}, '"a"', '"b"'),
        ({"guided_regex": "[0-9]{2}/[a-f]+"}, "12/ab", "1/ab"),
        ({"guided_choice": ['say "yes"', "no\n"]}, 'say "yes"', "no"),
        ({"guided_grammar": 'root ::= "a" | "b" root'}, "bba", "bb"),
        ({"guided_grammar": 'start: "a"+ end\nend: /[xy]/'}, "aax", "x"),
        ({"structured_outputs": {"regex": "a+"}}, "aa", "b"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "1"),
    ],
)
async def test_completions_take_every_kind_of_constraint(
    gateway: Harness, fields: dict[str, Any], good: str, bad: str
) -> None:
    status, body, _ = await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x", **fields})
    assert status == 200, body
    assert accepts(gateway, good)
    assert not accepts(gateway, bad)


@pytest.mark.parametrize("count", [1200, 2001, 4096])
@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
async def test_choices_may_be_as_many_as_the_fields_allow(gateway: Harness, field: str, count: int) -> None:
    choices = [str(i) for i in range(count)]
    asked = choices if field == "guided_choice" else {"choice": choices}
    status, body, _ = await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x", field: asked})
    assert status == 200, body
    assert all(accepts(gateway, text) for text in (choices[0], choices[1], choices[-1]))
    assert not accepts(gateway, str(count))


async def test_rule_of_too_many_alternatives_is_refused_before_a_worker_hears_of_it(gateway: Harness) -> None:
    wide = "start: " + " | ".join(f'"{i:05}"' for i in range(2500))
    status, body, _ = await gateway.post("/v1/completions", {"model": "tiny", "prompt": "x", "guided_grammar": wide})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "grammar", "guided_grammar")
    assert not gateway.decode.decodes


def test_grammar_that_a_worker_finds_too_complex_later_is_the_fault_of_the_client() -> None:
    assert http_status(failed(FailedEvent(reason="grammar_limit", message="too complex"))) == 400
    assert http_status(failed(FailedEvent(reason="no_token_allowed", message="none"))) == 400
    assert http_status(failed(FailedEvent(reason="bad_logits", message="none"))) == 500


async def test_bad_words_and_allowed_ids_reach_the_worker_as_tokens(gateway: Harness) -> None:
    status, body, _ = await gateway.post(
        "/v1/completions", {"model": "tiny", "prompt": "x", "bad_words": ["ab"], "allowed_token_ids": [3, 5]}
    )
    assert status == 200, body
    sampling = gateway.decode.decodes[-1].sampling
    encode = gateway.service.deps.model.encode
    assert list(sampling.bad_words[0]) == encode("ab", add_special_tokens=False)
    assert list(sampling.allowed_token_ids) == [3, 5]


async def test_tokenize_renders_tools_as_a_chat_does(gateway: Harness) -> None:
    say(gateway, "x")
    await gateway.openai.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER])
    status, body, _ = await gateway.post("/tokenize", {"messages": ASK, "tools": [WEATHER]})
    assert status == 200, body
    assert body["tokens"] == gateway.decode.decodes[-1].token_ids
