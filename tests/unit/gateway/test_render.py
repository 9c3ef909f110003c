"""What tokens that are no text look like in answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from farfill.gateway.openai.assistant import AssistantParser
from farfill.gateway.openai.chat import ChatRenderer
from farfill.gateway.openai.completions import CompletionRenderer
from farfill.gateway.openai.render import ChoiceResult, Rendering, make_usage
from farfill.wire.control import LogprobMessage, TokensEvent

SMILE = "😀".encode()
PIECES = [b"a", SMILE[:2], SMILE[2:], "é".encode(), b"b"]
EVENT = TokensEvent(
    index=0,
    token_ids=[1, 2, 3, 4, 5],
    text="a😀éb",
    finish_reason="length",
    logprobs=[
        (LogprobMessage(i, -0.5, piece), [LogprobMessage(90, -1.0, SMILE[:1]), LogprobMessage(91, -2.0, SMILE[:3])])
        for i, piece in enumerate(PIECES)
    ],
)


def rendering() -> Rendering:
    return Rendering(
        request_id="r",
        created=1,
        model="m",
        choices_per_prompt=1,
        prompt_token_ids=([1],),
        return_token_ids=False,
        logprobs=True,
        include_usage=False,
    )


def whole(renderer: ChatRenderer | CompletionRenderer) -> Any:
    choice = ChoiceResult(0)
    choice.add(EVENT)
    return json.loads(renderer.whole([choice], make_usage(1, 5, 0)))["choices"][0]


def test_completions_spell_parts_of_characters_as_bytes_and_count_whole_ones() -> None:
    told = whole(CompletionRenderer(rendering()))["logprobs"]
    assert told["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "é", "b"]
    assert told["text_offset"] == [0, 1, 1, 2, 3]
    assert set(told["top_logprobs"][0]) == {"bytes:\\xf0", "bytes:\\xf0\\x9f\\x98", "a"}


def test_streamed_offsets_go_on_from_event_to_event() -> None:
    renderer = CompletionRenderer(rendering())
    offsets: list[int] = []
    for pair in EVENT.logprobs or []:
        data = renderer.chunk(0, TokensEvent(index=0, token_ids=[1], text="", logprobs=[pair]))
        offsets += json.loads(data.removeprefix(b"data: "))["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 2, 3]


def test_chat_spells_them_without_a_prefix_and_gives_the_bytes() -> None:
    told = whole(ChatRenderer(rendering(), AssistantParser))["logprobs"]["content"]
    assert [entry["token"] for entry in told] == ["a", "\\xf0\\x9f", "\\x98\\x80", "é", "b"]
    assert b"".join(bytes(entry["bytes"]) for entry in told).decode() == "a😀éb"


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("model", ["m", "text", 'a "text"', "ü"])
@pytest.mark.parametrize("text", ["word", ' "quoted"\n', "ü😀\u2028", "text"])
def test_event_of_plain_text_is_what_the_general_way_makes_of_it(model: str, text: str, include_usage: bool) -> None:
    plain = msgspec.structs.replace(rendering(), model=model, include_usage=include_usage, logprobs=False)
    event = TokensEvent(index=1, token_ids=[7], text=text)
    chat, completion = ChatRenderer(plain, AssistantParser), CompletionRenderer(plain)
    usage = {"usage": None} if include_usage else {}
    told = {"id": "chatcmpl-r", "object": "chat.completion.chunk", "created": 1, "model": model}
    choice = {"index": 1, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    for _ in range(2):
        assert _event(chat.chunk(1, event)) == {**told, "choices": [choice], **usage}
    told |= {"id": "cmpl-r", "object": "text_completion", "system_fingerprint": None}
    choice = {"index": 1, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    assert _event(completion.chunk(1, event)) == {**told, "choices": [choice], **usage}


def test_event_without_text_is_none_and_what_brings_more_is_told() -> None:
    for renderer in (ChatRenderer(rendering(), AssistantParser), CompletionRenderer(rendering())):
        assert renderer.chunk(0, TokensEvent(index=0, token_ids=[7], text="")) == b""
        last = TokensEvent(index=0, token_ids=[7], text="", finish_reason="stop", stop_reason="end")
        choice = _event(renderer.chunk(0, last))["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "end")


def _event(data: bytes) -> Any:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    return json.loads(data[6:])
