"""What the engine's benchmarks share: a model with a timed executor, sinks that note times, prompts nobody has seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from farfill.config.model import ModelConfig
from farfill.core.sampling import SamplingParams
from farfill.engine.limits import EngineLimits
from farfill.engine.local import LocalEngine
from farfill.engine.protocol import GenerateWork, PrefillStats, PrefillWork, TokenEvent
from farfill.engine.torch.loader import LoadedModel, load_model

DEADLINE_S = 600.0


class TimedExecutor:
    """An executor that notes decode steps: when each began, its rows and its seconds."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.steps: list[tuple[float, int, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def decode(self, rows: Sequence[Any]) -> Any:
        """One timed step."""
        begun = time.perf_counter()
        logits = self._executor.decode(rows)
        self.steps.append((begun, len(rows), time.perf_counter() - begun))
        return logits


class Listener:
    """A sink of either kind that notes tokens and when they came, and keeps the pieces of an export."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.pieces: list[tuple[int, memoryview]] = []
        self.stats: PrefillStats | None = None
        self.error: Exception | None = None
        self.first = threading.Event()
        self._ended = threading.Event()

    def progress(self) -> None: ...

    def pieces_ready(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self.pieces.extend(pieces)

    def prefilled(self, stats: PrefillStats) -> None:
        self.stats = stats

    def finished(self, stats: PrefillStats) -> None:
        self.stats = stats
        self._ended.set()

    def token(self, event: TokenEvent) -> None:
        self.times.append(time.perf_counter())
        self.tokens.extend(event.token_ids)
        self.first.set()
        if event.finish_reason is not None:
            self._ended.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self.first.set()
        self._ended.set()

    def wait(self) -> Listener:
        """Until the end; raises what failed."""
        if not self._ended.wait(DEADLINE_S):
            raise TimeoutError("the engine did not answer")
        if self.error is not None:
            raise self.error
        return self


class Bench:
    """One loaded model, and engines over it with whatever limits a figure needs, one at a time."""

    def __init__(self, folder: Path, dtype: str, chunk_tokens: int) -> None:
        config = ModelConfig.model_validate({"name": "model", "path": folder, "dtype": dtype})
        self.loaded: LoadedModel = load_model(folder, config, chunk_tokens)
        self.executor: Any = TimedExecutor(self.loaded.executor)

    def engine(self, **limits: Any) -> LocalEngine:
        """A started engine with 4 GiB of KV memory."""
        bounds = EngineLimits(**{"max_batch": 16, "max_queue": 64, "prefix_cache_bytes": 0, **limits})
        info = replace(self.loaded.info, kv_total_bytes=4 << 30)
        # Progress is told to the executor inside.
        engine = LocalEngine(info, self.executor, self.loaded.vocabulary, bounds)
        self.loaded.executor.on_progress = self.executor.on_progress
        engine.start()
        return engine


def prompt_of(tokens: int, seed: int) -> tuple[int, ...]:
    """Token ids that differ from seed to seed from the start."""
    return tuple(1000 + (seed * 7919 + i * i * 31) % 40_000 for i in range(tokens))


def generate(engine: LocalEngine, prompt: tuple[int, ...], tokens: int, **more: Any) -> Listener:
    """Queue a greedy generation of exactly `tokens` tokens."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    sink = Listener()
    engine.generate(GenerateWork(request_id="bench", prompt=prompt, cache_salt="", sampling=sampling), sink, **more)
    return sink


def prefill(engine: LocalEngine, prompt: tuple[int, ...]) -> tuple[Listener, Any]:
    """Queue a prefill; its sink and its handle."""
    sink = Listener()
    return sink, engine.prefill(PrefillWork(request_id="bench", prompt=prompt, cache_salt=""), sink)


def alternate(rounds: int, first: Callable[[int], float], second: Callable[[int], float]) -> list[tuple[float, float]]:
    """Both sides once a round, in turns of who begins, after a round to warm up: load on the machine meets both."""
    for side in (first, second):
        side(0)
    pairs: list[tuple[float, float]] = []
    for i in range(1, rounds + 1):
        if i % 2:
            pairs.append((first(i), second(i)))
        else:
            later = second(i)
            pairs.append((first(i), later))
    return pairs
