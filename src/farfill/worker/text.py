"""Prompts that come as text: short ones, which the gateway leaves to whoever computes them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from farfill.core.errors import InvalidRequestError
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import Engine
from farfill.wire.control import MAX_TEXT_BYTES, DecodeCommand


@runtime_checkable
class KnowsText(Protocol):
    """An `Engine` that has its model's tokenizer."""

    @property
    def vocabulary(self) -> Vocabulary: ...


def takes_text(engine: Engine) -> bool:
    """Whether commands may bring text instead of token ids."""
    return isinstance(engine, KnowsText)


def prompt_ids(engine: Engine, command: DecodeCommand) -> list[int]:
    """Token ids of the command's prompt. Raises InvalidRequestError for text too long, or with ids or images."""
    if not command.text:
        return command.token_ids
    if command.token_ids or command.media or not isinstance(engine, KnowsText):
        raise InvalidRequestError(
            "text is for engines with a tokenizer, and comes without token ids and images", param="text"
        )
    if len(command.text) > MAX_TEXT_BYTES:
        raise InvalidRequestError(f"text of over {MAX_TEXT_BYTES} bytes comes as token ids", param="text")
    tokenizer = engine.vocabulary.tokenizer
    return tokenizer.encode(command.text, add_special_tokens=command.add_special_tokens).ids
