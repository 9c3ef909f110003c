"""Every way of writing tool calls: parsed the same however it is cut, and held to the schema by its grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from farfill.core.errors import InvalidRequestError
from farfill.gateway.openai.assistant import AssistantParser
from farfill.gateway.openai.call_parser import Parsed
from farfill.gateway.openai.lark import Rules, literal
from farfill.gateway.openai.reasoning import FORMATS as REASONING
from farfill.gateway.openai.reasoning import ReasoningSplitter, reasoning_format
from farfill.gateway.openai.tool_formats import FORMATS, ToolFormat, tool_format
from farfill.gateway.openai.tools import Tool

BYTES = LLTokenizer("byte")
WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    False,
    "tools[0].function.parameters",
)
CLOCK = Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}, False, "tools[1]")
TOOLS = (WEATHER, CLOCK)
ARGUMENTS = {"city": 'Köln "am" }Rhein{', "days": 3}
A = json.dumps(ARGUMENTS, ensure_ascii=False)
BY_NAME = {known.name: known for known in FORMATS}
DS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
DS_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
TAGGED = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln "am" }Rhein{\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
TWO_CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {A}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": TAGGED + "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{A}[TOOL_CALLS]now[ARGS]{{}}",
    "deepseek_v3": DS.format(
        DS_CALL.format("function", f"get_weather\n```json\n{A}\n```")
        + "\n"
        + DS_CALL.format("function", "now\n```json\n{}\n```")
    ),
    "deepseek_v31": DS.format(DS_CALL.format("get_weather", A) + DS_CALL.format("now", "{}")),
    "kimi_k2": KIMI.format(KIMI_CALL.format("get_weather", 0, A) + KIMI_CALL.format("now", 1, "{}")),
    "llama3_json": f'{{"name": "get_weather", "parameters": {A}}}; {{"name": "now", "parameters": {{}}}}',
}
OTHER_SPELLINGS = [
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {A}}}, {{"name": "now", "arguments": {{}}}}]'),
    ("mistral", f"[TOOL_CALLS]get_weather{A}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}"),
    ("hermes", f'<tool_call>{{"arguments": {A}, "name": "get_weather"}}</tool_call><tool_call>{{"name":"now"}}'),
    ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(A)}}}</tool_call>'
     '<tool_call>{"id": 7, "name": "now", "arguments": null}</tool_call>'),
    ("llama3_json", f'<|python_tag|>{{"type": "x", "name": "get_weather", "parameters": {A}}};{{"name": "now"}}'),
]  # fmt: skip


def parse(known: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call."""
    parser = known.parser(TOOLS)
    content, calls, ids = "", [], set()
    for parsed in [*map(parser.push, pieces), parser.finish()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                assert delta.call_id
                ids.add(delta.call_id)
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    assert len(ids) == len(calls) == parser.calls
    return content, calls


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text"), [*TWO_CALLS.items(), *OTHER_SPELLINGS])
def test_calls_come_out_whole_or_letter_by_letter(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        content, calls = parse(BY_NAME[name], pieces)
        assert content == ""
        assert [called for called, _ in calls] == ["get_weather", "now"]
        assert [json.loads(arguments) for _, arguments in calls] == [ARGUMENTS, {}]


@pytest.mark.parametrize("name", sorted(set(TWO_CALLS) - {"llama3_json"}))
@given(st.lists(st.integers(0, 400), max_size=6), st.sampled_from(["", "Let me see.\n\n", "a < b <tool [TOO "]))
def test_cuts_and_text_before_change_nothing(name: str, places: list[int], before: str) -> None:
    text = before + TWO_CALLS[name]
    content, calls = parse(BY_NAME[name], cut(text, places))
    assert content == before.rstrip()
    assert calls == parse(BY_NAME[name], [TWO_CALLS[name]])[1]


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize(
    "text", ["", " ", "plain\n", "1 < 2\n<to", "{}", '{"name": "Bob", "age": 3}', "[TOOL", "a ; b"]
)
def test_text_without_calls_is_content(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(BY_NAME[name], pieces) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot json\n</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]',
        '<tool_call>{"nam',
    ],
)
def test_what_is_no_call_stays_visible(text: str) -> None:
    content, calls = parse(BY_NAME["hermes"], list(text))
    if calls:
        assert calls == [("f", "")]
    else:
        assert content.startswith("<tool_call>")


def test_call_that_is_cut_keeps_what_came() -> None:
    content, calls = parse(BY_NAME["hermes"], ['<tool_call>{"name": "now", "arguments": {"a": [1, '])
    assert (content, calls) == ("", [("now", '{"a": [1, ')])


def test_ids_are_in_the_form_the_template_wants() -> None:
    mistral = BY_NAME["mistral"].parser(TOOLS).push("[TOOL_CALLS]now[ARGS]{}").calls[0].call_id
    kimi = BY_NAME["kimi_k2"].parser(TOOLS).push(KIMI_CALL.format("now", 4, "{}")).calls[0].call_id
    assert mistral is not None
    assert (len(mistral), mistral.isalnum()) == (9, True)
    assert kimi == "functions.now:4"


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_template_with_its_signs_is_recognised(known: ToolFormat) -> None:
    template = "{% if tools %}" + " ".join(known.signs) + "{% endif %}"
    found = tool_format("auto", template)
    assert found is known
    assert tool_format(known.name, "") is known
    assert tool_format("none", template) is None
    assert tool_format("auto", "{{ tools }}") is None


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text satisfies the grammar."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def demanded(known: ToolFormat, tools: tuple[Tool, ...] = TOOLS, *, parallel: bool = True) -> str:
    rules = Rules(literal)
    return rules.start(known.demanded(rules, tools, parallel=parallel))


def possible(known: ToolFormat, *, parallel: bool = True) -> str:
    rules = Rules(literal)
    return rules.start(known.possible(rules, TOOLS, parallel=parallel))


GRAMMAR_TEXTS = {**TWO_CALLS, "mistral": OTHER_SPELLINGS[0][1].replace("] [", "][")}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_grammar_demands_what_the_parser_reads(name: str) -> None:
    known, text = BY_NAME[name], GRAMMAR_TEXTS[name]
    assert accepts(demanded(known), text)
    assert not accepts(demanded(known, parallel=False), text)
    assert not accepts(demanded(known), "")
    assert not accepts(demanded(known), text.replace("now", "then"))
    assert not accepts(demanded(known), text.replace("3", "three"))
    assert not accepts(demanded(known), text.replace("city", "town"))
    assert not accepts(demanded(known, (CLOCK,)), text)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_grammar_of_possible_calls_lets_text_pass_and_wrong_calls_not(name: str) -> None:
    known, text = BY_NAME[name], GRAMMAR_TEXTS[name]
    bare = known.name == "llama3_json"
    assert accepts(possible(known), "Just text.\n")
    assert accepts(possible(known), "")
    assert accepts(possible(known), text if bare else "First: " + text)
    assert not accepts(possible(known), text.replace("3", "three"))
    assert not accepts(possible(known, parallel=False), text)


def test_text_parameters_keep_their_bounds_without_quotes() -> None:
    def tool(**city: Any) -> tuple[Tool, ...]:
        schema = {"type": "object", "properties": {"city": {"type": "string", **city}}, "required": ["city"]}
        return (Tool("f", schema, False, "tools[0]"),)

    def text(city: str) -> str:
        return f"<tool_call>\n<function=f>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"

    known = BY_NAME["qwen3_coder"]
    assert accepts(demanded(known, tool(enum=["Köln", "Ulm"])), text("Ulm"))
    assert not accepts(demanded(known, tool(enum=["Köln", "Ulm"])), text("Bonn"))
    assert accepts(demanded(known, tool(maxLength=3)), text("Ulm"))
    assert not accepts(demanded(known, tool(maxLength=3)), text("Köln"))
    with pytest.raises(InvalidRequestError, match="pattern"):
        demanded(known, tool(pattern="a+"))


def test_shared_definitions_are_found_from_anywhere() -> None:
    schema = {
        "type": "object",
        "$defs": {"count": {"type": "integer"}},
        "properties": {"n": {"$ref": "#/$defs/count"}},
        "required": ["n"],
    }
    tools = (Tool("f", schema, False, "tools[0]"),)
    assert accepts(
        demanded(BY_NAME["hermes"], tools), '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    )
    tagged = "<tool_call>\n<function=f>\n<parameter=n>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert accepts(demanded(BY_NAME["qwen3_coder"], tools), tagged.format(1))
    assert not accepts(demanded(BY_NAME["qwen3_coder"], tools), tagged.format("x"))


THINK, MISTRAL_THINK = REASONING


def split(text: str, places: list[int], *, opened: bool) -> tuple[str, str]:
    parser = AssistantParser(ReasoningSplitter(THINK, opened=opened))
    pieces = cut(text, places)
    parsed = [parser.push(piece, None) for piece in pieces] + [parser.push("", "stop")]
    return "".join(p.reasoning for p in parsed), "".join(p.content for p in parsed)


@given(st.lists(st.integers(0, 60), max_size=8))
def test_reasoning_is_cut_out_however_it_comes(places: list[int]) -> None:
    assert split("<think>\na < b\n\n</think>\n\nyes\n", places, opened=False) == ("a < b", "yes\n")
    assert split("\n<think>a</think>b", places, opened=False) == ("a", "b")
    assert split("\nwell\n</think>\n\nyes", places, opened=True) == ("well", "yes")
    assert split("no end </thin\n", places, opened=True) == ("no end </thin", "")
    assert split("plain <think>x</think>", places, opened=False) == ("", "plain <think>x</think>")
    assert split("<thin", places, opened=False) == ("", "<thin")
    assert split("", places, opened=True) == ("", "")


def test_reasoning_then_calls() -> None:
    parser = AssistantParser(ReasoningSplitter(THINK, opened=True), BY_NAME["hermes"].parser(TOOLS))
    text = 'I <tool_call> think</think>Sure.<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parsed: list[Parsed] = [parser.push(char, None) for char in text]
    assert "".join(p.reasoning for p in parsed) == "I <tool_call> think"
    assert "".join(p.content for p in parsed) == "Sure."
    assert [d.name for p in parsed for d in p.calls if d.name] == ["now"]
    assert [parser.finish_reason(r) for r in ("stop", "length", None)] == ["tool_calls", "length", None]


def test_prompt_that_opens_reasoning_is_noticed() -> None:
    assert THINK.opened("<|im_start|>assistant\n<think>\n")
    assert not THINK.opened("<think>\n\n</think>\n\n")
    assert reasoning_format("auto", "{{ '<think>' }}{{ '</think>' }}") is THINK
    assert reasoning_format("auto", "[THINK][/THINK]") is MISTRAL_THINK
    assert reasoning_format("auto", "nothing") is None
    assert reasoning_format("none", "<think></think>") is None
    assert reasoning_format("mistral", "") is MISTRAL_THINK


@pytest.mark.parametrize("opened", [True, False])
def test_grammar_lets_the_model_think_first(opened: bool) -> None:
    rules = Rules(literal)
    grammar = rules.start(f'{THINK.before(rules, opened=opened)} ("yes" | "no")')
    begin = "" if opened else "<think>"
    assert accepts(grammar, begin + "Is it? <b>\n</think>\n\nyes")
    assert accepts(grammar, "no") is not opened
    assert not accepts(grammar, begin + "Is it?</think>perhaps")
