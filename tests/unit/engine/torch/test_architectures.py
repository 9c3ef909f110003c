"""Every architecture: prefilled in chunks here, decoded in another process and in a batch, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from farfill.core.errors import ModelUnsupportedError
from farfill.engine.executor import Capabilities
from support.architectures import ARCHITECTURES, REFUSED, make_config, save_model
from support.decode_side import DecodeSide, chunk_frames, greedy, load

CHUNK = 16
# More than two windows, and an odd number of tokens in the last chunk.
LENGTHS = (75, 41, 7)
STEPS = 64
BATCH_STEPS = 24


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (length,), generator=generator).tolist()


def prefilled(executor: Any, tokens: list[int], room: int) -> Any:
    kv = executor.allocate(len(tokens) + room)
    for start in range(0, len(tokens), CHUNK):
        executor.prefill(kv, tokens[start : start + CHUNK])
    return kv


@pytest.fixture(scope="module")
def decode_side() -> Iterator[DecodeSide]:
    with DecodeSide() as side:
        yield side


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(architecture)
    save_model(architecture, path)
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load(folder, CHUNK)


def test_the_check_finds_what_the_architecture_can_do(architecture: str, loaded: Any) -> None:
    expected = Capabilities(chunked_prefill=True, merged_decode=ARCHITECTURES[architecture].merged_decode)
    assert loaded.executor.capabilities == expected


def test_decode_in_another_process_gives_the_same_logits(loaded: Any, folder: Path, decode_side: DecodeSide) -> None:
    *tokens, last = prompt(LENGTHS[0], seed=3)
    kv = prefilled(loaded.executor, tokens, STEPS)
    content = chunk_frames(loaded.info.layout, kv)
    here, logits = greedy(loaded.executor, [(kv, last)], STEPS)
    there = decode_side.decode(folder, CHUNK, len(tokens), content, last, STEPS)
    assert there == {"fingerprint": loaded.info.fingerprint, "tokens": here[0], "logits": logits}
    assert len(set(here[0])) > 5, "output that hardly varies proves little"
    assert here[0] == plain_output(folder, [*tokens, last])


def plain_output(folder: Path, tokens: list[int]) -> list[int]:
    """What transformers' own generate says, with its own cache and one prefill."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    net.generation_config.eos_token_id = None
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        out = net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, do_sample=False)
    return out[0, len(tokens) :].tolist()


def test_sequences_of_other_lengths_in_the_batch_change_nothing(loaded: Any) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    sequences = [prefilled(loaded.executor, tokens[:-1], BATCH_STEPS) for tokens in prompts]
    rows = [(kv, tokens[-1]) for kv, tokens in zip(sequences, prompts, strict=True)]
    alone = [greedy(loaded.executor, [(kv.fork(), token)], BATCH_STEPS)[0][0] for kv, token in rows]
    together, _ = greedy(loaded.executor, rows, BATCH_STEPS)
    assert together == alone


def test_a_failed_step_leaves_no_trace(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = loaded.executor
    rows = [(prefilled(executor, prompt(length, 9), 8), 65) for length in LENGTHS]
    expected, logits = greedy(executor, [(kv.fork(), token) for kv, token in rows], 4)
    lengths = [kv.tokens for kv, _ in rows]
    real, left = executor._next_logits, len(rows)

    def fail(*args: Any) -> Any:
        nonlocal left
        result = real(*args)
        left -= len(args[0])
        if left <= 0:
            raise RuntimeError("out of memory")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(executor, "_next_logits", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            executor.decode(rows)
    for (kv, _), tokens in zip(rows, lengths, strict=True):
        kv.truncate(tokens)
        assert kv.tokens == tokens
    assert greedy(executor, rows, 4) == (expected, logits)


def test_every_architecture_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    assert not [name for name in (*ARCHITECTURES, *REFUSED) if f"`{name}`" not in page]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from farfill.engine.torch import layout

    net = AutoModelForCausalLM.from_config(make_config(name)).eval()
    with pytest.raises(ModelUnsupportedError, match=f"model_type {name}"):
        layout.derive_shape(net, CHUNK)
    monkeypatch.setattr(layout, "_REFUSED", {})
    with pytest.raises(ModelUnsupportedError, match=r"state on its modules|cannot move"):
        layout.derive_shape(net, CHUNK)
