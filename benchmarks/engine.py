"""The embedded engine against plain transformers, and against itself: prefill, batches, steps, prefix hits, moves.

* `prefill`: the time of a plain transformers forward over the same chunks, divided by the engine's.
* `decode`: tokens/s of 16 streams over those of one; what the engine adds to a decode step of the model.
* `itl`: the gaps between the tokens of 16 streams while a long prompt is prefilled beside them, against the time of
  one mixed step: a decode step plus a step's share of the prefill, both measured alone in the same run.
* `prefix`: time to first token when most of the prompt is a prefix hit, over that of a miss.
* `move`: bytes/s of exporting a cache (one copy out of it) and importing it (one copy into it).

Both sides of a ratio run in this process, in turns, and the median of the rounds' ratios counts, so that other work
on the machine meets both alike. One JSON line per figure on standard output, facts about the machine and absolute
numbers on standard error; exit status 1 when a figure falls short.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from _common import Figures, median, note, note_machine
from _engine import Bench, Listener, alternate, generate, prefill, prompt_of
from farfill.core.sampling import SamplingParams
from farfill.engine.protocol import GenerateWork
from farfill.engine.torch.host import set_threads

PROMPT_TOKENS = 2048
CHUNK_TOKENS = 500
STREAMS = 16
STREAM_PROMPT_TOKENS = 128
STREAM_OUTPUT_TOKENS = 33
LONG_PROMPT_TOKENS = 8000
STEP_TOKENS = 512
PREFIX_TOKENS, PREFIX_PROMPT_TOKENS = 4000, 4200
MIB = 1 << 20

# 16 streams over one; fp32 is bound by memory less than by arithmetic here, so it gains less.
STREAMS_OVER_ONE = {"bfloat16": 5.0, "float32": 3.0}


def measure_prefill(bench: Bench, folder: Path, dtype: str, rounds: int, figures: Figures) -> None:
    """Prefill against a plain forward in the same chunks."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    engine = bench.engine()

    def plain_s(seed: int) -> float:
        ids = torch.tensor([prompt_of(PROMPT_TOKENS, seed)])
        begun = time.perf_counter()
        with torch.inference_mode():
            cache = DynamicCache(config=net.config)
            for start in range(0, PROMPT_TOKENS, CHUNK_TOKENS):
                net.base_model(input_ids=ids[:, start : start + CHUNK_TOKENS], cache=cache, use_cache=True)
        return time.perf_counter() - begun

    def engine_s(seed: int) -> float:
        begun = time.perf_counter()
        sink, handle = prefill(engine, prompt_of(PROMPT_TOKENS + 1, seed))
        sink.wait()
        elapsed = time.perf_counter() - begun
        handle.release()
        return elapsed

    pairs = alternate(rounds, plain_s, engine_s)
    engine.close()
    plain, ours = (median([pair[side] for pair in pairs]) for side in (0, 1))
    note(f"{dtype}: prefill {PROMPT_TOKENS / ours:.0f} tokens/s, plain {PROMPT_TOKENS / plain:.0f} tokens/s")
    figures.at_least(f"engine_prefill_over_plain_{dtype}", median([a / b for a, b in pairs]), 0.95)


def measure_decode(bench: Bench, _: Path, dtype: str, rounds: int, figures: Figures) -> None:
    """Many streams against one, and the engine's share of a step."""
    engine = bench.engine()
    shares: list[tuple[float, float]] = []

    def tokens_per_s(streams: int, seed: int) -> float:
        bench.executor.steps.clear()
        sinks = [
            generate(engine, prompt_of(STREAM_PROMPT_TOKENS, seed * 100 + i), STREAM_OUTPUT_TOKENS)
            for i in range(streams)
        ]
        for sink in sinks:
            sink.wait()
        begun, ended = max(s.times[0] for s in sinks), min(s.times[-1] for s in sinks)
        tokens = sum(sum(begun < at <= ended for at in sink.times) for sink in sinks)
        if streams == STREAMS:
            # From the beginning of one full step to that of the next, and the model's part of it.
            full = [(at, seconds) for at, rows, seconds in bench.executor.steps if rows == STREAMS]
            shares.append((median([b[0] - a[0] for a, b in pairwise(full)]), median([s for _, s in full])))
        return tokens / (ended - begun)

    pairs = alternate(rounds, lambda seed: tokens_per_s(STREAMS, seed), lambda seed: tokens_per_s(1, seed))
    engine.close()
    many, one = (median([pair[side] for pair in pairs]) for side in (0, 1))
    note(f"{dtype}: decode 1 stream {one:.1f} tokens/s, {STREAMS} streams {many:.1f} tokens/s")
    figures.at_least(
        f"engine_decode_{STREAMS}_streams_over_1_{dtype}", median([a / b for a, b in pairs]), STREAMS_OVER_ONE[dtype]
    )
    step_s, model_s = median([share[0] for share in shares]), median([share[1] for share in shares])
    note(f"{dtype}: a step of {STREAMS} takes {step_s * 1e3:.2f} ms, the model {model_s * 1e3:.2f} ms of it")
    added_ms = median([(step - model) * 1e3 for step, model in shares])
    figures.at_most(f"engine_overhead_per_decode_step_ms_{dtype}", added_ms, 1 + 0.05 * model_s * 1e3)


def measure_itl(bench: Bench, _: Path, dtype: str, rounds: int, figures: Figures) -> None:
    """Gaps between tokens beside a long prefill. Runs once: the gaps are many."""
    engine = bench.engine(step_token_budget=STEP_TOKENS)
    long_prompt = prompt_of(LONG_PROMPT_TOKENS + 1, 1)
    begun = time.perf_counter()
    sink, handle = prefill(engine, long_prompt)
    sink.wait()
    alone_s = time.perf_counter() - begun
    handle.release()
    output = engine.info.max_context_tokens - STREAM_PROMPT_TOKENS
    works = [
        GenerateWork(
            request_id=str(i),
            prompt=prompt_of(STREAM_PROMPT_TOKENS, 10 + i),
            cache_salt="",
            sampling=SamplingParams(max_tokens=min(output, 2000), temperature=0.0, ignore_eos=True),
        )
        for i in range(STREAMS)
    ]
    sinks = [Listener() for _ in works]
    running = [engine.generate(work, sink) for work, sink in zip(works, sinks, strict=True)]
    for sink in sinks:
        sink.first.wait()
    started = time.perf_counter()
    while min(len(s.times) for s in sinks) < 20 and time.perf_counter() < started + 60:
        time.sleep(0.05)
    begun = time.perf_counter()
    sink, handle = prefill(engine, long_prompt)
    sink.wait()
    ended = time.perf_counter()
    handle.release()
    for one in running:
        one.cancel()
    engine.close()
    decode_s = median([b - a for s in sinks for a, b in _pairs(s.times) if started < a and b <= begun])
    share_s = alone_s * (STEP_TOKENS - STREAMS) / LONG_PROMPT_TOKENS
    worst = max(_p99([b - a for a, b in _pairs(s.times) if begun <= a and b <= ended]) for s in sinks)
    note(
        f"{dtype}: {LONG_PROMPT_TOKENS} tokens prefilled in {alone_s:.1f} s alone, {ended - begun:.1f} s beside "
        f"{STREAMS} streams; decode step {decode_s * 1e3:.0f} ms, mixed step {(decode_s + share_s) * 1e3:.0f} ms, "
        f"worst stream's p99 gap {worst * 1e3:.0f} ms"
    )
    figures.at_most(f"engine_itl_p99_over_step_{dtype}", worst / (decode_s + share_s), 2.0)


def measure_prefix(bench: Bench, _: Path, dtype: str, rounds: int, figures: Figures) -> None:
    """First token after a hit of 4000 of 4200 tokens, over a miss."""
    engine = bench.engine(prefix_cache_bytes=1024 * MIB)

    def first_token_s(prompt: tuple[int, ...]) -> float:
        begun = time.perf_counter()
        sink = generate(engine, prompt, 1).wait()
        return sink.times[0] - begun

    ratios: list[float] = []
    for seed in range(1, rounds + 1):
        prompt = prompt_of(PREFIX_PROMPT_TOKENS + 1, seed)
        other_end = prompt[:PREFIX_TOKENS] + prompt_of(PREFIX_PROMPT_TOKENS + 1 - PREFIX_TOKENS, seed + 500)
        miss = first_token_s(prompt)
        hit = first_token_s(other_end)
        note(f"{dtype}: first token after {miss * 1e3:.0f} ms on a miss, {hit * 1e3:.0f} ms on a hit")
        ratios.append(hit / miss)
    totals = engine.load().totals
    engine.close()
    figures.at_most(f"engine_prefix_hit_over_miss_{dtype}", median(ratios), 0.15)
    figures.between(f"engine_prefix_hit_tokens_{dtype}", totals.hit_tokens, *[rounds * PREFIX_TOKENS] * 2)


def measure_move(bench: Bench, _: Path, dtype: str, rounds: int, figures: Figures) -> None:
    """A 4000-token cache out of one engine and into another sequence."""
    engine = bench.engine()
    sink, handle = prefill(engine, prompt_of(PREFIX_TOKENS + 1, 3))
    sink.wait()
    total = handle.manifest.total_bytes
    wire = np.empty(total, np.uint8)
    wire[:] = 1  # its pages are there
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    work = GenerateWork(request_id="m", prompt=prompt_of(PREFIX_TOKENS + 1, 3), cache_salt="", sampling=sampling)
    rates: list[tuple[float, float]] = []
    for _round in range(rounds + 1):
        begun = time.perf_counter()
        offset, spans = 0, {}
        for index, view in sink.pieces:
            wire[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
            spans[index] = offset
            offset += view.nbytes
        out_s = time.perf_counter() - begun
        begun = time.perf_counter()
        slot = engine.reserve(work)
        for piece in slot.manifest.pieces:
            target = slot.buffer(piece.index)
            np.frombuffer(target, np.uint8)[:] = wire[spans[piece.index] : spans[piece.index] + piece.nbytes]
        in_s = time.perf_counter() - begun
        slot.release()
        rates.append((total / out_s / 1e9, total / in_s / 1e9))
    handle.release()
    engine.close()
    out_rate, in_rate = (statistics.median(rate[side] for rate in rates[1:]) for side in (0, 1))
    note(f"{dtype}: {total / 1e6:.0f} MB of KV, one copy each way")
    figures.at_least(f"engine_export_gb_per_s_{dtype}", out_rate, 1.5)
    figures.at_least(f"engine_import_gb_per_s_{dtype}", in_rate, 1.5)


def _pairs(times: list[float]) -> list[tuple[float, float]]:
    return list(pairwise(times))


def _p99(gaps: list[float]) -> float:
    return float(np.percentile(gaps, 99)) if gaps else float("inf")


PARTS: dict[str, Callable[[Bench, Path, str, int, Figures], None]] = {
    "prefill": measure_prefill,
    "decode": measure_decode,
    "itl": measure_itl,
    "prefix": measure_prefix,
    "move": measure_move,
}


def main() -> int:
    """Measure; the exit status."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=cache / "farfill/models/smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], action="append", help="default: both")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="default: all")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: all cores")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    note_machine()
    set_threads(args.threads)
    figures = Figures()
    for dtype in args.dtype or ["bfloat16", "float32"]:
        bench: Any = Bench(args.model, dtype, CHUNK_TOKENS)
        for part in args.part or PARTS:
            PARTS[part](bench, args.model, dtype, args.rounds, figures)
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
