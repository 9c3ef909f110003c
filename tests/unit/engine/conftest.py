"""Engines under test, tiny random models, and sinks to listen to them with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from farfill.config.model import ModelConfig
from farfill.core.sampling import SamplingParams
from farfill.engine.fake import EOS_ID, VOCAB_SIZE, FakeEngine, FakeOptions, byte_tokenizer
from farfill.engine.limits import EngineLimits
from farfill.engine.local import LocalEngine
from farfill.engine.protocol import GenerateWork, KVSlot, PrefillStats, PrefillWork, TokenEvent
from support.architectures import save_model

CHUNK = 16
WINDOW = 24
CONTEXT = 256
DEADLINE_S = 60.0

KINDS = (
    "fake",
    "fake-window",
    "fake-states",
    "llama-float32",
    "llama-bfloat16",
    "gemma3-float32",
    "gemma3-bfloat16",
    "lfm3-float32",
    "falcon_h1-float32",
)


@dataclass
class Prefilled:
    """A `PrefillSink` that keeps what it hears."""

    pieces: dict[int, bytes] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)
    stats: PrefillStats | None = None
    error: Exception | None = None
    steps: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def progress(self) -> None:
        self.steps += 1

    def pieces_ready(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        assert all(view.readonly and view.contiguous for _, view in pieces)
        self.batches.append([index for index, _ in pieces])
        self.pieces.update((index, bytes(view)) for index, view in pieces)

    def finished(self, stats: PrefillStats) -> None:
        self.stats = stats
        self.ended.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    def wait(self) -> Prefilled:
        assert self.ended.wait(DEADLINE_S), "the prefill did not end"
        return self


@dataclass
class Generated:
    """A `TokenSink` that keeps what it hears of `n` choices."""

    n: int = 1
    events: list[TokenEvent] = field(default_factory=list)
    stats: PrefillStats | None = None
    error: Exception | None = None
    first: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def prefilled(self, stats: PrefillStats) -> None:
        assert self.stats is None
        self.stats = stats

    def token(self, event: TokenEvent) -> None:
        assert self.stats is not None
        self.events.append(event)
        self.first.set()
        if sum(e.finish_reason is not None for e in self.events) == self.n:
            self.ended.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self.first.set()
        self.ended.set()

    def wait(self) -> Generated:
        assert self.ended.wait(DEADLINE_S), "the generation did not end"
        return self

    def tokens(self, index: int = 0) -> list[int]:
        """All token ids of one choice."""
        assert self.error is None, self.error
        return [token for event in self.events if event.index == index for token in event.token_ids]

    def text(self, index: int = 0) -> str:
        """All text of one choice."""
        return "".join(event.text for event in self.events if event.index == index)

    @property
    def last(self) -> TokenEvent:
        """The last event."""
        return self.events[-1]


class Harness:
    """Ways to drive engines that many tests share."""

    chunk = CHUNK
    context = CONTEXT

    @staticmethod
    def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
        """`length` printable token ids that differ from seed to seed."""
        return tuple(32 + (seed * 7919 + i * i * 31 + i * 17) % 95 for i in range(length))

    @staticmethod
    def work(
        prompt: tuple[int, ...], salt: str = "", name: str = "request", priority: int = 0, **sampling: Any
    ) -> GenerateWork:
        """A greedy generation of 12 tokens unless told otherwise."""
        params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling}
        return GenerateWork(
            request_id=name, prompt=prompt, cache_salt=salt, sampling=SamplingParams(**params), priority=priority
        )

    def generate(
        self, engine: LocalEngine, work: GenerateWork, slot: KVSlot | None = None, valid_tokens: int = 0
    ) -> Generated:
        """Run `work` to its end."""
        return self.start(engine, work, slot, valid_tokens).wait()

    def start(
        self, engine: LocalEngine, work: GenerateWork, slot: KVSlot | None = None, valid_tokens: int = 0
    ) -> Generated:
        """Queue `work`."""
        sink = Generated(work.sampling.n)
        engine.generate(work, sink, slot=slot, valid_tokens=valid_tokens)
        return sink

    def prefill(self, engine: LocalEngine, prompt: tuple[int, ...], salt: str = "") -> Prefilled:
        """Prefill to the end and release the export."""
        sink = Prefilled()
        handle = engine.prefill(PrefillWork(request_id="prefill", prompt=prompt, cache_salt=salt), sink)
        sink.wait()
        handle.release()
        return sink

    def fill(self, slot: KVSlot, pieces: dict[int, bytes], chunks: int | None = None) -> None:
        """Write the pieces of the first `chunks` prefill chunks (None: all) into `slot`."""
        for group in slot.manifest.by_prefill_chunk[:chunks]:
            for piece in group:
                slot.buffer(piece.index)[:] = pieces[piece.index]

    @staticmethod
    def wait_until(condition: Callable[[], bool]) -> None:
        """Wait for `condition`, with a deadline."""
        gate = threading.Event()
        for _ in range(int(DEADLINE_S / 0.005)):
            if condition():
                return
            gate.wait(0.005)
        raise AssertionError("the condition did not come true")

    prefill_sink = Prefilled
    token_sink = Generated


class TinyModels:
    """Seeded random models in folders, each made and loaded once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[str, Any] = {}

    def path(self, architecture: str) -> Path:
        """The folder of `architecture`: "llama", "gemma3", or one of `support.architectures`."""
        path = self._folder / architecture
        if path.exists():
            return path
        if architecture in {"llama", "gemma3"}:
            _save_tiny_model(architecture, path)
        else:
            save_model(architecture, path, CONTEXT)
        return path

    def load(self, kind: str, checkpoint_every_chunks: int = 0) -> Any:
        """A `LoadedModel` of `kind` ("<architecture>-<dtype>")."""
        from farfill.engine.torch.loader import LoadOptions, load_model

        key = f"{kind}-{checkpoint_every_chunks}"
        if key not in self._loaded:
            architecture, dtype = kind.split("-")
            path = self.path(architecture)
            model = ModelConfig.model_validate({"name": kind, "path": path, "dtype": dtype})
            options = LoadOptions(checkpoint_every_chunks=checkpoint_every_chunks)
            self._loaded[key] = load_model(path, model, CHUNK, options)
        return self._loaded[key]


def _save_tiny_model(architecture: str, path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.3,
        # A tied head mostly echoes the last token of a random model.
        "tie_word_embeddings": False,
    }
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = (
        LlamaConfig(num_hidden_layers=2, **shape)
        if architecture == "llama"
        else Gemma3TextConfig(num_hidden_layers=3, sliding_window=WINDOW, layer_types=layer_types, **shape)
    )
    torch.manual_seed(11)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))


@pytest.fixture
def harness() -> Harness:
    """Ways to drive engines."""
    return Harness()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Tiny models with random weights."""
    import torch

    torch.set_num_threads(1)
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which engine: every test of the conformance suite runs on each."""
    return request.param


@pytest.fixture
def make_engine(kind: str, tiny_models: TinyModels) -> Iterator[Callable[..., LocalEngine]]:
    """Make engines of this kind; at the end of the test all are closed and must hold nothing."""
    engines: list[LocalEngine] = []

    def make(
        *,
        kv_bytes: int = 1 << 24,
        prefix_bytes: int = 0,
        max_batch: int = 8,
        max_queue: int = 64,
        checkpoint_every_chunks: int = 0,
        start: bool = True,
        **limits: Any,
    ) -> LocalEngine:
        engine = _make_engine(
            kind,
            tiny_models,
            kv_bytes,
            EngineLimits(max_batch=max_batch, max_queue=max_queue, prefix_cache_bytes=prefix_bytes, **limits),
            checkpoint_every_chunks,
        )
        engines.append(engine)
        if start:
            engine.start()
        return engine

    yield make
    for engine in engines:
        engine.close()
        engine.check_integrity()
        assert engine.load().kv_used_bytes == 0
        assert engine.load().running_sequences == engine.load().waiting_sequences == 0


def _make_engine(
    kind: str, models: TinyModels, kv_bytes: int, limits: EngineLimits, checkpoint_every_chunks: int
) -> LocalEngine:
    if kind.startswith("fake"):
        return FakeEngine(
            FakeOptions(
                prefill_chunk_tokens=CHUNK,
                window_tokens=WINDOW - 1 if kind == "fake-window" else 0,
                states=kind == "fake-states",
                checkpoint_every_chunks=checkpoint_every_chunks,
                max_context_tokens=CONTEXT,
                kv_total_bytes=kv_bytes,
                prefix_cache_bytes=limits.prefix_cache_bytes,
                max_batch=limits.max_batch,
                max_queue=limits.max_queue,
                step_token_budget=limits.step_token_budget,
                output_reserve_tokens=limits.output_reserve_tokens,
                prefix_ttl_s=limits.prefix_ttl_s,
            )
        )
    loaded = models.load(kind, checkpoint_every_chunks)
    return LocalEngine(replace(loaded.info, kv_total_bytes=kv_bytes), loaded.executor, loaded.vocabulary, limits)
