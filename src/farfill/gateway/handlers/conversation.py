"""From a request body to what the model gets and how its answer is read: prompt, constraints, parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from farfill.config.model import ModelConfig
from farfill.core.errors import FarfillError, InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.gateway.media import ImageRef
from farfill.gateway.openai.assistant import NewParser
from farfill.gateway.openai.constrain import GUIDED_FIELDS, OutputGrammar, check, output_grammar
from farfill.gateway.openai.dialect import Dialect, dialect_of
from farfill.gateway.openai.messages import template_messages
from farfill.gateway.openai.requests import ChatBody, CompletionBody, SamplingFields, TokenizeBody
from farfill.gateway.openai.sampling import chat_sampling, check_bad_words, completion_sampling
from farfill.gateway.openai.tools import ToolRequest, tool_request
from farfill.gateway.pipeline.media import PromptRenderer, PromptTokens
from farfill.gateway.pipeline.tokenize import tokenize_chat
from farfill.gateway.tokenizer import LoadedTokenizer, TokenizerPool

_PROMPT_END_TOKENS = 16
_asked_output = attrgetter("response_format", "structured_outputs", *GUIDED_FIELDS)
_NOTHING_ASKED = (None,) * (2 + len(GUIDED_FIELDS))


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A chat request, understood. `sampling` has all but the final length limit."""

    prompt: PromptTokens
    sampling: SamplingParams
    demanded_tokens: int | None
    new_parser: NewParser


class Conversations:
    """What this server's model can do of the chat API."""

    def __init__(
        self, pool: TokenizerPool, model: LoadedTokenizer, config: ModelConfig, renderer: PromptRenderer
    ) -> None:
        self._pool = pool
        self._renderer = renderer
        self._model = model
        self._dialect = _dialect(model, config)

    async def chat(self, body: ChatBody, text_below: int = 0) -> Conversation:
        """Tokenize and prepare a chat; `text_below` as in `Prompt.of_text`. Raises InvalidRequestError naming the
        field."""
        sampling, demanded_tokens = chat_sampling(body, self._model.vocab_size)
        request = tool_request(body.tools, body.tool_choice, body.parallel_tool_calls)
        if request is not None:
            self._dialect.require_tools(request)
        output = await self._output(body)
        prompt = await self._tokenize(body, request, text_below)
        reasoning = self._dialect.reasoning
        opened = reasoning is not None and reasoning.opened(self._model.decode(prompt.prompt.ids[-_PROMPT_END_TOKENS:]))
        grammar = ""
        if request is not None or output is not None:
            grammar = await self._in_thread(lambda: self._dialect.grammar(request, output, opened=opened))
        sampling = await self._with_words(sampling, body)
        skips = sampling.skip_special_tokens and not self._dialect.shows_markers(request)
        if grammar or skips != sampling.skip_special_tokens:
            sampling = replace(sampling, grammar=grammar, skip_special_tokens=skips)
        return Conversation(
            prompt=prompt,
            sampling=sampling,
            demanded_tokens=demanded_tokens,
            new_parser=lambda: self._dialect.parser(request, opened=opened),
        )

    async def prompt_of(self, body: TokenizeBody) -> list[int]:
        """Token ids of a body's messages, as a chat would have them."""
        request = tool_request(body.tools, None, None)
        if request is not None:
            self._dialect.require_tools(request)
        return (await self._tokenize(body, request)).prompt.ids

    async def completion_sampling(self, body: CompletionBody) -> tuple[SamplingParams, int | None]:
        """Sampling of a text completion and its demanded length. Raises InvalidRequestError naming the field."""
        sampling, demanded_tokens = completion_sampling(body, self._model.vocab_size)
        output = await self._output(body)
        if output is not None:
            await self._in_thread(lambda: check(output.param, output.alone))
            sampling = replace(sampling, grammar=output.alone)
        return await self._with_words(sampling, body), demanded_tokens

    async def _tokenize(
        self, body: ChatBody | TokenizeBody, request: ToolRequest | None, text_below: int = 0
    ) -> PromptTokens:
        try:
            return await self._rendered(body, request, text_below)
        except FarfillError as error:
            self._renderer.refused(error)
            raise

    async def _rendered(
        self, body: ChatBody | TokenizeBody, request: ToolRequest | None, text_below: int
    ) -> PromptTokens:
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if isinstance(body, ChatBody) and body.reasoning_effort is not None:
            self._require_switch("reasoning_effort")
            variables["reasoning_effort"] = body.reasoning_effort
        images: list[ImageRef] = []
        messages = template_messages(body.messages or [], images if self._model.takes_images else None)
        render = partial(
            self._model.chat_text,
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            tools=None if request is None else request.shown,
            variables=variables,
        )
        special = bool(body.add_special_tokens)
        if images:
            return await self._renderer.render(await self._in_thread(render), images, add_special_tokens=special)
        return PromptTokens(
            await tokenize_chat(
                self._pool, self._model, messages, render, add_special_tokens=special, text_below=text_below
            )
        )

    async def _output(self, body: SamplingFields) -> OutputGrammar | None:
        if _asked_output(body) == _NOTHING_ASKED:
            return None
        return await self._in_thread(lambda: output_grammar(body))

    async def _with_words(self, sampling: SamplingParams, body: SamplingFields) -> SamplingParams:
        if not body.bad_words:
            return sampling
        words = check_bad_words(body.bad_words)
        banned = await self._in_thread(lambda: _banned(self._model, words))
        return replace(sampling, bad_words=banned)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await self._pool.run(1, 0, work)

    def _require_switch(self, name: str) -> None:
        template = self._model.chat_template
        if template is not None and name not in template.variables:
            raise InvalidRequestError(f"this model's chat template knows no {name}", param=name, reason="unsupported")


def _dialect(model: LoadedTokenizer, config: ModelConfig) -> Dialect:
    added: Mapping[int, Any] = model.tokenizer.get_added_tokens_decoder()
    template = model.chat_template
    return dialect_of(
        template="" if template is None else template.source,
        takes_tools=template is not None and "tools" in template.variables,
        tokens={token.content: token_id for token_id, token in added.items()},
        hidden=frozenset(token.content for token in added.values() if token.special),
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )


def _banned(model: LoadedTokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, at the start of a text and after a space, as vLLM does."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(model.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(model.encode(" " + word.lstrip(), add_special_tokens=False))
        found[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[spaced] = None
    return tuple(found)
