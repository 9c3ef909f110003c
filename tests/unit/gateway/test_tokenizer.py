from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from farfill.core.errors import ConfigError, InvalidRequestError
from farfill.gateway.tokenizer import INLINE_CHARS, LoadedTokenizer, TokenizerPool, load_tokenizer
from support.tiny_tokenizer import BOS_ID, write_model_folder


def chat_ids(model: LoadedTokenizer) -> list[int]:
    """A chat of one message as tokens."""
    return model.encode(model.chat_text([{"role": "user", "content": "x"}]), add_special_tokens=False)


def test_text_round_trips_and_special_tokens_are_optional(tmp_path: Path) -> None:
    model = load_tokenizer(write_model_folder(tmp_path, context_tokens=64))
    ids = model.encode("né 日", add_special_tokens=True)
    assert ids[0] == BOS_ID
    assert model.decode(ids[1:]) == "né 日"
    assert model.encode("né 日", add_special_tokens=False) == ids[1:]
    assert model.decode(ids, skip_special_tokens=True) == "né 日"
    assert (model.context_tokens, model.vocab_size) == (64, 260)


def test_long_prompts_are_never_cut_even_if_the_file_asks_for_it(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(tokenizer))
    assert len(load_tokenizer(tmp_path).encode("x" * 100, add_special_tokens=False)) == 100


def test_short_and_long_texts_are_tokenized_alike(tmp_path: Path) -> None:
    model = load_tokenizer(write_model_folder(tmp_path))
    text = "né 日 x" * INLINE_CHARS
    short = text[:100]
    assert model.encode(text, add_special_tokens=True)[:50] == model.encode(short, add_special_tokens=True)[:50]


def test_template_in_tokenizer_config_is_found_and_the_file_wins(tmp_path: Path) -> None:
    write_model_folder(tmp_path, chat_template=None)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    named = [{"name": "default", "template": "{{ bos_token }}D"}, {"name": "tool_use", "template": "T"}]
    path.write_text(json.dumps({**settings, "chat_template": named}))
    assert chat_ids(load_tokenizer(tmp_path))[0] == BOS_ID
    (tmp_path / "chat_template.jinja").write_text("F")
    model = load_tokenizer(tmp_path)
    assert model.decode(chat_ids(model)) == "F"


def test_model_without_template_refuses_chat(tmp_path: Path) -> None:
    model = load_tokenizer(write_model_folder(tmp_path, chat_template=None))
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        chat_ids(model)


def test_multimodal_config_keeps_its_lengths_in_text_config(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 99, "vocab_size": 1000}}')
    model = load_tokenizer(tmp_path)
    assert (model.context_tokens, model.vocab_size) == (99, 1000)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("config.json", "{}", "max_position_embeddings"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", None, "cannot read"),
        ("tokenizer.json", "{}", "cannot load"),
        ("tokenizer.json", None, "cannot load"),
    ],
)
def test_broken_folder_is_a_config_error(tmp_path: Path, name: str, content: str | None, match: str) -> None:
    write_model_folder(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=match):
        load_tokenizer(tmp_path)


async def test_only_large_work_leaves_the_event_loop_thread() -> None:
    pool = TokenizerPool()
    try:
        assert await pool.run(1, 10, threading.get_ident) == threading.get_ident()
        assert await pool.run(10, 10, threading.get_ident) != threading.get_ident()
    finally:
        pool.close()
