"""Prompts with images on vLLM: rendered by its processor, prefilled far, decoded near without a look at any image."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from tests.system.cluster import Cluster, local_plan, running
from tests.vllm_engine import torchvision_for_cpu
from tests.vllm_engine.calls import GREEDY, Choice, Pieces, Tokens, fill
from tests.vllm_engine.conftest import IMAGE_MODELS, START_DEADLINE_S, Fleet, Pair

from farfill.core.errors import InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.engine.media import MediaItem
from farfill.engine.protocol import GenerateWork, PrefillStats, PrefillWork
from farfill.engine.vllm.engine import VllmEngine
from farfill.kv.hashing import prefix_keys
from support.vision_models import PLACEHOLDERS, image_file

# A transfer that breaks is not continued; a prefix must be longer than a window and a block to be found.
WINDOWS = frozenset({"gemma3_vl"})
# Every image has as many tokens.
ONE_SIZE = frozenset({"gemma3_vl"})
# vLLM's blocks have 128 tokens: images begin in the second one.
BEFORE = "A text before, longer than a block of the cache. " * 4


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    items: tuple[MediaItem, ...]

    def generate(self, engine: VllmEngine, salt: str, sampling: SamplingParams = GREEDY) -> GenerateWork:
        assert engine.media is not None
        inputs = engine.media.inputs(self.token_ids, self.items, 0)
        return GenerateWork(
            request_id="g",
            prompt=self.token_ids,
            cache_salt=salt,
            sampling=sampling,
            media=inputs.material,
            media_inputs=inputs,
        )

    def prefill(self, engine: VllmEngine, salt: str) -> PrefillWork:
        work = self.generate(engine, salt)
        return PrefillWork(
            request_id="p", prompt=work.prompt, cache_salt=salt, media=work.media, media_inputs=work.media_inputs
        )


def prompt_of(engine: VllmEngine, text: str, *images: bytes) -> Prompt:
    assert engine.media is not None
    rendered = engine.media.render(text, images, add_special_tokens=False)
    return Prompt(tuple(rendered.token_ids), rendered.items)


def local(
    engine: VllmEngine, prompt: Prompt, salt: str, sampling: SamplingParams = GREEDY
) -> tuple[list[Choice], PrefillStats]:
    sink = Tokens(sampling.n)
    engine.generate(prompt.generate(engine, salt, sampling), sink)
    choices = sink.wait()
    assert sink.stats is not None
    return choices, sink.stats


def far(pair: Pair, prompt: Prompt, salt: str, *, below_chunk: int | None = None) -> tuple[list[int], PrefillStats]:
    """Tokens, and what the far side computed. `below_chunk`: no more of its KV arrives."""
    pieces = Pieces()
    handle = pair.prefill.prefill(prompt.prefill(pair.prefill, salt), pieces)
    pieces.wait()
    assert pieces.error is None
    assert pieces.stats is not None
    work = prompt.generate(pair.decode, salt)
    slot = pair.decode.reserve(work)
    fill(slot, pieces, below_chunk=below_chunk)
    pieces.pieces.clear()
    handle.release()
    valid = len(prompt.token_ids) - 1
    if below_chunk is not None:
        valid = below_chunk * slot.manifest.layout.prefill_chunk_tokens
    sink = Tokens()
    pair.decode.generate(work, sink, slot=slot, valid_tokens=valid)
    choices = sink.wait()
    assert sink.stats is not None
    assert sink.stats.kv_problem == ""
    assert sink.stats.computed_tokens == len(prompt.token_ids) - 1 - valid
    return choices[0].token_ids, pieces.stats


def placeholder(name: str) -> str:
    return PLACEHOLDERS[{"gemma3_vl": "gemma3"}.get(name, name)]


def text_of(name: str, images: int = 1, after: str = "What do you see there?") -> str:
    return f"user: {BEFORE}{f'{placeholder(name)} and ' * images}{after}\nassistant: "


@pytest.mark.parametrize("pair", IMAGE_MODELS, indirect=True)
def test_far_prefill_of_images_gives_the_tokens_of_one_vllm(pair: Pair) -> None:
    long = "And a long text after it, so that it takes several steps. " * 12
    cases = [
        (text_of(pair.name), [image_file(1)]),
        (text_of(pair.name, 2), [image_file(1), image_file(2, (64, 96))]),
        (text_of(pair.name, 3, long), [image_file(3), image_file(1), image_file(3)]),
        (placeholder(pair.name) + ".", [image_file(4)]),
    ]
    for number, (text, images) in enumerate(cases):
        prompt = prompt_of(pair.decode, text, *images)
        assert prompt_of(pair.prefill, text, *images) == prompt
        expected, stats = local(pair.decode, prompt, "near")
        assert stats.cached_tokens + stats.computed_tokens == len(prompt.token_ids) - 1
        assert len(set(expected[0].token_ids)) > 2
        tokens, _ = far(pair, prompt, f"far {number}")
        assert tokens == expected[0].token_ids


@pytest.mark.parametrize("pair", IMAGE_MODELS, indirect=True)
def test_other_images_share_no_kv_and_say_something_else(pair: Pair) -> None:
    text = text_of(pair.name, after="words after it " * 20)
    prompts = [prompt_of(pair.decode, text, image_file(seed)) for seed in (11, 12)]
    assert prompts[0].token_ids == prompts[1].token_ids
    start = prompts[0].items[0].start_token
    works = [prompt.generate(pair.decode, "") for prompt in prompts]
    chunk = pair.decode.info.layout.prefill_chunk_tokens
    keys = [prefix_keys(work.prompt, chunk, "", work.media) for work in works]
    assert keys[0] != keys[1]

    block = 128
    shared, whole = start // block * block, (len(prompts[0].token_ids) - 1) // block * block
    assert shared < whole
    sure: list[float] = []
    for turn, prompt in enumerate(prompts):
        tokens, stats = far(pair, prompt, "both")
        # The same text with another image: at most what comes before the image. Windows want more of it than there is.
        if turn and pair.name not in WINDOWS:
            assert stats.cached_tokens == shared
        assert stats.cached_tokens <= shared * turn
        again, more = far(pair, prompt, "both")
        assert shared < more.cached_tokens <= whole
        assert again == tokens
        alone, _ = local(pair.decode, prompt, f"alone {turn}", replace(GREEDY, logprobs=1))
        assert alone[0].token_ids == tokens
        sure += [chosen.logprob for chosen, _ in alone[0].logprobs]
    assert sure[: len(sure) // 2] != pytest.approx(sure[len(sure) // 2 :], abs=1e-3)


@pytest.mark.parametrize("pair", [name for name in IMAGE_MODELS if name not in WINDOWS], indirect=True)
def test_a_broken_transfer_is_continued_with_the_images(pair: Pair) -> None:
    prompt = prompt_of(pair.decode, text_of(pair.name, 2, "words after " * 30), image_file(5), image_file(6))
    assert len(prompt.token_ids) > pair.decode.info.layout.prefill_chunk_tokens + 1
    expected, _ = local(pair.decode, prompt, "alone")
    assert far(pair, prompt, "broken", below_chunk=1)[0] == expected[0].token_ids


@pytest.mark.parametrize("pair", IMAGE_MODELS, indirect=True)
def test_seeds_and_choices_work_with_images(pair: Pair) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=2, ignore_eos=True)
    prompt = prompt_of(pair.decode, text_of(pair.name, 1, "words after " * 30), image_file(7))
    once, _ = local(pair.decode, prompt, "seed", sampling)
    again, _ = local(pair.decode, prompt, "seed", sampling)
    assert [choice.token_ids for choice in once] == [choice.token_ids for choice in again]


@pytest.mark.parametrize("pair", IMAGE_MODELS, indirect=True)
def test_what_does_not_fit_together_is_refused_and_vllm_lives_on(pair: Pair) -> None:
    engine, text = pair.decode, text_of(pair.name)
    assert engine.media is not None
    for wrong in (("no placeholder", (image_file(1),)), (text, ()), (text, (image_file(1), image_file(2)))):
        with pytest.raises(InvalidRequestError) as caught:
            engine.media.render(*wrong, add_special_tokens=False)
        assert caught.value.reason == "media_placeholder"
    with pytest.raises(InvalidRequestError) as caught:
        engine.media.render(text, (image_file(1)[:60],), add_special_tokens=False)
    assert caught.value.reason == "media_refused"

    prompt = prompt_of(engine, text, image_file(1))
    (item,) = prompt.items
    with pytest.raises(InvalidRequestError):
        engine.media.inputs(prompt.token_ids, [MediaItem(0, len(prompt.token_ids), item.data)], 0)
    wrong_items = [
        MediaItem(item.start_token, item.end_token, item.data[:60]),
        MediaItem(item.start_token, item.end_token - 1, item.data),
    ]
    if pair.name not in ONE_SIZE:
        wrong_items.append(MediaItem(item.start_token, item.end_token, image_file(1, (32, 32))))
    for one in wrong_items:
        sink = Tokens()
        engine.generate(Prompt(prompt.token_ids, (one,)).generate(engine, "wrong"), sink)
        with pytest.raises(InvalidRequestError):
            sink.wait()
    local(engine, prompt, "wrong")


@pytest.fixture(scope="module")
def cluster(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A model with images on vLLM behind a gateway; prompts from 256 tokens on go far."""
    fleet.drop()
    overrides: dict[str, Any] = {
        "engine": {"type": "vllm", "vllm_args": ["--enforce-eager"], "kv_cache_mb": 256},
        "registry": {"lease_s": 5.0},
    }
    plan = local_plan(fleet.model("qwen2_5_vl"), "tiny", chunk_tokens=256, timeout_ms=20_000, overrides=overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(torchvision_for_cpu.FOLDER), prepend=os.pathsep)
        with running(plan, tmp_path_factory.mktemp("cluster"), start_deadline_s=START_DEADLINE_S) as cluster:
            yield cluster


def test_chats_with_images_go_far_through_the_gateway(cluster: Cluster) -> None:
    def ask(seed: int, placement: str, *, words: int = 60, **options: Any) -> tuple[Any, Any]:
        url = f"data:image/png;base64,{base64.b64encode(image_file(seed)).decode()}"
        parts = [
            {"type": "text", "text": "word " * words},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is it?"},
        ]
        raw = client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": parts}],  # type: ignore[list-item]
            max_tokens=12,
            temperature=0,
            logprobs=True,
            extra_body={"ignore_eos": True, "cache_salt": options.pop("salt", placement)},
            extra_headers={"x-farfill-force-placement": placement} if placement != "auto" else {},
            **options,
        )
        return raw.headers, raw.parse()

    def text_of_answer(answer: Any) -> list[tuple[str, float]]:
        return [(token.token, round(token.logprob, 3)) for token in answer.choices[0].logprobs.content]

    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        headers, far = ask(1, "auto")
        assert headers["x-farfill-placement"] == "remote"
        assert "x-farfill-fallback" not in headers
        headers, near = ask(1, "local")
        assert headers["x-farfill-placement"] == "local"
        assert near.usage.prompt_tokens == far.usage.prompt_tokens > 256
        assert near.usage.prompt_tokens_details.cached_tokens == 0
        assert text_of_answer(far) == text_of_answer(near)

        _, again = ask(1, "local")
        assert again.usage.prompt_tokens_details.cached_tokens == 256
        assert text_of_answer(again) == text_of_answer(near)
        _, other = ask(2, "local")
        # Up to the image, which begins in the third block of 128 tokens.
        assert other.usage.prompt_tokens_details.cached_tokens == 256
        assert text_of_answer(other) != text_of_answer(near)

        _, early = ask(1, "local", words=3, salt="early")
        assert early.usage.prompt_tokens_details.cached_tokens == 0
