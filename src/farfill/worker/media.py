"""Images on a worker: prompts rendered for gateways, and what prefill and decode make of a command's images.

Decoding and resizing block for milliseconds to seconds, so they run in threads, before the engine is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from farfill.core.errors import InvalidRequestError
from farfill.engine.media import MediaInputs, MediaItem
from farfill.engine.protocol import Engine
from farfill.wire.control import MediaMessage, RenderCommand, RenderReply
from farfill.worker.http import message_response, read_message


@dataclass(frozen=True, slots=True)
class RenderService:
    """POST /v1/render: a prompt with images, as token ids."""

    engine: Engine

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers with `RenderReply`, or 400 when the model cannot do these images."""
        command = await read_message(request, RenderCommand)
        media = self.engine.media
        if media is None:
            raise _no_images(self.engine)
        rendered = await asyncio.to_thread(
            media.render, command.text, command.images, add_special_tokens=command.add_special_tokens
        )
        return message_response(
            RenderReply(
                token_ids=rendered.token_ids,
                spans=[(item.start_token, item.end_token) for item in rendered.items],
                position_offset=rendered.position_offset,
            )
        )


def media_inputs(
    engine: Engine, token_ids: Sequence[int], media: Sequence[MediaMessage], position_offset: int
) -> MediaInputs | None:
    """The images of a command, not yet decoded; None without any. Raises InvalidRequestError."""
    if not media:
        return None
    if engine.media is None:
        raise _no_images(engine)
    items = [MediaItem(message.start_token, message.end_token, message.data) for message in media]
    return engine.media.inputs(token_ids, items, position_offset)


def _no_images(engine: Engine) -> InvalidRequestError:
    return InvalidRequestError(
        f"{engine.info.model} takes no images on this worker (engine {engine.info.engine})",
        param="messages",
        reason="unsupported_media",
    )
