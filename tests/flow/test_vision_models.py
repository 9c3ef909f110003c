"""Prompts with images through both workers: rendered, prefilled far away, decoded near without a look at any image."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from farfill.engine.limits import EngineLimits
from farfill.engine.local import LocalEngine
from farfill.wire.control import FailTransferCommand, MediaMessage, RenderCommand, RenderReply
from support.decode_side import load
from support.transfer_harness import FINGERPRINT
from support.vision_models import PLACEHOLDERS, image_file, save_model
from support.worker_harness import CHUNK, DECODE, RefusedError, TwoWorkers

MAX_TOKENS = 16


class VisionWorkers(TwoWorkers):
    """Two workers that run the model in `model`; `looks` counts what each one's vision tower was shown."""

    def _engine(self, name: str, **options: Any) -> Any:
        loaded = load(options["model"], CHUNK)
        self.looks = getattr(self, "looks", {})
        self.looks[name] = 0
        real = loaded.vision.features

        def features(pixels: Any) -> Any:
            self.looks[name] += 1
            return real(pixels)

        loaded.vision.features = features
        info = replace(loaded.info, fingerprint=FINGERPRINT, kv_total_bytes=1 << 26)
        limits = EngineLimits(max_batch=8, max_queue=16, prefix_cache_bytes=1 << 24)
        return LocalEngine(info, loaded.executor, loaded.vocabulary, limits, media=loaded.media)

    async def render(self, text: str, *images: bytes) -> tuple[list[int], dict[str, Any]]:
        """Token ids, and what commands have besides."""
        command = RenderCommand(text=text, images=list(images))
        async with self._post(DECODE, "/v1/render", command) as response:
            reply = msgspec.msgpack.decode(await response.read(), type=RenderReply)
        media = [MediaMessage(*span, data) for span, data in zip(reply.spans, images, strict=True)]
        return reply.token_ids, {"media": media, "position_offset": reply.position_offset, "timeout_s": 20.0}

    async def far(self, prompt: list[int], more: dict[str, Any]) -> tuple[Any, Any]:
        ticket = self.ticket(prompt)
        return await asyncio.gather(
            self.prefill(prompt, ticket, **more), self.decode(prompt, ticket, max_tokens=MAX_TOKENS, **more)
        )


@contextlib.asynccontextmanager
async def workers(name: str, folder: Path) -> AsyncIterator[VisionWorkers]:
    torch.set_num_threads(1)
    save_model(name, folder / "model")
    async with VisionWorkers.running(folder, far_fingerprint=FINGERPRINT, model=folder / "model") as two:
        assert isinstance(two, VisionWorkers)
        yield two


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
async def test_far_prefill_of_images_gives_the_tokens_of_local_prefill(tmp_path: Path, name: str) -> None:
    async with workers(name, tmp_path) as two:
        text = f"user: A text before. {PLACEHOLDERS[name]} What do you see there?\nassistant: "
        prompt, more = await two.render(text, image_file(1))
        start = more["media"][0].start_token
        assert start > CHUNK

        report, answer = await two.far(prompt, more)
        assert answer.start.prefilled_at == "remote"
        assert (report.cached_tokens, report.computed_tokens) == (0, len(prompt) - 1)
        assert two.looks == {"prefill-far": 1, "decode-near": 0}

        again, same = await two.far(prompt, more)
        assert again.cached_tokens == (len(prompt) - 1) // CHUNK * CHUNK
        assert same.tokens == answer.tokens
        assert two.looks["prefill-far"] == 1

        other_prompt, other = await two.render(text, image_file(2))
        assert other_prompt == prompt
        report, _ = await two.far(other_prompt, other)
        assert report.cached_tokens == start // CHUNK * CHUNK
        assert two.looks == {"prefill-far": 2, "decode-near": 0}

        alone = await two.decode(prompt, max_tokens=MAX_TOKENS, cache_salt="of its own", **more)
        assert alone.start.prefilled_at == "local"
        assert alone.tokens == answer.tokens
        assert two.looks["decode-near"] == 1


async def test_a_failed_transfer_of_a_prompt_with_images_is_prefilled_near(tmp_path: Path) -> None:
    async with workers("qwen2_5_vl", tmp_path) as two:
        prompt, more = await two.render(f"user: {PLACEHOLDERS['qwen2_5_vl']} What?\n", image_file(1))
        expected = await two.decode(prompt, max_tokens=MAX_TOKENS, cache_salt="of its own", **more)
        ticket = two.ticket(prompt)
        waiting = asyncio.create_task(two.decode(prompt, ticket, max_tokens=MAX_TOKENS, **more))
        await two.fail(ticket.transfer_id, FailTransferCommand(reason="prefill_lost", detail="gone"))
        answer = await waiting
        assert (answer.start.prefilled_at, answer.start.fallback) == ("local", "prefill_lost")
        assert answer.tokens == expected.tokens


async def test_wrong_offsets_and_broken_files_are_the_requests_fault(tmp_path: Path) -> None:
    async with workers("qwen2_5_vl", tmp_path) as two:
        prompt, more = await two.render(f"user: {PLACEHOLDERS['qwen2_5_vl']} What?\n", image_file(1))
        broken = [MediaMessage(m.start_token, m.end_token, m.data[:60]) for m in more["media"]]
        for change in ({"position_offset": 3}, {"media": broken}, {"media": [MediaMessage(0, 4, image_file(1))]}):
            with pytest.raises(RefusedError) as caught:
                await two.decode(prompt, max_tokens=2, **{**more, **change})
            assert caught.value.status == 400
        with pytest.raises(RefusedError) as caught:
            await two.render("no placeholder", image_file(1))
        assert (caught.value.status, caught.value.body.reason) == (400, "media_placeholder")


async def test_a_worker_without_vision_refuses_images(tmp_path: Path) -> None:
    async with TwoWorkers.running(tmp_path) as two:
        with pytest.raises(RefusedError) as caught:
            async with two._post(DECODE, "/v1/render", RenderCommand(text="<image>", images=[image_file(1)])):
                pass
        assert (caught.value.status, caught.value.body.reason) == (400, "unsupported_media")
        with pytest.raises(RefusedError) as caught:
            await two.decode(two.prompt(20), media=[MediaMessage(0, 1, image_file(1))])
        assert (caught.value.status, caught.value.body.reason) == (400, "unsupported_media")
