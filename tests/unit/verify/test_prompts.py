"""Cases from the corpus and from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from farfill.verify.client import GatewayClient
from farfill.verify.corpus import Corpus
from farfill.verify.prompts import (
    PromptFileError,
    SamplingMode,
    corpus_cases,
    file_cases,
    load_corpus,
    read_prompt_file,
)


def test_corpus_cases_cover_every_length_in_both_modes_with_other_text_each_time() -> None:
    corpus = Corpus((), tuple(range(5_000)))
    cases = list(corpus_cases(corpus, [16, 300], repeat=2, max_tokens=8, context_tokens=1_000))
    assert [(len(case.token_ids), case.mode) for case in cases] == [
        (16, SamplingMode.GREEDY),
        (16, SamplingMode.SEEDED),
        (300, SamplingMode.GREEDY),
        (300, SamplingMode.SEEDED),
    ] * 2
    assert len({case.token_ids[:16] for case in cases}) == 4
    assert len({case.seed for case in cases}) == 4
    assert not any(case.skip for case in cases)


def test_corpus_cases_longer_than_the_context_are_skipped_with_the_reason() -> None:
    corpus = Corpus((), tuple(range(100)))
    fits, too_long = (
        next(corpus_cases(corpus, [length], repeat=1, max_tokens=64, context_tokens=364)) for length in (300, 301)
    )
    assert fits.skip == ""
    assert "301 + 64" in too_long.skip
    assert "364" in too_long.skip


def test_read_prompt_file_names_every_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "hello"}\n\n{"prompt": 5}\nnot json\n{"prompt": "a", "token_ids": [1]}\n'
        '{"token_ids": []}\n{"prompt": "a", "max_tokens": 0}\n{"prompt": "a", "tokens": 3}\n'
    )
    with pytest.raises(PromptFileError) as caught:
        read_prompt_file(path)
    for number in (3, 4, 5, 6, 7, 8):
        assert f"{path}:{number}: " in str(caught.value)
    assert f"{path}:1:" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_read_prompt_file_that_is_absent_or_empty_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl"):
        read_prompt_file(path)


async def test_file_cases_tokenize_text_and_take_token_ids_as_they_are(client: GatewayClient, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc", "max_tokens": 3}\n{"token_ids": [9, 8]}\n{"token_ids": [9]}\n')
    cases = await file_cases(client, path, max_tokens=64, context_tokens=512)
    greedy = [case for case in cases if case.mode is SamplingMode.GREEDY]
    assert [(case.source, len(case.token_ids), case.max_tokens) for case in greedy] == [
        ("prompts.jsonl:1", 4, 3),
        ("prompts.jsonl:2", 2, 64),
        ("prompts.jsonl:3", 1, 64),
    ]
    assert greedy[1].token_ids == (9, 8)
    assert [bool(case.skip) for case in greedy] == [False, False, True]


@pytest.mark.parametrize("token_id", [-1, 97, 10**9])
async def test_file_cases_with_a_token_id_out_of_range_name_the_line(
    client: GatewayClient, tmp_path: Path, token_id: int
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"token_ids": [9, 96]}}\n{{"token_ids": [9, {token_id}]}}\n')
    with pytest.raises(PromptFileError, match=r"prompts\.jsonl:2: .*ids are from 0 to 96"):
        await file_cases(client, path, max_tokens=64, context_tokens=512)


async def test_load_corpus_finds_the_leading_special_token(client: GatewayClient) -> None:
    corpus = await load_corpus(client)
    assert corpus.specials == (1,)
    assert len(corpus.token_ids) > 20_000
