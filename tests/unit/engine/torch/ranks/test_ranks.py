"""Models over real ranks: the tokens of one rank, and KV exchanged between numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from farfill.config.model import ModelConfig
from farfill.engine.torch import loader
from farfill.engine.torch.ranks.engine import load_model
from farfill.engine.torch.ranks.plan import KNOWN
from farfill.engine.torch.ranks.processes import Ranks
from farfill.kv.manifest import build_manifest
from support.architectures import save_model

CHUNK = 16
LENGTHS = (75, 41, 7)
STEPS = 64
FEW_STEPS = 16
TIMEOUT_S = 60.0

# What is kept of attention: heads of each rank, a head on two of four ranks, all on every rank, latents.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Vectors of the processor divide each rank's part, or an activation's last bit depends on its place in a batch.
    "llama": ("llama", {"intermediate_size": 128}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "whole attention": (
        "llama",
        {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "attention_bias": True},
    ),
    "experts that do not divide": ("qwen3_moe", {"num_experts": 6, "num_key_value_heads": 4}),
    # Windows cut by heads, and whole beside sinks; states beside heads, beside latents, beside convolutions.
    "gemma2": ("gemma2", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gemma3": ("gemma3", {}),
    "cohere2": ("cohere2", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5", {}),
    "kimi_linear": ("kimi_linear", {}),
    "bailing_hybrid": ("bailing_hybrid", {}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "nemotron_h": ("nemotron_h", {}),
    "lfm2_moe": ("lfm2_moe", {}),
    "minimax": ("minimax", {}),
    "jamba": ("jamba", {}),
}
MAIN = ("llama", "qwen3_moe", "deepseek_v3")
# The first ones over both numbers of ranks, the others over one.
SIZES = {name: (2, 4) if index < 6 else ((2, 4)[index % 2],) for index, name in enumerate(MODELS)}
# By size, so that ranks are started once for all models of one.
CASES = [(name, size) for size in (2, 4) for name, sizes in SIZES.items() if size in sizes]


@dataclass(frozen=True)
class Answers:
    """What one model said in one place."""

    tokens: list[list[int]]
    logits: npt.NDArray[np.float32]
    kv: list[bytes]


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (length,), generator=generator).tolist()


def prefilled(executor: Any, tokens: Sequence[int], room: int, layer_done: Callable[[int], None] | None = None) -> Any:
    kv = executor.allocate(len(tokens) + room)
    for start in range(0, len(tokens), CHUNK):
        executor.prefill(kv, tokens[start : start + CHUNK], layer_done)
    return kv


def decoded(executor: Any, kvs: Sequence[Any], firsts: Sequence[int], steps: int) -> tuple[list[list[int]], Any]:
    """Greedy tokens of each sequence, decoded together, and the first logits."""
    outputs: list[list[int]] = [[] for _ in kvs]
    current, first_logits = list(firsts), None
    for _ in range(steps):
        logits = executor.decode(list(zip(kvs, current, strict=True)))
        first_logits = logits if first_logits is None else first_logits
        current = [int(row.argmax()) for row in logits]
        for output, token in zip(outputs, current, strict=True):
            output.append(token)
    return outputs, first_logits


def exported(loaded: Any, kv: Any) -> list[bytes]:
    pieces = build_manifest(loaded.info.layout, kv.tokens).pieces
    return [bytes(kv.read(piece.tensor, piece.start_token, piece.end_token)) for piece in pieces]


def imported(loaded: Any, tokens: int, content: Sequence[bytes]) -> Any:
    kv = loaded.executor.allocate(tokens + STEPS)
    for piece, data in zip(build_manifest(loaded.info.layout, tokens).pieces, content, strict=True):
        kv.place(piece.tensor, piece.start_token, piece.end_token)[:] = data
    kv.attach(tokens)
    return kv


def answers(loaded: Any, steps: int) -> Answers:
    assert loaded.executor.capabilities.merged_decode, "the check at the start found batches to differ"
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    kvs = [prefilled(loaded.executor, tokens[:-1], STEPS) for tokens in prompts]
    kv = exported(loaded, kvs[0])
    tokens, logits = decoded(loaded.executor, kvs, [tokens[-1] for tokens in prompts], steps)
    return Answers(tokens, logits, kv)


def steps_of(name: str) -> int:
    """Less for what only varies how the same models are cut."""
    return STEPS if name in MAIN else FEW_STEPS


class Models:
    """The models' folders and, once asked for, what they say on one rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.alone = cache(self._alone)
        self.config = cache(self._config)
        self.on_one = cache(lambda name: answers(self.alone(name), steps_of(name)))

    def over(self, name: str, ranks: Ranks) -> Any:
        config = self.config(name)
        return load_model(config.path, config, CHUNK, ranks=ranks)

    def _config(self, name: str) -> ModelConfig:
        architecture, changes = MODELS[name]
        path = self._folder / name.replace(" ", "_")
        path.mkdir()
        save_model(architecture, path, **changes)
        return ModelConfig.model_validate({"name": "tiny", "path": path, "dtype": "float32"})

    def _alone(self, name: str) -> Any:
        config = self.config(name)
        return loader.load_model(config.path, config, CHUNK)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield Models(tmp_path_factory.mktemp("models"))


class OpenRanks:
    """The ranks that run now: a process has one set of them, and starting them takes longest."""

    def __init__(self) -> None:
        self._open: Ranks | None = None

    def of(self, size: int) -> Ranks:
        """`size` ranks, in place of any others."""
        if self._open is None or self._open.size != size:
            self.close()
            self._open = Ranks(size, TIMEOUT_S, threads=1)
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


class Exports(dict[tuple[str, int], Answers]):
    """What every model says over a number of ranks, and the KV it exports there; made when it is first asked for."""

    def __init__(self, models: Models, open_ranks: OpenRanks) -> None:
        super().__init__()
        self._models = models
        self._open_ranks = open_ranks

    def __missing__(self, key: tuple[str, int]) -> Answers:
        name, size = key
        if size == 1:
            self[key] = self._models.on_one(name)
        else:
            self[key] = answers(self._models.over(name, self._open_ranks.of(size)), steps_of(name))
        return self[key]


@pytest.fixture(scope="module")
def open_ranks() -> Iterator[OpenRanks]:
    found = OpenRanks()
    yield found
    found.close()


@pytest.fixture(scope="module")
def exports(models: Models, open_ranks: OpenRanks) -> Exports:
    return Exports(models, open_ranks)


@pytest.fixture(scope="module", params=[2, 4])
def size_here(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def ranks(size_here: int, exports: Exports, open_ranks: OpenRanks) -> Ranks:
    for size in (2, 4):
        for name in MAIN:
            assert exports[name, size].tokens
    return open_ranks.of(size_here)


def test_what_is_known_is_tested() -> None:
    assert {known.removesuffix("_text") for known in KNOWN} == {architecture for architecture, _ in MODELS.values()}


@pytest.mark.parametrize(("name", "size"), CASES)
def test_tokens_are_those_of_one_rank(name: str, size: int, exports: Exports) -> None:
    one, many = exports[name, 1], exports[name, size]
    assert many.tokens == one.tokens
    if name in MAIN:
        assert len({token for tokens in one.tokens for token in tokens}) > 20, "output that hardly varies proves little"
    # Sums of float32 in another order: a few units in the last place, of logits that spread over 1, or more if tied.
    assert np.abs(many.logits - one.logits).max() < 2e-5 * max(1.0, float(one.logits.std()))
    for mine, its in zip(many.kv, one.kv, strict=True):
        assert np.allclose(np.frombuffer(mine, np.float32), np.frombuffer(its, np.float32), atol=2e-5)


@pytest.mark.parametrize("source", [1, 2, 4])
@pytest.mark.parametrize("name", MAIN)
def test_kv_from_any_number_of_ranks_goes_on_here(
    name: str, source: int, models: Models, ranks: Ranks, exports: Exports
) -> None:
    here = models.over(name, ranks)
    assert here.info.fingerprint == models.alone(name).info.fingerprint
    kv = imported(here, LENGTHS[0] - 1, exports[name, source].kv)
    assert exported(here, kv) == exports[name, source].kv
    tokens, _ = decoded(here.executor, [kv], [prompt(LENGTHS[0], 0)[-1]], FEW_STEPS)
    assert tokens[0] == exports[name, 1].tokens[0][:FEW_STEPS]


def test_checkpoints_of_a_hybrid_are_part_of_its_fingerprint_here_too(models: Models, ranks: Ranks) -> None:
    config, options = models.config("qwen3_next"), loader.LoadOptions(checkpoint_every_chunks=2)
    here = load_model(config.path, config, CHUNK, options, ranks=ranks)
    assert here.info.fingerprint == loader.load_model(config.path, config, CHUNK, options).info.fingerprint
    assert here.executor.layout.checkpoint_every_chunks == 2


@pytest.mark.parametrize(("name", "source"), CASES)
def test_kv_from_many_ranks_goes_on_at_one(name: str, source: int, models: Models, exports: Exports) -> None:
    alone = models.alone(name)
    kv = imported(alone, LENGTHS[0] - 1, exports[name, source].kv)
    tokens, _ = decoded(alone.executor, [kv], [prompt(LENGTHS[0], 0)[-1]], FEW_STEPS)
    assert tokens[0] == exports[name, 1].tokens[0][:FEW_STEPS]


def test_decode_between_layers_forks_and_given_up_chunks_stay_in_step(models: Models, ranks: Ranks) -> None:
    executor, alone = models.over("deepseek_v3", ranks).executor, models.alone("deepseek_v3").executor
    first, second = prompt(41, seed=8), prompt(50, seed=9)

    def mixed(executor: Any) -> tuple[list[int], list[list[int]]]:
        running, current, between = prefilled(executor, first[:-1], STEPS), first[-1], []

        def decode_one(_: int) -> None:
            nonlocal current
            current = int(executor.decode([(running, current)])[0].argmax())
            between.append(current)

        kv = prefilled(executor, second[:-1], STEPS, decode_one)
        copy = kv.fork()
        executor.decode([(kv, 1)])

        def give_up(_: int) -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            executor.prefill(executor.allocate(40), second[:16], give_up)
        return between, decoded(executor, [copy], [second[-1]], 16)[0]

    assert mixed(executor) == mixed(alone)


def test_a_sequence_alone_and_in_a_batch_has_the_same_logits(models: Models, ranks: Ranks) -> None:
    executor = models.over("llama", ranks).executor
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    kvs = [prefilled(executor, tokens[:-1], 4) for tokens in prompts]
    alone = [executor.decode([(kv.fork(), tokens[-1])])[0] for kv, tokens in zip(kvs, prompts, strict=True)]
    together = executor.decode([(kv, tokens[-1]) for kv, tokens in zip(kvs, prompts, strict=True)])
    assert all(np.array_equal(row, single) for row, single in zip(together, alone, strict=True))


def test_loads_say_how_busy_ranks_and_experts_were(models: Models, ranks: Ranks) -> None:
    executor = models.over("qwen3_moe", ranks).executor
    before = sum(executor.loads().expert_tokens)
    prefilled(executor, prompt(32, seed=1), 1)
    loads = executor.loads()
    # 4 layers, each token to 2 of 4 experts.
    assert sum(loads.expert_tokens) - before == 32 * 4 * 2
    assert len(loads.expert_tokens) == 4
    assert len(loads.step_s) == len(loads.exchange_s) == ranks.size
    assert all(exchange_s > 0 for exchange_s in loads.exchange_s)
