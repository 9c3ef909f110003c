"""Asking engines and waiting for their answers: a prompt's KV from one, tokens from another."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from farfill.core.sampling import SamplingParams
from farfill.engine.protocol import (
    Cancellable,
    Engine,
    GenerateWork,
    KVSlot,
    PrefillHandle,
    PrefillStats,
    PrefillWork,
    TokenEvent,
)

DEADLINE_S = 120.0
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def prompt_of(length: int, seed: int = 3) -> tuple[int, ...]:
    """So many random bytes."""
    rng = random.Random(seed * 100_003 + length)
    return tuple(rng.randrange(256) for _ in range(length))


def wait_until(holds: Callable[[], Any], what: str, within_s: float = DEADLINE_S) -> None:
    """Look every few milliseconds."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {within_s} s: {what}"
        time.sleep(0.01)


class Pieces:
    """A `PrefillSink` that keeps what comes."""

    def __init__(self) -> None:
        self.pieces: dict[int, memoryview] = {}
        self.times = 0
        self.stats: PrefillStats | None = None
        self.error: Exception | None = None
        self._over = threading.Event()

    def progress(self) -> None:
        pass

    def pieces_ready(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self.times += 1
        self.pieces.update(pieces)

    def finished(self, stats: PrefillStats) -> None:
        self.stats = stats
        self._over.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self._over.set()

    def wait(self) -> None:
        assert self._over.wait(DEADLINE_S), "the prefill has no end"


@dataclass
class Choice:
    """What one choice became."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Any] = field(default_factory=list[Any])


class Tokens:
    """A `TokenSink` that keeps what comes."""

    def __init__(self, choices: int = 1) -> None:
        self.choices = [Choice() for _ in range(choices)]
        self.stats: PrefillStats | None = None
        self.error: Exception | None = None
        self.first = threading.Event()
        self._over = threading.Event()
        self._open = choices

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def prefilled(self, stats: PrefillStats) -> None:
        self.stats = stats

    def token(self, event: TokenEvent) -> None:
        choice = self.choices[event.index]
        assert choice.finish_reason is None, "an event after the last one"
        choice.token_ids += event.token_ids
        choice.text += event.text
        choice.logprobs += event.logprobs or ()
        choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
        self._open -= event.finish_reason is not None
        self.first.set()
        if not self._open:
            self._over.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self._over.set()

    def wait(self) -> list[Choice]:
        """All choices; raises what the engine said went wrong."""
        assert self._over.wait(DEADLINE_S), "the generation has no end"
        if self.error is not None:
            raise self.error
        return self.choices


def start_prefill(engine: Engine, prompt: tuple[int, ...], salt: str = "far") -> tuple[PrefillHandle, Pieces]:
    sink = Pieces()
    return engine.prefill(PrefillWork(request_id="p", prompt=prompt, cache_salt=salt), sink), sink


def work_of(prompt: tuple[int, ...], salt: str, sampling: SamplingParams = GREEDY) -> GenerateWork:
    return GenerateWork(request_id="g", prompt=prompt, cache_salt=salt, sampling=sampling)


def start_local(
    engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, salt: str = "near"
) -> tuple[Cancellable, Tokens]:
    sink = Tokens(sampling.n)
    return engine.generate(work_of(prompt, salt, sampling), sink), sink


def local(
    engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, salt: str = "near"
) -> list[Choice]:
    """Everything computed by `engine`."""
    return start_local(engine, prompt, sampling, salt)[1].wait()


def fill(slot: KVSlot, sink: Pieces, *, below_chunk: int | None = None) -> None:
    """What the link does: the pieces (of the first prefill chunks) into the slot."""
    for index, data in sink.pieces.items():
        if below_chunk is None or slot.manifest.pieces[index].prefill_chunk < below_chunk:
            slot.buffer(index)[:] = data


def far(
    prefill: Engine,
    decode: Engine,
    prompt: tuple[int, ...],
    sampling: SamplingParams = GREEDY,
    salt: str = "far",
) -> Tokens:
    """Prefilled by one, generated by the other; over when this returns."""
    handle, pieces = start_prefill(prefill, prompt, salt)
    try:
        pieces.wait()
        if pieces.error is not None:
            raise pieces.error
        assert len(pieces.pieces) == len(handle.manifest.pieces)
        slot = decode.reserve(work_of(prompt, salt, sampling))
        fill(slot, pieces)
    finally:
        pieces.pieces.clear()
        handle.release()
    sink = Tokens(sampling.n)
    decode.generate(work_of(prompt, salt, sampling), sink, slot=slot, valid_tokens=len(prompt) - 1)
    sink.wait()
    return sink
