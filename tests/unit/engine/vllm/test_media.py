"""Prompts with images as gateways and as vLLM want them, rendered by something that answers like vLLM."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from farfill.core.errors import EngineError, InvalidRequestError
from farfill.engine.fake import byte_tokenizer
from farfill.engine.media import MediaItem, RenderedPrompt, material_of
from farfill.engine.vllm.api import Endpoint, VllmApi
from farfill.engine.vllm.media import VllmImages, VllmMedia, check_prompt, placeholder_of, prompt_fields

PLACEHOLDER = 7
PROMPT = (1, 2, 9, 9, 9, 3, 8, 9, 9, 4)
ITEMS = (MediaItem(2, 5, b"one"), MediaItem(7, 9, b"two"))
IMAGES = [b"one", b"two"]


class Server:
    """In vLLM's place: answers with `status` and `answer`."""

    def __init__(self) -> None:
        self.status = 200
        places = [{"offset": item.start_token, "length": item.end_token - item.start_token} for item in ITEMS]
        self.answer: dict[str, Any] = {"token_ids": PROMPT, "features": {"mm_placeholders": {"image": places}}}
        self.asked: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server, app = Server(), web.Application()
    app.router.add_post("/v1/chat/completions/render", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "api.sock")).start()
    yield server
    await runner.cleanup()


@pytest.fixture
async def media(server: Server, tmp_path: Path) -> AsyncIterator[VllmMedia]:
    api = VllmApi(Endpoint(socket=tmp_path / "api.sock"))
    await api.open()
    yield VllmMedia(api, asyncio.get_running_loop(), PLACEHOLDER, "<image>")
    await api.close()


async def render(media: VllmMedia, text: str = "a <image> and <image>") -> RenderedPrompt:
    return await asyncio.to_thread(media.render, text, IMAGES, add_special_tokens=True)


async def test_vllm_says_which_tokens_an_image_has(server: Server, media: VllmMedia) -> None:
    assert await render(media) == RenderedPrompt(list(PROMPT), ITEMS, 0)
    (body,) = server.asked
    text, *images = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "a <image> and <image>"}
    files = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in images]
    assert files == IMAGES
    assert body["add_special_tokens"] is True


async def test_what_vllm_refuses_or_counts_otherwise(server: Server, media: VllmMedia) -> None:
    for text in ("a <image>", "<image> <image> <image>"):
        with pytest.raises(InvalidRequestError) as caught:
            await render(media, text)
        assert caught.value.reason == "media_placeholder"
    assert not server.asked

    server.answer["features"]["mm_placeholders"]["image"].pop()
    with pytest.raises(EngineError, match="1 images in a prompt with 2"):
        await render(media)
    server.status, server.answer = 400, {"error": {"message": "cannot identify image file"}}
    with pytest.raises(InvalidRequestError, match="cannot identify") as caught:
        await render(media)
    assert caught.value.reason == "media_refused"
    server.status = 500
    with pytest.raises(EngineError):
        await render(media)


async def test_a_request_has_one_placeholder_an_image(media: VllmMedia) -> None:
    inputs = media.inputs(PROMPT, ITEMS, 0)
    assert inputs.material == material_of(ITEMS)
    fields = prompt_fields(PROMPT, inputs)
    assert fields["token_ids"] == [1, 2, PLACEHOLDER, 3, 8, PLACEHOLDER, 4]
    assert [base64.b64decode(part["url"].partition(",")[2]) for part in fields["content_parts"]] == IMAGES
    # A prefill leaves out the last token.
    assert prompt_fields(PROMPT[:-1], inputs)["token_ids"] == [1, 2, PLACEHOLDER, 3, 8, PLACEHOLDER]
    assert prompt_fields(PROMPT, None) == {"token_ids": list(PROMPT)}


@pytest.mark.parametrize("spans", [[(2, 2)], [(-1, 3)], [(2, 10)], [(7, 9), (2, 5)], [(2, 6), (5, 9)]])
async def test_images_lie_one_after_the_other_before_the_last_token(
    media: VllmMedia, spans: list[tuple[int, int]]
) -> None:
    with pytest.raises(InvalidRequestError, match="an image at tokens"):
        media.inputs(PROMPT, [MediaItem(start, end, b"") for start, end in spans], 0)


def test_other_tokens_than_the_prompts_are_refused() -> None:
    images = VllmImages(ITEMS, PLACEHOLDER, 0)
    check_prompt({"prompt_token_ids": list(PROMPT)}, PROMPT, images)
    check_prompt({}, PROMPT, None)
    for answer in ({"prompt_token_ids": [*PROMPT, 1]}, {}):
        with pytest.raises(InvalidRequestError) as caught:
            check_prompt(answer, PROMPT, images)
        assert caught.value.reason == "media_refused"


def test_models_whose_placeholder_is_not_known_take_no_images() -> None:
    tokenizer = byte_tokenizer()
    assert placeholder_of({"model_type": "gemma3", "boi_token_index": 65}, tokenizer) == (65, tokenizer.id_to_token(65))
    assert placeholder_of({"model_type": "gemma3", "boi_token_index": 99_999}, tokenizer) is None
    assert placeholder_of({"model_type": "qwen2_5_vl"}, tokenizer) is None
    assert placeholder_of({"model_type": "llama", "image_token_id": 65}, tokenizer) is None
