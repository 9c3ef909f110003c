"""The real `openai` client against a real cluster with a real model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from tests.system.cluster import Cluster
from tests.system.conftest import REAL_MODEL

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(real_cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real_cluster.url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        yield client


def test_models_lists_the_served_one(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [REAL_MODEL]


def test_chat_answers_the_question_and_counts_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=REAL_MODEL, messages=MESSAGES, max_tokens=16, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 10
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_streamed_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=REAL_MODEL, messages=MESSAGES, max_tokens=16, temperature=0)
    pieces: list[str] = []
    usage = finish = None
    with client.chat.completions.create(
        model=REAL_MODEL,
        messages=MESSAGES,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
            finish = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), finish)
            usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 1
    assert finish == whole.choices[0].finish_reason
    assert usage == whole.usage


def test_completions_with_logprobs_stops_at_the_stop_string(client: openai.OpenAI) -> None:
    asked = {"model": REAL_MODEL, "prompt": "One, two, three, four,", "max_tokens": 12, "temperature": 0}
    free = client.completions.create(**asked, logprobs=2)
    logprobs = free.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or ()) == free.choices[0].text
    assert all(-20 < value <= 0 for value in logprobs.token_logprobs or ())
    word = free.choices[0].text.split()[1]
    stopped = client.completions.create(**asked, stop=word)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == free.choices[0].text.partition(word)[0]


def test_completions_seeded_are_reproducible_and_differ_by_choice(client: openai.OpenAI) -> None:
    def sample() -> list[str]:
        answer = client.completions.create(
            model=REAL_MODEL, prompt="Once upon a time", max_tokens=12, temperature=1.0, seed=5, n=2
        )
        return [choice.text for choice in answer.choices]

    first = sample()
    assert first == sample()
    assert first[0] != first[1]


def test_chat_second_time_reports_the_prefix_hit(client: openai.OpenAI) -> None:
    text = "Repeat after me. " * 90  # more than one prefill chunk of 256 tokens, below the threshold of 512
    answers = [
        client.completions.create(
            model=REAL_MODEL, prompt=text, max_tokens=4, temperature=0, extra_body={"cache_salt": "hit"}
        )
        for _ in range(2)
    ]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]  # type: ignore[union-attr]
    assert cached == [0, 256]
    assert answers[0].choices[0].text == answers[1].choices[0].text


def test_prompt_longer_than_the_context_is_refused_with_both_lengths(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=REAL_MODEL, prompt=[5] * 9_000, max_tokens=5)
    assert "8192" in str(caught.value)
    assert "9000" in str(caught.value)
