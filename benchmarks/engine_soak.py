"""The embedded engine under thousands of mixed requests: is memory flat, the account clean, and every token right?

Tiny seeded models in float32, each in an engine with far too little memory: one with full attention, one with sliding
windows, one with recurrent states, and two that see images (windows, and images whose tokens look at each other both
ways; recurrent states, and M-RoPE). Sequences are set back, prefix snapshots are dropped all the time. Requests are
short and long, with and without images, greedy and sampled, one choice or several, of several tenants and priorities;
some share beginnings; some are exports, some bring KV that was exported before, whole or in part. Some are withdrawn at
a random moment, in some the model raises. Every so many requests, one that ended well is run again alone in a quiet
engine, and must have given the same tokens. Figures as JSON lines; exit status 1 when any falls short.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from _common import Figures, note, note_machine
from farfill.config.model import ModelConfig
from farfill.core.errors import CancelledWorkError, CapacityError, EngineError, InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.engine.fake import EOS_ID, VOCAB_SIZE, byte_tokenizer
from farfill.engine.limits import EngineLimits
from farfill.engine.local import LocalEngine
from farfill.engine.protocol import GenerateWork, PrefillStats, PrefillWork, TokenEvent
from farfill.engine.torch.loader import LoadOptions, load_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support import vision_models
from support.vision_models import image_file

# Models that see images, by their type.
SEEING = ("gemma3", "qwen3_5")
CHUNK_TOKENS = 16
CONTEXT = 512
AT_ONCE = 24
SEED = 20261130
DEADLINE_S = 300.0
CHECK_EVERY = 12
# RSS after the last tenth over RSS after the first: the allocator's own noise, no more.
FLAT = 1.05


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the images among them."""

    tokens: tuple[int, ...]
    items: tuple[Any, ...] = ()
    position_offset: int = 0


class InjectedError(Exception):
    """What the model raises when it is told to."""


class FaultyExecutor:
    """An executor that now and then raises in the middle of a step."""

    def __init__(self, executor: Any, chance: float) -> None:
        self._executor = executor
        self._chance = chance
        self._random = random.Random(SEED)
        self.injected = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def prefill(self, kv: Any, token_ids: Sequence[int], layer_done: Callable[[int], None] | None = None) -> None:
        """Maybe raises between two layers."""
        fails = self._random.random() < self._chance

        def after(layer: int) -> None:
            if layer_done is not None:
                layer_done(layer)
            if fails:
                self.injected += 1
                raise InjectedError

        self._executor.prefill(kv, token_ids, after)

    def decode(self, rows: Sequence[Any]) -> Any:
        """Maybe raises, then maybe again for one of the rows when they are tried alone."""
        if self._random.random() < self._chance:
            self.injected += 1
            raise InjectedError
        return self._executor.decode(rows)


@dataclass
class Sink:
    """Hears of one request of either kind; `cancel_after` events it is withdrawn."""

    ended: Callable[[Sink], None]
    cancel_after: int = -1
    cancel: Callable[[], None] = lambda: None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    pieces: dict[int, bytes] = field(default_factory=dict)
    error: Exception | None = None
    open_choices: int = 1
    stats: PrefillStats | None = None

    def progress(self) -> None: ...

    def pieces_ready(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self.pieces.update((index, bytes(view)) for index, view in pieces)
        self._count()

    def prefilled(self, stats: PrefillStats) -> None:
        self.stats = stats
        self._count()

    def finished(self, stats: PrefillStats) -> None:
        self.stats = stats
        self.ended(self)

    def token(self, event: TokenEvent) -> None:
        self.tokens.setdefault(event.index, []).extend(event.token_ids)
        self._count()
        if event.finish_reason is not None:
            self.open_choices -= 1
            if not self.open_choices:
                self.ended(self)

    def failed(self, error: Exception) -> None:
        self.error = error
        self.ended(self)

    def _count(self) -> None:
        if self.cancel_after == 0:
            self.cancel()
        self.cancel_after -= 1


class Soak:
    """One model's share of the requests."""

    def __init__(self, loaded: Any, other: Any, requests: int, seed: int, placeholder: str = "") -> None:
        """`loaded` and `other` are the same model: an executor belongs to one engine's thread. With a `placeholder`,
        what stands for an image in text, some requests have images."""
        info = replace(loaded.info, kv_total_bytes=1 << 30)
        quiet = EngineLimits(max_batch=4, max_queue=8, prefix_cache_bytes=0)
        self.alone = LocalEngine(info, other.executor, other.vocabulary, quiet, media=other.media)
        self.placeholder = placeholder
        self.with_images = self.checked_with_images = 0
        self.executor: Any = FaultyExecutor(loaded.executor, 0.004)
        per_sequence = loaded.executor.kv_bytes(CONTEXT)
        limits = EngineLimits(
            max_batch=12,
            max_queue=10_000,
            prefix_cache_bytes=4 * per_sequence,
            step_token_budget=24,
            output_reserve_tokens=16,
            prefix_ttl_s=5.0,
        )
        # Room for about three whole sequences, and many small ones.
        self.engine = LocalEngine(
            replace(info, kv_total_bytes=3 * per_sequence),
            self.executor,
            loaded.vocabulary,
            limits,
            media=loaded.media,
        )
        self.requests = requests
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.checked = self.wrong = 0
        self._room = threading.Semaphore(AT_ONCE)
        self._to_check: list[tuple[GenerateWork, Prompt, dict[int, list[int]]]] = []
        self._exports: list[tuple[Prompt, dict[int, bytes]]] = []
        self._lock = threading.Lock()

    def run(self, after_each: Callable[[], None]) -> None:
        """Send all requests, at most `AT_ONCE` at a time; check some of them while others run."""
        self.engine.start()
        self.alone.start()
        for number in range(self.requests):
            if not self._room.acquire(timeout=DEADLINE_S):
                raise TimeoutError("a request did not end")
            self._send(number)
            after_each()
            if number % CHECK_EVERY == 0:
                self._check_one()
        for _ in range(AT_ONCE):
            if not self._room.acquire(timeout=DEADLINE_S):
                raise TimeoutError("a request did not end")
        while self._to_check:
            self._check_one()

    def close(self) -> None:
        """Everything must have been given back."""
        for engine in (self.engine, self.alone):
            engine.close()
            engine.check_integrity()
            assert engine.load().kv_used_bytes == 0, "KV memory is held by nobody's request"

    def _prompt(self) -> Prompt:
        rng = self.random
        if self.placeholder and rng.random() < 0.4:
            return self._prompt_with_images()
        length = rng.choice((2, 5, 17, 33, 60, 100, 150, 280))
        if rng.random() < 0.4:
            # One of a few beginnings, such as a system prompt.
            start = random.Random(rng.randrange(4)).choices(range(32, 127), k=64)
            return Prompt((*start, *rng.choices(range(32, 127), k=length)))
        return Prompt(tuple(rng.choices(range(32, 127), k=length)))

    def _prompt_with_images(self) -> Prompt:
        """Text around one or two images, of few different ones, so that prefixes with images are hit and missed."""
        rng = self.random
        images = [image_file(rng.randrange(3), rng.choice(((96, 64), (64, 80)))) for _ in range(rng.choice((1, 1, 2)))]
        text = "".join(chr(rng.randrange(97, 123)) for _ in range(rng.choice((3, 20, 60))))
        made = self.engine.media.render(  # type: ignore[union-attr]
            rng.choice(("See: ", "")) + self.placeholder * len(images) + text, images, add_special_tokens=False
        )
        self.with_images += 1
        return Prompt(tuple(made.token_ids), made.items, made.position_offset)

    @staticmethod
    def _seen(engine: LocalEngine, prompt: Prompt) -> dict[str, Any]:
        """What a work's images are to `engine`."""
        if not prompt.items:
            return {}
        assert engine.media is not None
        inputs = engine.media.inputs(prompt.tokens, prompt.items, prompt.position_offset)
        return {"media": inputs.material, "media_inputs": inputs}

    def _work(self, number: int, prompt: Prompt) -> GenerateWork:
        rng = self.random
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 3, 10, 30, 90)),
            temperature=rng.choice((0.0, 0.0, 0.9)),
            seed=number,
            n=rng.choice((1, 1, 1, 1, 2, 3)),
            ignore_eos=rng.random() < 0.5,
            min_p=rng.choice((0.0, 0.05)),
        )
        tenant = rng.choice(("a", "a", "a", "b", "c"))
        priority = rng.choice((0, 0, 0, 0, -1, 1))
        return GenerateWork(
            request_id=str(number),
            prompt=prompt.tokens,
            cache_salt=tenant,
            sampling=sampling,
            tenant=tenant,
            priority=priority,
            **self._seen(self.engine, prompt),
        )

    def _send(self, number: int) -> None:
        rng = self.random
        prompt = self._prompt()
        cancel_after = rng.randrange(12) if rng.random() < 0.15 else -1
        kind = rng.random()
        if kind < 0.15:
            self._send_prefill(number, prompt, cancel_after)
        elif kind < 0.35 and self._exports:
            with self._lock:
                prompt, pieces = rng.choice(self._exports)
            self._send_with_kv(self._work(number, prompt), prompt, pieces, cancel_after)
        else:
            work = self._work(number, prompt)
            sink = Sink(lambda sink: self._ended(sink, work, prompt), cancel_after, open_choices=work.sampling.n)
            try:
                sink.cancel = self.engine.generate(work, sink).cancel
            except InvalidRequestError:
                self._not_sent("too large for the worker")

    def _send_prefill(self, number: int, prompt: Prompt, cancel_after: int) -> None:
        work = PrefillWork(
            request_id=str(number),
            prompt=prompt.tokens,
            cache_salt="a",
            tenant="a",
            **self._seen(self.engine, prompt),
        )
        handles: list[Any] = []
        known = threading.Event()

        def ended(sink: Sink) -> None:
            if sink.error is None:
                with self._lock:
                    self._exports = [*self._exports[-5:], (prompt, sink.pieces)]
            known.wait(DEADLINE_S)
            handles[0].release()
            self._count("export", sink)

        sink = Sink(ended, cancel_after)
        handles.append(self.engine.prefill(work, sink))
        sink.cancel = handles[0].cancel
        known.set()

    def _send_with_kv(self, work: GenerateWork, prompt: Prompt, pieces: dict[int, bytes], cancel_after: int) -> None:
        try:
            slot = self.engine.reserve(work)
        except (CapacityError, InvalidRequestError) as error:
            self._not_sent(f"no slot: {error.reason}")
            return
        manifest = slot.manifest
        chunks = self.random.randint(0, manifest.num_prefill_chunks)
        held = set(slot.held)
        for group in manifest.by_prefill_chunk[:chunks]:
            for piece in group:
                if piece.index not in slot.held:
                    slot.buffer(piece.index)[:] = pieces[piece.index]
                held.add(piece.index)
        valid = manifest.complete_prefix_tokens(held)
        sink = Sink(lambda sink: self._ended(sink, work, prompt), cancel_after, open_choices=work.sampling.n)
        sink.cancel = self.engine.generate(work, sink, slot=slot, valid_tokens=valid).cancel

    def _ended(self, sink: Sink, work: GenerateWork, prompt: Prompt) -> None:
        if sink.error is None:
            with self._lock:
                self._to_check = [*self._to_check[-3:], (work, prompt, sink.tokens)]
        self._count("generation", sink)

    def _count(self, kind: str, sink: Sink) -> None:
        match sink.error:
            case None:
                outcome = "ok"
            case CancelledWorkError():
                outcome = "withdrawn"
            case EngineError() if "InjectedError" in str(sink.error):
                outcome = "injected error"
            case _:
                outcome = f"unexpected {sink.error!r}"
        self.outcomes[f"{kind}: {outcome}"] += 1
        self._room.release()

    def _not_sent(self, why: str) -> None:
        self.outcomes[why] += 1
        self._room.release()

    def _check_one(self) -> None:
        with self._lock:
            if not self._to_check:
                return
            work, prompt, tokens = self._to_check.pop()
        work = replace(work, **self._seen(self.alone, prompt))
        done = threading.Event()
        sink = Sink(lambda _: done.set(), open_choices=work.sampling.n)
        self.alone.generate(work, sink)
        if not done.wait(DEADLINE_S):
            raise TimeoutError("a check did not end")
        self.checked += 1
        self.checked_with_images += bool(prompt.items)
        if sink.error is not None or sink.tokens != tokens:
            self.wrong += 1
            note(f"request {work.request_id} gave {tokens}, alone it gives {sink.tokens} ({sink.error})")


def save_models(folder: Path) -> list[Path]:
    """One tiny model of each kind of cache."""
    import transformers

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
        "tie_word_embeddings": False,
    }
    sliding = ["sliding_attention", "full_attention", "sliding_attention"]
    linear = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    configs = {
        "full": transformers.LlamaConfig(num_hidden_layers=2, **shape),
        "window": transformers.Gemma3TextConfig(num_hidden_layers=3, sliding_window=24, layer_types=sliding, **shape),
        "states": transformers.Qwen3_5TextConfig(num_hidden_layers=3, **linear, **shape),
    }
    paths: list[Path] = []
    for name, config in configs.items():
        torch.manual_seed(SEED)
        paths.append(folder / name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(paths[-1])
        byte_tokenizer().save(str(paths[-1] / "tokenizer.json"))
    for name in SEEING:
        paths.append(folder / name)
        vision_models.save_model(name, paths[-1])
    return paths


def soak_model(path: Path, requests: int, figures: Figures) -> int:
    """All of one model; how many requests were checked."""
    model = ModelConfig.model_validate({"name": path.name, "path": path, "dtype": "float32"})
    loaded, other = (load_model(path, model, CHUNK_TOKENS, LoadOptions(checkpoint_every_chunks=2)) for _ in range(2))
    soak = Soak(loaded, other, requests, SEED, vision_models.PLACEHOLDERS[path.name] if path.name in SEEING else "")
    process, levels = psutil.Process(), []
    sent = 0

    def after_each() -> None:
        nonlocal sent
        sent += 1
        if sent % max(1, requests // 20) == 0:
            gc.collect()
            levels.append(process.memory_info().rss)

    begun = time.perf_counter()
    soak.run(after_each)
    elapsed = time.perf_counter() - begun
    totals = soak.engine.load().totals
    most = soak.engine.load().kv_most_bytes / soak.engine.info.kv_total_bytes
    soak.close()
    note(f"{path.name}: {requests} requests in {elapsed:.0f} s; {dict(soak.outcomes)}; {totals}; high water {most:.2f}")
    # What loading left behind and first sizes of buffers are there after a quarter.
    figures.at_most(f"soak_rss_growth_{path.name}", max(levels[-4:]) / max(levels[4:8]), FLAT)
    figures.at_most(f"soak_wrong_outputs_{path.name}", soak.wrong, 0)
    unexpected = sum(count for name, count in soak.outcomes.items() if "unexpected" in name)
    figures.at_most(f"soak_unexpected_errors_{path.name}", unexpected, 0)
    figures.at_least(f"soak_set_back_{path.name}", totals.set_back_growth + totals.set_back_priority, 1)
    figures.at_least(f"soak_prefix_hits_{path.name}", totals.prefix_hits, 1)
    figures.at_least(f"soak_injected_errors_{path.name}", soak.executor.injected, 1)
    if soak.placeholder:
        note(f"{path.name}: {soak.with_images} prompts with images, {soak.checked_with_images} of them checked")
        figures.at_least(f"soak_checked_with_images_{path.name}", soak.checked_with_images, 1)
    return soak.checked


def main() -> int:
    """Soak; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="over all models")
    args = parser.parse_args()
    note_machine()
    torch.set_num_threads(1)
    # Injected errors are expected by the dozen, each with its traceback.
    logging.getLogger("farfill.engine.jobs").setLevel(logging.CRITICAL)
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        paths = save_models(Path(folder))
        checked = sum(soak_model(path, args.requests // len(paths), figures) for path in paths)
    figures.at_least("soak_checked_against_solo_runs", checked, min(100, args.requests // 20))
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
