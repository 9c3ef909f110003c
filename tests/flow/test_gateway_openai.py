"""The OpenAI API as the real `openai` client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from support.gateway_harness import Harness, running_gateway
from support.tiny_tokenizer import BOS_ID

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path) as harness:
        yield harness


async def test_chat_answers_with_usage(gateway: Harness) -> None:
    gateway.decode.cached_tokens = 4
    answer = await gateway.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == "w0 w1 w2 "
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens == len(gateway.decode.decodes[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_chat_streams_role_text_and_usage(gateway: Harness) -> None:
    stream = await gateway.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "w0 w1 w2 "
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_chat_renders_template_and_sampling_reaches_worker(gateway: Harness) -> None:
    await gateway.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        max_tokens=2, temperature=0.5, top_p=0.9, seed=7, stop=["x", "y"], presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={"65": 1}, n=2, user="somebody", metadata={"k": "v"},
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 1, "stop_token_ids": [66],
                    "repetition_penalty": 1.1, "cache_salt": "s", "skip_special_tokens": False},
    )  # fmt: skip
    command = gateway.decode.decodes[0]
    text = gateway.service.deps.model.decode(command.token_ids)
    assert text == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    sampling = command.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids, sampling.n) == (7, ["x", "y"], [66], 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.1, {65: 1.0})
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.skip_special_tokens) == (True, 1, False)
    assert command.cache_salt == "default:s"


async def test_chat_without_limit_may_use_the_rest_of_the_context(gateway: Harness) -> None:
    gateway.decode.texts = ["done"]
    await gateway.openai.chat.completions.create(model="tiny", messages=HELLO)
    command = gateway.decode.decodes[0]
    assert command.sampling.max_tokens == 512 - len(command.token_ids)


async def test_chat_logprobs(gateway: Harness) -> None:
    answer = await gateway.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["w0 ", "w1 "]
    assert logprobs.content[0].bytes == list(b"w0 ")
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["alt0", "alt1"]


async def test_chat_choices_and_token_ids(gateway: Harness) -> None:
    answer = await gateway.openai.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=2, n=2, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.choices[1].token_ids == [65, 66]  # type: ignore[attr-defined]
    assert answer.prompt_token_ids == gateway.decode.decodes[0].token_ids  # type: ignore[attr-defined]


async def test_completion_takes_prompts_in_all_shapes(gateway: Harness) -> None:
    complete = gateway.openai.completions.create
    one = await complete(model="tiny", prompt="ab", max_tokens=1)
    assert one.choices[0].text == "w0 "
    ids = gateway.decode.decodes[0].token_ids
    assert ids[0] == BOS_ID
    await complete(model="tiny", prompt=ids, max_tokens=1)
    assert gateway.decode.decodes[1].token_ids == ids
    many = await complete(model="tiny", prompt=["ab", "cd"], max_tokens=1, n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.usage is not None
    assert many.usage.prompt_tokens == 2 * len(ids)
    lists = await complete(model="tiny", prompt=[ids, [65]], max_tokens=2)
    assert len(lists.choices) == 2
    assert {tuple(c.token_ids) for c in gateway.decode.decodes[-2:]} == {tuple(ids), (65,)}


async def test_completion_stream_of_several_prompts_has_every_choice(gateway: Harness) -> None:
    stream = await gateway.openai.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, n=2, stream=True)
    texts = dict.fromkeys(range(4), "")
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == dict.fromkeys(range(4), "w0 w1 w2 ")


async def test_completion_default_length_logprobs_and_echo(gateway: Harness) -> None:
    answer = await gateway.openai.completions.create(model="tiny", prompt="ab", logprobs=1)
    assert gateway.decode.decodes[0].sampling.max_tokens == 16
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[:2] == ["w0 ", "w1 "]
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[:3] == [0, 3, 6]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"alt0": -0.5, "w0 ": -0.5}
    echoed = await gateway.openai.completions.create(model="tiny", prompt="ab", max_tokens=1, echo=True)
    assert echoed.choices[0].text == "abw0 "


async def test_text_held_back_is_not_sent_as_empty_chunks(gateway: Harness) -> None:
    gateway.decode.texts = ["", "", "all at once"]
    stream = await gateway.openai.completions.create(model="tiny", prompt="ab", max_tokens=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert [c.choices[0].text for c in chunks] == ["all at once"]


async def test_models_and_unknown_model(gateway: Harness) -> None:
    models = [model async for model in gateway.openai.models.list()]
    assert [model.id for model in models] == ["tiny"]
    assert (await gateway.openai.models.retrieve("tiny")).owned_by == "farfill"
    with pytest.raises(openai.NotFoundError) as caught:
        await gateway.openai.chat.completions.create(model="other", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await gateway.openai.models.retrieve("other")


async def test_client_sees_typed_errors(gateway: Harness) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.openai.completions.create(model="tiny", prompt="x" * 600, max_tokens=10)
    assert caught.value.code == "context_length_exceeded"
    assert "512" in caught.value.message
    assert "601" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.openai.chat.completions.create(model="tiny", messages=HELLO, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


async def test_stream_that_breaks_raises_in_the_client(gateway: Harness) -> None:
    gateway.decode.fail_after_events = 3
    gateway.decode.hold_after_first = asyncio.Event()
    stream = await gateway.openai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, stream=True)
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="out of order"):  # noqa: PT012 -- the loop is what raises
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")
            gateway.decode.hold_after_first.set()
    assert "".join(texts).startswith("w0 ")
    assert gateway.observer.finished[-1].outcome == "error"
    assert gateway.observer.finished[-1].error_reason == "engine_error"
