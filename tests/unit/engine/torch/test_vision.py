"""Vision-language models: images prefilled here, in chunks that cut them; decoded elsewhere, without any image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from farfill.core.errors import EngineError, InvalidRequestError
from farfill.engine.media import MediaItem, RenderedPrompt, open_image
from farfill.engine.torch.layout import new_cache
from farfill.kv.manifest import build_manifest
from support.decode_side import DecodeSide, chunk_frames, greedy, load
from support.vision_models import PLACEHOLDERS, TOKENS, image_file, save_model

CHUNK = 16
STEPS = 64
BATCH_STEPS = 24
IMAGES = (image_file(1), image_file(2, (64, 80), "JPEG"))
MROPE = ("qwen2_5_vl", "qwen3_5")


@pytest.fixture(scope="module")
def decode_side() -> Iterator[DecodeSide]:
    with DecodeSide() as side:
        yield side


@pytest.fixture(scope="module", params=list(TOKENS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(name)
    save_model(name, path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load(folder, CHUNK)


@pytest.fixture(scope="module")
def media(loaded: Any) -> Any:
    return loaded.media


@pytest.fixture(scope="module")
def prompt(name: str, media: Any) -> RenderedPrompt:
    place = PLACEHOLDERS[name]
    text = f"user: Here {place} is one, and {place} another. Which one?\nassistant: "
    return media.render(text, list(IMAGES), add_special_tokens=False)


def prefilled(loaded: Any, media: Any, prompt: RenderedPrompt, room: int, chunk: int = CHUNK) -> Any:
    """KV of all but the last token."""
    tokens = prompt.token_ids[:-1]
    kv = loaded.executor.allocate(len(tokens) + room)
    kv.media = media.inputs(prompt.token_ids, prompt.items, prompt.position_offset) if prompt.items else None
    for start in range(0, len(tokens), chunk):
        loaded.executor.prefill(kv, tokens[start : start + chunk])
    return kv


def bytes_of(loaded: Any, kv: Any) -> bytes:
    pieces = build_manifest(loaded.info.layout, kv.tokens).pieces
    return b"".join(kv.read(piece.tensor, piece.start_token, piece.end_token) for piece in pieces)


def whole_inputs(name: str, media: Any, prompt: RenderedPrompt) -> dict[str, Any]:
    """What transformers' own forward wants for a prompt with all its images."""
    ids = torch.tensor([prompt.token_ids])
    made = [media._pixels(open_image(item.data)) for item in prompt.items]
    axis = 1 if name == "smolvlm" else 0
    pixels = {key: torch.cat([image[key] for image in made], dim=axis) for key in made[0]}
    kinds = (ids == media._vision.image_token_id).long()
    if name in MROPE:
        pixels["mm_token_type_ids"] = kinds
    if name == "gemma3":
        pixels["token_type_ids"] = kinds
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}


def plain_output(folder: Path, inputs: dict[str, Any]) -> list[int]:
    """What transformers' own generate says, with its own cache and one prefill."""
    net = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    net.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = net.generate(**inputs, max_new_tokens=STEPS, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def test_decode_in_another_process_gives_the_same_logits(
    name: str, loaded: Any, media: Any, prompt: RenderedPrompt, folder: Path, decode_side: DecodeSide
) -> None:
    kv = prefilled(loaded, media, prompt, STEPS)
    assert any(item.start_token // CHUNK != (item.end_token - 1) // CHUNK for item in prompt.items), "no image is cut"
    content, last, tokens = chunk_frames(loaded.info.layout, kv), prompt.token_ids[-1], kv.tokens
    here, logits = greedy(loaded.executor, [(kv, last)], STEPS)
    there = decode_side.decode(folder, CHUNK, tokens, content, last, STEPS, prompt.position_offset)
    assert there == {"fingerprint": loaded.info.fingerprint, "tokens": here[0], "logits": logits}
    assert len(set(here[0])) > 5, "output that hardly varies proves little"
    assert here[0] == plain_output(folder, whole_inputs(name, media, prompt))
    if name in MROPE:
        assert prompt.position_offset < 0
        without = decode_side.decode(folder, CHUNK, tokens, content, last, STEPS, 0)
        assert without["tokens"] != here[0]


@pytest.mark.parametrize("chunk", [7, 1, 1000])
def test_chunks_that_cut_images_leave_the_kv_of_one_pass(
    chunk: int, loaded: Any, media: Any, prompt: RenderedPrompt
) -> None:
    whole, parts = (prefilled(loaded, media, prompt, 1, size) for size in (CHUNK, chunk))
    for index in range(len(loaded.info.layout.tensors)):
        start, end = loaded.info.layout.kept_span(index, whole.tokens)
        if loaded.info.layout.tensors[index].kind.grows:
            start = 0
        a, b = (torch.frombuffer(bytearray(kv.read(index, start, end)), dtype=torch.float32) for kv in (whole, parts))
        assert float((a - b).norm() / a.norm()) < 1e-4, loaded.info.layout.tensors[index]


def test_images_change_the_output_and_text_beside_them_does_not(
    name: str, loaded: Any, media: Any, prompt: RenderedPrompt
) -> None:
    generator = torch.Generator().manual_seed(5)
    text = RenderedPrompt(torch.randint(1, 256, (21,), generator=generator).tolist(), (), 0)
    swapped = RenderedPrompt(
        prompt.token_ids,
        tuple(MediaItem(i.start_token, i.end_token, image_file(7, (96, 64))) for i in prompt.items[:1])
        + prompt.items[1:],
        prompt.position_offset,
    )
    prompts = [prompt, text, swapped]
    rows = [(prefilled(loaded, media, one, BATCH_STEPS + 1), one.token_ids[-1]) for one in prompts]
    alone = [greedy(loaded.executor, [(kv.fork(), token)], BATCH_STEPS)[0][0] for kv, token in rows]
    together, _ = greedy(loaded.executor, rows, BATCH_STEPS)
    assert together == alone
    first, _, other = loaded.executor.decode([(kv, 65) for kv, _ in rows])
    assert float(abs(first - other).max()) > 1e-2


def test_a_text_prompt_is_what_the_text_model_makes_of_it(loaded: Any, folder: Path) -> None:
    tokens = list(range(1, 30))
    net = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = net(input_ids=torch.tensor([tokens]), use_cache=True, cache=new_cache(net)).logits[0, -1]
    kv = prefilled(loaded, None, RenderedPrompt(tokens, (), 0), 1)
    found = torch.from_numpy(loaded.executor.decode([(kv, tokens[-1])])[0])
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_items_that_are_not_where_the_placeholders_are_are_refused(media: Any, prompt: RenderedPrompt) -> None:
    first = prompt.items[0]

    def refused(items: Sequence[MediaItem], tokens: Sequence[int] = tuple(prompt.token_ids)) -> None:
        with pytest.raises(InvalidRequestError):
            media.inputs(tokens, items, prompt.position_offset)

    refused([MediaItem(first.start_token - 1, first.end_token, first.data)])
    refused([MediaItem(first.start_token, first.end_token + 1, first.data)])
    refused([MediaItem(0, 3, first.data)])
    refused([MediaItem(first.start_token, len(prompt.token_ids) + 5, first.data)])
    refused([first], prompt.token_ids[: first.end_token])


def test_an_image_with_other_embeddings_than_places_fails_alone(
    loaded: Any, media: Any, prompt: RenderedPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loaded.vision.features
    with monkeypatch.context() as patch:
        patch.setattr(loaded.vision, "features", lambda pixels: real(pixels)[1:])
        with pytest.raises(EngineError, match="embeddings"):
            prefilled(loaded, media, prompt, 1)


def test_pixels_are_let_go_of_when_the_prompt_is_done_and_made_again_when_it_is_set_back(
    loaded: Any, media: Any, prompt: RenderedPrompt
) -> None:
    kv = prefilled(loaded, media, prompt, 4)
    assert kv.media._pixels is None
    assert kv.media._features == {}
    again = loaded.executor.allocate(kv.tokens + 4)
    again.media = kv.media
    for start in range(0, kv.tokens, CHUNK):
        loaded.executor.prefill(again, prompt.token_ids[start : min(start + CHUNK, kv.tokens)])
    assert bytes_of(loaded, again) == bytes_of(loaded, kv)


def test_another_position_offset_than_the_images_have_is_refused(name: str, media: Any, prompt: RenderedPrompt) -> None:
    inputs = media.inputs(prompt.token_ids, prompt.items, prompt.position_offset + 1)
    with pytest.raises(InvalidRequestError, match="position_offset"):
        inputs.prepare()


def test_text_with_a_placeholder_of_its_own_is_refused(name: str, loaded: Any) -> None:
    place = PLACEHOLDERS[name]
    with pytest.raises(InvalidRequestError) as caught:
        loaded.media.render(f"{place} and {place}", [IMAGES[0]], add_special_tokens=False)
    assert caught.value.reason == "media_placeholder"


def test_what_decode_needs_of_media_is_an_offset(loaded: Any) -> None:
    kv = loaded.executor.allocate(4)
    kv.media = SimpleNamespace(position_offset=-3)
    kv.tokens = 2
    assert kv.next_position == -1
    assert kv.fork().next_position == -1
