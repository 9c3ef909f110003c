"""A prompt prefilled by one vLLM and continued by another gives the tokens of one vLLM alone, for each kind of KV."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.vllm_engine.calls import GREEDY, far, fill, local, prompt_of, start_local, start_prefill, work_of
from tests.vllm_engine.calls import Tokens as TokenSink
from tests.vllm_engine.conftest import CHUNK_TOKENS, MODELS, Pair

from farfill.core.errors import InvalidRequestError
from farfill.core.layout import TensorKind

every_model = pytest.mark.parametrize("pair", MODELS, indirect=True)
# Qwen3.5 runs in bfloat16 only here.
BFLOAT16_MODEL = "qwen3_5"
and_bfloat16 = pytest.mark.parametrize("pair", [*MODELS, BFLOAT16_MODEL], indirect=True)
in_bfloat16 = pytest.mark.parametrize("pair", [BFLOAT16_MODEL], indirect=True)
# Two steps of a logit between 4 and 8.
BFLOAT16_TIE = 2 * 2**-5
MOST_AT_A_TIE = 6


def _block_tokens(pair: Pair) -> int:
    return max(t.row_tokens for t in pair.decode.info.layout.tensors)


@every_model
def test_far_prefill_gives_the_tokens_of_local_prefill(pair: Pair) -> None:
    block = _block_tokens(pair)
    step = pair.decode.info.layout.prefill_chunk_tokens
    assert step % block == 0 >= CHUNK_TOKENS - step
    lengths = {2, 5, block - 1, block, block + 1, block + 2, 2 * block, step + 1, 2 * step + 70, 1500}
    seen: dict[int, list[int]] = {}
    for length in sorted(lengths):
        prompt = prompt_of(length)
        sink = far(pair.prefill, pair.decode, prompt)
        assert sink.stats is not None
        assert (sink.stats.computed_tokens, sink.stats.cached_tokens) == (0, 0), length
        expected = local(pair.decode, prompt)[0]
        seen[length] = expected.token_ids
        assert sink.choices[0].token_ids == expected.token_ids, f"{length} tokens"
        assert sink.choices[0].text == expected.text
    # Models that say the same whatever they read would prove nothing.
    assert len({tuple(tokens) for tokens in seen.values()}) == len(seen)


@in_bfloat16
def test_bfloat16_goes_on_as_one_vllm_goes_on(pair: Pair) -> None:
    """The prompt is a text and the first token that vLLM itself adds to it: both compute the text by the kernel for
    prompts and this token by the one for single tokens, and round alike.
    """
    seen: set[tuple[int, ...]] = set()
    for length in _bfloat16_lengths(pair):
        text = prompt_of(length - 1)
        whole = local(pair.decode, text, replace(GREEDY, max_tokens=25))[0].token_ids
        sink = far(pair.prefill, pair.decode, (*text, whole[0]))
        assert sink.stats is not None
        assert (sink.stats.computed_tokens, sink.stats.cached_tokens) == (0, 0), length
        assert sink.choices[0].token_ids == whole[1:], f"{length} tokens"
        seen.add(tuple(whole))
    assert len(seen) == len(_bfloat16_lengths(pair))


@in_bfloat16
def test_bfloat16_parts_from_a_prompt_in_one_go_at_ties_only(pair: Pair) -> None:
    """vLLM's kernel for prompts rounds a last token otherwise than the one for single tokens, and so parts from its own
    text. Where several tokens are as likely, to a step or two of bfloat16, each is right.
    """
    parted = 0
    for length in _bfloat16_lengths(pair):
        prompt = prompt_of(length)
        remote = far(pair.prefill, pair.decode, prompt).choices[0].token_ids
        parted += _parts_at_a_tie(pair, prompt, remote)
    assert parted <= len(_bfloat16_lengths(pair)) // 2


@in_bfloat16
def test_a_prompt_of_one_token_is_refused_and_vllm_lives(pair: Pair) -> None:
    """vLLM 0.32 dies of it. The same as a far prefill of two, whose last token decode computes."""
    with pytest.raises(InvalidRequestError, match="at least 2 tokens") as caught:
        start_local(pair.decode, (5,))
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequestError, match="at least 3 tokens"):
        start_prefill(pair.prefill, (5, 6))
    seeded = replace(GREEDY, temperature=1.0, seed=4)
    for sampling in (GREEDY, seeded):
        assert len(local(pair.decode, (5, 6), sampling)[0].token_ids) == 24
        assert len(far(pair.prefill, pair.decode, (5, 6, 7), sampling).choices[0].token_ids) == 24


def _parts_at_a_tie(pair: Pair, prompt: tuple[int, ...], found: list[int]) -> bool:
    """Whether `found` is not what one vLLM says after `prompt`; fails where it parts from that at no tie."""
    near = local(pair.decode, prompt, replace(GREEDY, logprobs=MOST_AT_A_TIE))[0]
    at = next((i for i, both in enumerate(zip(near.token_ids, found, strict=True)) if both[0] != both[1]), None)
    if at is None:
        return False
    _, best = near.logprobs[at]
    alike = {one.token_id for one in best if best[0].logprob - one.logprob <= BFLOAT16_TIE}
    assert found[at] in alike, f"{len(prompt)} tokens, at {at}"
    return True


def _bfloat16_lengths(pair: Pair) -> list[int]:
    block, step = _block_tokens(pair), pair.decode.info.layout.prefill_chunk_tokens
    return [5, 17, 64, 65, 66, 128, block - 1, block, block + 1, block + 2, 2 * block + 1, 2 * step + 70, 900, 1500]


@and_bfloat16
def test_other_kv_gives_other_tokens(pair: Pair) -> None:
    prompt, other = prompt_of(700), prompt_of(700, seed=4)
    handle, pieces = start_prefill(pair.prefill, other)
    pieces.wait()
    slot = pair.decode.reserve(work_of(prompt, "wrong"))
    fill(slot, pieces)
    pieces.pieces.clear()
    handle.release()
    sink = TokenSink()
    pair.decode.generate(work_of(prompt, "wrong"), sink, slot=slot, valid_tokens=699)
    assert sink.wait()[0].token_ids != local(pair.decode, prompt)[0].token_ids


@every_model
def test_sixteen_at_a_time_three_rounds(pair: Pair) -> None:
    lengths = [5, 64, 127, 128, 129, 200, 255, 257, 300, 384, 385, 500, 640, 769, 1000, 1500]
    sampling = replace(GREEDY, max_tokens=12)
    expected = {length: local(pair.decode, prompt_of(length), sampling)[0].token_ids for length in lengths}
    with ThreadPoolExecutor(16) as threads:
        for turn in range(3):
            found = threads.map(
                lambda length, turn=turn: far(
                    pair.prefill, pair.decode, prompt_of(length), sampling, salt=f"turn{turn}"
                ),
                lengths,
            )
            for length, sink in zip(lengths, found, strict=True):
                assert sink.choices[0].token_ids == expected[length], f"round {turn}, {length} tokens"


@and_bfloat16
def test_a_prefix_that_vllm_has_itself_and_the_rest_from_far(pair: Pair) -> None:
    """Where vLLM caches prefixes, it uses its own blocks and takes the rest from the file."""
    prompt = prompt_of(900)
    first = far(pair.prefill, pair.decode, prompt, salt="twice")
    second = far(pair.prefill, pair.decode, prompt, salt="twice")
    longer = far(pair.prefill, pair.decode, prompt + prompt_of(300), salt="twice")
    assert second.choices[0].token_ids == first.choices[0].token_ids
    # vLLM cuts its own prompt elsewhere, and so rounds otherwise where it computes in bfloat16.
    parted = _parts_at_a_tie(pair, prompt + prompt_of(300), longer.choices[0].token_ids)
    assert not parted or pair.name == BFLOAT16_MODEL


def test_part_of_a_transfer_is_continued_from(pair: Pair) -> None:
    prompt = prompt_of(900)
    handle, pieces = start_prefill(pair.prefill, prompt)
    pieces.wait()
    slot = pair.decode.reserve(work_of(prompt, "part"))
    fill(slot, pieces, below_chunk=2)
    pieces.pieces.clear()
    handle.release()
    sink = TokenSink()
    valid = 2 * pair.decode.info.layout.prefill_chunk_tokens
    pair.decode.generate(work_of(prompt, "part"), sink, slot=slot, valid_tokens=valid)
    assert sink.wait()[0].token_ids == local(pair.decode, prompt)[0].token_ids
    assert sink.stats is not None
    assert sink.stats.computed_tokens == 899 - valid


def test_kv_streams_while_prefill_runs(pair: Pair) -> None:
    handle, pieces = start_prefill(pair.prefill, prompt_of(1500), salt="streams")
    try:
        pieces.wait()
        assert pieces.times == 6  # steps of 256 tokens
        assert set(pieces.pieces) == set(range(len(handle.manifest.pieces)))
    finally:
        pieces.pieces.clear()
        handle.release()


@pytest.mark.parametrize("pair", ["gemma3"], indirect=True)
def test_of_sliding_layers_only_the_window_travels(pair: Pair) -> None:
    layout = pair.decode.info.layout
    handle, pieces = start_prefill(pair.prefill, prompt_of(1500))
    pieces.wait()
    sent = sum(len(data) for data in pieces.pieces.values())
    pieces.pieces.clear()
    handle.release()
    # What the next token looks at, in whole blocks: all 1499 tokens, or the last 127 of them.
    windows = [t for t in layout.tensors if t.kind is TensorKind.WINDOW]
    full = [t for t in layout.tensors if t.kind is TensorKind.FULL]
    assert (len(windows), len(full)) == (5, 1)
    needed = sum(t.row_bytes * -(-1499 // t.row_tokens) for t in full)
    needed += sum(t.row_bytes * (-(-1499 // t.row_tokens) - (1499 - 127) // t.row_tokens) for t in windows)
    assert sent <= 1.05 * needed
