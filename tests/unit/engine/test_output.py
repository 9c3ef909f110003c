"""Incremental text: whole characters, stop strings across tokens, nothing lost and nothing shown twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from farfill.engine.fake import byte_tokenizer
from farfill.engine.output import OutputText, Vocabulary

TOKENIZER = byte_tokenizer()


def run(text: str, **options: object) -> tuple[list[str], str | None]:
    """Push the bytes of `text` one token at a time until a stop string matches."""
    output = OutputText(TOKENIZER, [65], **options)  # type: ignore[arg-type]
    shown: list[str] = []
    for token in text.encode():
        piece, matched = output.push(token)
        shown.append(piece)
        if matched is not None:
            return shown, matched
    return [*shown, output.finish()], None


@given(st.text(alphabet=st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=30))
def test_all_text_comes_out_once_and_in_whole_characters(text: str) -> None:
    shown, matched = run(text)
    assert "".join(shown) == text
    assert matched is None
    assert all("\ufffd" not in piece for piece in shown)


@given(st.text(alphabet="ab", max_size=25), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_output_ends_before_the_first_complete_stop_string(text: str, stops: list[str]) -> None:
    ends = [
        (end, start, stop)
        for end in range(len(text) + 1)
        for stop in stops
        if (start := end - len(stop)) >= 0 and text[start:end] == stop
    ]
    shown, matched = run(text, stop=stops)
    if not ends:
        assert ("".join(shown), matched) == (text, None)
        return
    first_end = min(ends)[0]
    start = min(s for e, s, _ in ends if e == first_end)
    assert "".join(shown) == text[:start]
    assert matched == text[start:first_end]
    assert "".join(run(text, stop=stops, include_stop=True)[0]) == text[:first_end]


@given(st.text(alphabet="ab", min_size=1, max_size=12), st.integers(1, 6))
def test_what_may_begin_a_stop_string_is_held_back(text: str, length: int) -> None:
    stop = "ab" * length
    output = OutputText(TOKENIZER, [65], stop=[stop])
    shown = ""
    for i, token in enumerate(text.encode()):
        piece, matched = output.push(token)
        shown += piece
        if matched:
            return
        held = text[len(shown) : i + 1]
        assert stop.startswith(held)


def test_text_before_min_tokens_is_not_searched() -> None:
    shown, matched = run("stop and stop", stop=["stop"], min_tokens=4)
    assert ("".join(shown), matched) == ("stop and ", "stop")


def test_half_a_character_at_the_end_is_dropped() -> None:
    output = OutputText(TOKENIZER, [65])
    texts = [output.push(token)[0] for token in "é😀".encode()[:-1]]
    assert "".join(texts) + output.finish() == "é"


def test_stop_string_may_hold_characters_of_several_bytes() -> None:
    shown, matched = run("ja 😀 nein", stop=["😀 n"])
    assert ("".join(shown), matched) == ("ja ", "😀 n")


def test_first_word_keeps_its_space() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"\u2581a": 0, "\u2581b": 1, "<0x41>": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    output = OutputText(tokenizer, [0])
    assert output.push(1)[0] == " b"
    vocabulary = Vocabulary.of(tokenizer, frozenset(), 4)
    assert [vocabulary.token_bytes(i) for i in range(4)] == [b" a", b" b", b"A", b""]


@pytest.mark.parametrize("byte", [0, 10, 32, 65, 127, 173, 200, 255])
def test_byte_level_tokens_spell_their_bytes(byte: int) -> None:
    assert Vocabulary.of(TOKENIZER, frozenset(), 257).token_bytes(byte) == bytes([byte])


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    assert OutputText(TOKENIZER, [65]).push(256)[0] == ""
    assert OutputText(TOKENIZER, [65], skip_special_tokens=False).push(256)[0] == "<eos>"
    assert Vocabulary.of(TOKENIZER, frozenset(), 257).token_bytes(256) == b"<eos>"
