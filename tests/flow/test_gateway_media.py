"""Images through the gateway: what reaches workers, and what is refused, with OpenAI's client and stub workers."""

from __future__ import annotations

import base64
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from aiohttp import web
from openai import BadRequestError

from farfill.gateway.media import is_public
from support.gateway_harness import Harness, running_gateway
from support.vision_models import image_file

# Drops contents that are no lists of parts, as SmolVLM's does.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% for part in m['content'] %}{% if part['type'] == 'text' %}"
    "{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}\n{% endfor %}"
)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def question(*urls: str, text: str = "What is this?") -> list[Any]:
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(
        tmp_path,
        chat_template=TEMPLATE,
        vision=True,
        gateway={"site": "near", "media_max_images": 2, "media_max_mb": 1, "media_max_megapixels": 1},
    ) as harness:
        yield harness


async def ask(harness: Harness, messages: list[Any]) -> Any:
    return await harness.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=3)


async def refused(harness: Harness, messages: list[Any], reason: str) -> str:
    with pytest.raises(BadRequestError) as caught:
        await ask(harness, messages)
    assert caught.value.code == reason
    assert harness.decode.decodes == []
    return str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_an_image_reaches_decode_and_prefill_with_its_place(gateway: Harness, kind: str) -> None:
    image = image_file(1, kind=kind)
    answer = await ask(gateway, question(data_url(image), text="A long question. " * 3))
    render, command = gateway.decode.renders[0], gateway.decode.decodes[0]
    assert render.text == "user:<image>" + "A long question. " * 3
    assert answer.usage.prompt_tokens == len(command.token_ids)
    assert [(m.start_token, m.end_token, m.data) for m in command.media] == [(5, 13, image)]
    assert command.position_offset == -5
    far = gateway.prefill.prefills[0]
    assert (far.token_ids, far.media, far.position_offset) == (command.token_ids, command.media, -5)
    assert gateway.observer.media == [("data", len(image))]


async def test_image_tokens_count_for_the_threshold(gateway: Harness) -> None:
    await ask(gateway, question(data_url(image_file(1)), text="Hi?"))
    assert gateway.prefill.prefills == []
    await ask(gateway, question(data_url(image_file(1)), data_url(image_file(2)), text="Hi there, what is it?"))
    assert len(gateway.prefill.prefills) == 1


async def test_the_same_text_with_another_image_is_another_prefix(gateway: Harness) -> None:
    keys: list[Any] = []
    real = gateway.service.dispatcher.placer.place

    def place(query: Any, *args: Any, **kwargs: Any) -> Any:
        keys.append(tuple(query.keys))
        return real(query, *args, **kwargs)

    object.__setattr__(gateway.service.dispatcher.placer, "place", place)
    for seed in (1, 1, 2):
        await ask(gateway, question(data_url(image_file(seed)), text="What do you see here?"))
    assert keys[0] == keys[1] != keys[2]
    assert keys[0]


async def test_text_still_goes_to_a_template_that_wants_parts(gateway: Harness) -> None:
    await ask(gateway, [{"role": "user", "content": "plain"}])
    assert gateway.service.deps.model.decode(gateway.decode.decodes[0].token_ids) == "user:plain"
    assert gateway.decode.renders == []


async def test_tokenize_counts_image_tokens(gateway: Harness) -> None:
    status, body, _ = await gateway.post(
        "/tokenize", {"model": "tiny", "messages": question(data_url(image_file(1)), text="x")}
    )
    assert (status, body["count"]) == (200, len("user:") + 8 + len("x"))


async def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as harness:
        assert "text only" in await refused(harness, question(data_url(image_file(1))), "unsupported_media")
        assert harness.observer.media_refusals == ["unsupported_media"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}},
        {"type": "file", "file": {"file_id": "x"}},
    ],
)
async def test_other_media_are_refused(gateway: Harness, part: dict[str, Any]) -> None:
    await refused(gateway, [{"role": "user", "content": [part]}], "unsupported_media")


async def test_what_is_no_image_is_refused(gateway: Harness) -> None:
    await refused(gateway, question(data_url(b"<svg></svg>", "image/svg+xml")), "unsupported_media")
    await refused(gateway, question("data:text/html;base64,aaaa"), "unsupported_media")
    await refused(gateway, question("data:image/png;base64,a?"), "media_invalid")
    await refused(gateway, question(data_url(image_file(1)[:-200])), "media_invalid")
    await refused(gateway, question(""), "invalid_request")


async def test_too_many_too_heavy_and_too_large_images_are_refused(gateway: Harness) -> None:
    one = data_url(image_file(1))
    assert "media_max_images" in await refused(gateway, question(one, one, one), "media_too_many")
    assert "media_max_mb" in await refused(gateway, question(data_url(b"x" * (1 << 20) + b"x")), "media_too_large")
    assert "pixels" in await refused(gateway, question(data_url(bomb())), "media_too_large")
    assert gateway.observer.media_refusals == ["media_too_many", "media_too_large", "media_too_large"]


def bomb() -> bytes:
    """A PNG of a few bytes that says it has 2.5 billion pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data))

    header = pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


async def test_urls_are_refused_unless_their_host_is_allowed(gateway: Harness) -> None:
    for url in ("https://example.com/a.png", "file:///etc/passwd", "ftp://example.com/a.png", "https://[::1", "//x"):
        message = await refused(gateway, question(url), "media_url_refused")
    assert "image_url.url" in message


@asynccontextmanager
async def image_server(handler: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{name}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"localhost:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_an_image_of_an_allowed_host_is_fetched_once(tmp_path: Path) -> None:
    asked: list[str] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        asked.append(request.match_info["name"])
        name = request.match_info["name"]
        if name == "moved":
            raise web.HTTPFound("/good")
        if name == "gone":
            raise web.HTTPNotFound
        return web.Response(body=image_file(1) if name == "good" else b"x" * (2 << 20))

    async with (
        image_server(serve) as host,
        running_gateway(
            tmp_path,
            vision=True,
            chat_template=TEMPLATE,
            gateway={"site": "near", "media_allowed_hosts": [host], "media_max_mb": 1},
        ) as harness,
    ):
        for path, reason in (
            ("moved", "media_fetch_failed"),
            ("gone", "media_fetch_failed"),
            ("big", "media_too_large"),
        ):
            await refused(harness, question(f"http://{host}/{path}"), reason)
        await refused(harness, question(f"http://user@{host}/good"), "media_url_refused")
        assert asked == ["moved", "gone", "big"]
        await ask(harness, question(f"http://{host}/good"))
        assert harness.decode.decodes[0].media[0].data == image_file(1)
        assert asked[3:] == ["good"]
        assert harness.observer.media == [("url", len(image_file(1)))]


async def test_an_allowed_name_may_not_lead_to_an_address_that_is_not_public(tmp_path: Path) -> None:
    async with running_gateway(
        tmp_path,
        vision=True,
        chat_template=TEMPLATE,
        gateway={"site": "near", "media_allowed_hosts": ["localhost", "10.0.0.1"]},
    ) as harness:
        harness.service.renderer.loader._may_reach = is_public
        await refused(harness, question("http://localhost/a.png"), "media_fetch_failed")
        await refused(harness, question("http://10.0.0.1/a.png"), "media_url_refused")


@pytest.mark.parametrize(
    ("address", "public"),
    [("93.184.215.14", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False), ("::1", False),
     ("169.254.169.254", False), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False), ("224.0.0.1", False),
     ("0.0.0.0", False)],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public
