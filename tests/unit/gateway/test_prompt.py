"""A prompt stays text while its bound does; its ids come when somebody asks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from farfill.gateway.pipeline.prompt import Prompt
from farfill.gateway.tokenizer import LoadedTokenizer, load_tokenizer
from support.tiny_tokenizer import BOS_ID, write_model_folder

TEXT = "a short text, höchstens"


@pytest.fixture
def model(tmp_path: Path) -> LoadedTokenizer:
    return load_tokenizer(write_model_folder(tmp_path))


def test_text_is_tokenized_when_asked_for_and_once(model: LoadedTokenizer):
    prompt = Prompt.of_text(model, TEXT, add_special_tokens=True, text_below=100)
    assert (prompt.text, prompt.counted) == (TEXT, False)
    assert prompt.length == len(TEXT.encode()) + 1  # a token for the beginning
    assert prompt.ids == [BOS_ID, *model.encode(TEXT, add_special_tokens=False)]
    assert prompt.ids is prompt.ids
    assert (prompt.counted, prompt.length) == (True, len(prompt.ids))


@pytest.mark.parametrize(("text", "below"), [(TEXT, 0), (TEXT, len(TEXT.encode())), ("", 100)])
def test_what_may_be_too_long_is_tokenized_at_once(model: LoadedTokenizer, text: str, below: int):
    prompt = Prompt.of_text(model, text, add_special_tokens=False, text_below=below)
    assert (prompt.counted, prompt.text, prompt.length) == (True, "", len(text.encode()))


def test_without_a_bound_nothing_stays_text(model: LoadedTokenizer):
    unknown = dataclasses.replace(model, growth=None)
    assert Prompt.of_text(unknown, TEXT, add_special_tokens=False, text_below=10**6).counted


def test_lone_surrogates_have_a_bound(model: LoadedTokenizer):
    assert model.most_tokens("\ud800", add_special_tokens=True) is not None


@pytest.mark.parametrize(
    ("normalizer", "growth"), [(None, 1), (normalizers.NFC(), 3), (normalizers.NFKC(), 11), (normalizers.NFD(), None)]
)
def test_bound_allows_for_the_normalizer(tmp_path: Path, normalizer: normalizers.Normalizer | None, growth: int | None):
    folder = write_model_folder(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizer  # pyright: ignore[reportAttributeAccessIssue] -- None takes it away
    tokenizer.save(str(folder / "tokenizer.json"))
    model = load_tokenizer(folder)
    assert model.growth == growth
    for text in ("\ufdfa" * 5, "\u0958\u0390", "plain"):  # those that grow most
        bound = model.most_tokens(text, add_special_tokens=True)
        assert bound is None or bound >= len(model.encode(text, add_special_tokens=True))


def test_blank_that_a_pre_tokenizer_adds_is_allowed_for(tmp_path: Path):
    folder = write_model_folder(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert isinstance(tokenizer.model, models.BPE)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    model = load_tokenizer(folder)
    assert model.most_tokens("x", add_special_tokens=True) == len(model.encode("x", add_special_tokens=True))
