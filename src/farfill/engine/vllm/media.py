"""Images for vLLM: its own processor renders prompts and makes the pixels, so that both sides of a transfer agree.

A rendered prompt has the tokens of each image in it, as gateways and prefix keys want them. vLLM takes prompts the
other way, with one placeholder an image and the image files, and fills in those tokens itself: `VllmImages` goes back
to that form. What vLLM made of it comes back with the answer and is compared. vLLM counts an image's digest into its
block hashes, numbers M-RoPE positions from the images, and leaves the vision tower alone where the KV is there.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from farfill.core.errors import EngineError, InvalidRequestError
from farfill.engine.media import MediaInputs, MediaItem, RenderedPrompt, material_of
from farfill.engine.vllm.api import VllmApi
from farfill.kv.hashing import KeyMaterial

RENDER_S = 60.0
# The text comes as the gateway rendered it, placeholders included.
_TEXT_ONLY = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
# By model type, the name in its config of the token that stands for one image in a prompt's text.
_PLACEHOLDERS = {
    "gemma3": "boi_token_index",
    "qwen2_5_vl": "image_token_id",
    "qwen2_vl": "image_token_id",
    "qwen3_5": "image_token_id",
    "qwen3_vl": "image_token_id",
}


def placeholder_of(config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, str] | None:
    """The token that stands for an image in prompts of this model, and its text; None: images are not supported."""
    name = _PLACEHOLDERS.get(str(config.get("model_type")))
    token = None if name is None else config.get(name)
    text = None if token is None else tokenizer.id_to_token(int(token))
    return None if token is None or text is None else (int(token), text)


class VllmMedia:
    """Implements `MediaProcessor`. `placeholder` as token and as text; `api` lives on `loop`."""

    def __init__(self, api: VllmApi, loop: asyncio.AbstractEventLoop, placeholder: int, text: str) -> None:
        self._api = api
        self._loop = loop
        self._placeholder = placeholder
        self._text = text

    def render(self, text: str, images: Sequence[bytes], *, add_special_tokens: bool) -> RenderedPrompt:
        """See `MediaProcessor.render`. Positions are vLLM's own affair: the offset is 0."""
        found = text.count(self._text)
        if found != len(images):
            raise InvalidRequestError(
                f"the prompt has {found} times {self._text!r} for {len(images)} images; text may not contain it, and"
                " the model's chat template must write it for each image",
                param="messages",
                reason="media_placeholder",
            )
        asked = asyncio.run_coroutine_threadsafe(render(self._api, text, images, add_special_tokens), self._loop)
        try:
            answer = asked.result(RENDER_S)
        except TimeoutError as error:
            asked.cancel()
            raise EngineError(f"vLLM did not render a prompt with images within {RENDER_S:g} s") from error
        token_ids = [int(token) for token in answer["token_ids"]]
        places = ((answer.get("features") or {}).get("mm_placeholders") or {}).get("image") or []
        if len(places) != len(images):
            raise EngineError(f"vLLM found {len(places)} images in a prompt with {len(images)}")
        items = tuple(
            MediaItem(place["offset"], place["offset"] + place["length"], data)
            for place, data in zip(places, images, strict=True)
        )
        return RenderedPrompt(token_ids, items, 0)

    def inputs(self, prompt: Sequence[int], items: Sequence[MediaItem], position_offset: int) -> MediaInputs:
        """See `MediaProcessor.inputs`."""
        at = 0
        for item in items:
            if not at <= item.start_token < item.end_token < len(prompt):
                raise InvalidRequestError(
                    f"an image at tokens [{item.start_token}, {item.end_token}) of a prompt of {len(prompt)}: images"
                    " come one after the other and end before the last token",
                    param="media",
                )
            at = item.end_token
        return VllmImages(tuple(items), self._placeholder, position_offset)


@dataclass(frozen=True, slots=True)
class VllmImages:
    """Implements `MediaInputs`: the images of one prompt, as vLLM takes them."""

    items: tuple[MediaItem, ...]
    placeholder: int
    position_offset: int

    @property
    def material(self) -> tuple[KeyMaterial, ...]:
        """What prefix keys need to know."""
        return material_of(self.items)

    def prepare(self) -> None:
        """vLLM decodes and resizes."""

    def fields(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Of a request for `prompt`, which holds all images: its tokens before vLLM fills in those of the images."""
        short: list[int] = []
        at = 0
        for item in self.items:
            short += [*prompt[at : item.start_token], self.placeholder]
            at = item.end_token
        parts = [{"type": "image_url", "url": _url(item.data)} for item in self.items]
        return {"token_ids": [*short, *prompt[at:]], "content_parts": parts, "return_token_ids": True}


def prompt_fields(prompt: Sequence[int], media: MediaInputs | None) -> dict[str, Any]:
    """What a request to vLLM says of its prompt."""
    return media.fields(prompt) if isinstance(media, VllmImages) else {"token_ids": list(prompt)}


def check_prompt(answer: Mapping[str, Any], prompt: Sequence[int], media: MediaInputs | None) -> None:
    """Raise InvalidRequestError unless the answer's prompt is `prompt`. Without images nobody asks."""
    if media is not None and answer.get("prompt_token_ids") != list(prompt):
        raise InvalidRequestError(
            "the prompt's tokens are not what vLLM makes of these images: another worker rendered them otherwise",
            param="media",
            reason="media_refused",
        )


async def render(api: VllmApi, text: str, images: Sequence[bytes], add_special_tokens: bool) -> dict[str, Any]:
    """What vLLM makes of a prompt with images: its tokens, and which of them are whose. Raises what `VllmApi` does."""
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    content += [{"type": "image_url", "image_url": {"url": _url(data)}} for data in images]
    body = {
        "messages": [{"role": "user", "content": content}],
        "chat_template": _TEXT_ONLY,
        "add_generation_prompt": False,
        "add_special_tokens": add_special_tokens,
        "mm_payload": "none",
        "max_tokens": 1,
    }
    try:
        return await api.render(body)
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), param="messages", reason="media_refused") from error


def _url(data: bytes) -> str:
    """vLLM goes by what is in the file, whatever its type is called."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
