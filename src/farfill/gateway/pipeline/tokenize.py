"""Prompt to token ids, off the event loop where it is long, and the length it leaves for the output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from farfill.core.errors import InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.gateway.openai.sampling import check_token_ids, with_max_tokens
from farfill.gateway.pipeline.prompt import Prompt
from farfill.gateway.template import ChatMessage
from farfill.gateway.tokenizer import INLINE_CHARS, INLINE_TOKENS, LoadedTokenizer, TokenizerPool


async def tokenize_chat(
    pool: TokenizerPool,
    model: LoadedTokenizer,
    messages: Sequence[ChatMessage],
    render: partial[str],
    *,
    add_special_tokens: bool,
    text_below: int = 0,
) -> Prompt:
    """A conversation of text, which `render` renders; `text_below` as in `Prompt.of_text`."""
    # How much tools and calls render to is not known: never on the event loop.
    size = sum(len(m["content"]) for m in messages)
    if render.keywords.get("tools") or any("tool_calls" in m for m in messages):
        size = INLINE_CHARS
    return await pool.run(
        size,
        INLINE_CHARS,
        lambda: Prompt.of_text(model, render(), add_special_tokens=add_special_tokens, text_below=text_below),
    )


async def tokenize_text(
    pool: TokenizerPool, model: LoadedTokenizer, text: str, *, add_special_tokens: bool
) -> list[int]:
    """Token ids of plain text."""
    return await pool.run(len(text), INLINE_CHARS, lambda: model.encode(text, add_special_tokens=add_special_tokens))


async def text_prompt(
    pool: TokenizerPool, model: LoadedTokenizer, text: str, *, add_special_tokens: bool, text_below: int
) -> Prompt:
    """Plain text as a prompt; `text_below` as in `Prompt.of_text`."""
    return await pool.run(
        len(text),
        INLINE_CHARS,
        lambda: Prompt.of_text(model, text, add_special_tokens=add_special_tokens, text_below=text_below),
    )


async def detokenize(
    pool: TokenizerPool, model: LoadedTokenizer, param: str, token_ids: list[int], *, skip_special_tokens: bool = False
) -> str:
    """Text of token ids, which must be in the vocabulary."""
    check_token_ids(param, token_ids, model.vocab_size)
    return await pool.run(
        len(token_ids), INLINE_TOKENS, lambda: model.decode(token_ids, skip_special_tokens=skip_special_tokens)
    )


def ensure_counted(
    prompt: Prompt, sampling: SamplingParams, demanded_tokens: int | None, default_tokens: int | None, context: int
) -> None:
    """Tokenize a prompt of text after all where its bound does not do: the output gets what it leaves of the context,
    or both may not fit."""
    wanted = default_tokens if demanded_tokens is None else demanded_tokens
    if wanted is None or prompt.length + max(wanted, sampling.min_tokens) > context:
        _ = prompt.ids


def fit_context(
    prompt_tokens: int, sampling: SamplingParams, demanded_tokens: int | None, default_tokens: int | None, context: int
) -> SamplingParams:
    """`sampling` with its final max_tokens: as demanded, else the default, else the rest of the context.

    Raises InvalidRequestError saying both lengths when prompt and output cannot fit.
    """
    if prompt_tokens < 1:
        raise InvalidRequestError("the prompt has no tokens", param="prompt")
    room = context - prompt_tokens
    least = max(demanded_tokens or 1, sampling.min_tokens)
    if least > room:
        wanted = f"{least} output tokens were asked for" if demanded_tokens else "at least 1 output token is needed"
        raise InvalidRequestError(
            f"this model's context is {context} tokens; the prompt has {prompt_tokens} and {wanted}",
            param="messages" if default_tokens is None else "prompt",
            reason="context_length_exceeded",
        )
    if demanded_tokens is not None:
        return with_max_tokens(sampling, demanded_tokens)
    return with_max_tokens(sampling, room if default_tokens is None else min(room, max(default_tokens, least)))
