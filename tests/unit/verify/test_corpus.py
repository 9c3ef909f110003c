"""Prompts of exact lengths."""

from __future__ import annotations

import pytest

from farfill.verify.corpus import Corpus, corpus_of, corpus_text


def test_corpus_of_prose_is_long_enough_for_the_longest_default_prompt() -> None:
    words = corpus_text().split()
    assert len(words) > 5_400  # English takes at least 1.15 tokens a word: more than 6 200 tokens
    assert len(set(words)) > 1_500


@pytest.mark.parametrize("tokens", [1, 2, 16, 100, 101, 350])
def test_prompt_of_any_length_is_exact_even_past_the_end(tokens: int) -> None:
    corpus = Corpus((7,), tuple(range(100, 200)))
    prompt = corpus.prompt_of(tokens, variant=3)
    assert len(prompt) == tokens
    assert prompt[0] == 7
    assert all(100 <= token < 200 for token in prompt[1:])


def test_prompt_of_another_variant_starts_elsewhere() -> None:
    corpus = Corpus((), tuple(range(5_000)))
    assert len({corpus.prompt_of(16, variant)[0] for variant in range(20)}) == 20


def test_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Corpus((), (1,)).prompt_of(0)


def test_corpus_of_keeps_only_specials_in_front() -> None:
    assert corpus_of([1, 5, 6], [5, 6]) == Corpus((1,), (5, 6))
    assert corpus_of([5, 6], [5, 6]) == Corpus((), (5, 6))
    assert corpus_of([5, 6, 2], [5, 6]) == Corpus((), (5, 6))
    with pytest.raises(ValueError, match="no tokens"):
        corpus_of([1], [])
