"""How fast the embedded engine is, as ratios within one run on the real model.

- prefill: tokens/s of the engine's prefill of 2048 tokens in chunks of 512, over the plain transformers forward
  with its own DynamicCache and `sdpa` on the same chunks (must be ≥ 0.9);
- batch: tokens/s of 8 streams decoded together, over one stream (must be ≥ 3).

Both sides are measured in turns, each round's first becoming the next one's second, and the figure is the median
of the rounds' ratios, so that other work on the machine meets both sides alike. One JSON line per figure on
standard output, facts about the machine and absolute numbers on standard error; exit status 1 when a figure falls
short.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.core.sampling import SamplingParams
from farfill.engine.protocol import GenerateWork, PrefillStats, PrefillWork, TokenEvent
from farfill.engine.torch import load_engine

PROMPT_TOKENS = 2048
CHUNK_TOKENS = 512
STREAMS = 8
STREAM_PROMPT_TOKENS = 128
STREAM_OUTPUT_TOKENS = 33
DEADLINE_S = 600.0


class Listener:
    """A sink of either kind that notes when tokens came."""

    def __init__(self, at_first: Callable[[], None] = lambda: None) -> None:
        self.times: list[float] = []
        self.error: Exception | None = None
        self._at_first = at_first
        self._ended = threading.Event()

    def progress(self) -> None: ...

    def pieces_ready(self, pieces: Any) -> None: ...

    def prefilled(self, stats: PrefillStats) -> None: ...

    def finished(self, stats: PrefillStats) -> None:
        self._ended.set()

    def token(self, event: TokenEvent) -> None:
        self.times.append(time.perf_counter())
        if event.finish_reason is not None:
            self._ended.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self._ended.set()

    def wait(self) -> None:
        if not self._ended.wait(DEADLINE_S):
            raise TimeoutError("the engine did not answer")
        if self.error is not None:
            raise self.error


def prompt_of(tokens: int, seed: int) -> tuple[int, ...]:
    """Token ids that no prefix cache has seen (it is off, too)."""
    return tuple(1000 + (seed * 7919 + i * i * 31) % 40_000 for i in range(tokens))


def engine_prefill_s(engine: Any, seed: int) -> float:
    """Seconds from the request to the complete KV of `PROMPT_TOKENS` tokens."""
    sink = Listener()
    work = PrefillWork(request_id=str(seed), prompt=prompt_of(PROMPT_TOKENS + 1, seed), cache_salt="")
    begun = time.perf_counter()
    handle = engine.prefill(work, sink)
    sink.wait()
    elapsed = time.perf_counter() - begun
    handle.release()
    return elapsed


def plain_prefill_s(net: Any, seed: int) -> float:
    """The same with nothing but transformers."""
    import torch
    from transformers import DynamicCache

    ids = torch.tensor([prompt_of(PROMPT_TOKENS, seed)])
    begun = time.perf_counter()
    with torch.inference_mode():
        cache = DynamicCache(config=net.config)
        for start in range(0, PROMPT_TOKENS, CHUNK_TOKENS):
            net.base_model(input_ids=ids[:, start : start + CHUNK_TOKENS], cache=cache, use_cache=True)
    return time.perf_counter() - begun


def decode_tokens_per_s(engine: Any, streams: int, seed: int) -> float:
    """Tokens/s of `streams` greedy streams while all of them run."""
    sampling = SamplingParams(max_tokens=STREAM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    sinks = [Listener() for _ in range(streams)]
    for i, sink in enumerate(sinks):
        prompt = prompt_of(STREAM_PROMPT_TOKENS, seed * 100 + i)
        engine.generate(GenerateWork(request_id=f"{seed}-{i}", prompt=prompt, cache_salt="", sampling=sampling), sink)
    for sink in sinks:
        sink.wait()
    begun, ended = max(s.times[0] for s in sinks), min(s.times[-1] for s in sinks)
    tokens = sum(sum(begun < at <= ended for at in sink.times) for sink in sinks)
    return tokens / (ended - begun)


def compare(rounds: int, first: Callable[[int], float], second: Callable[[int], float]) -> tuple[float, float, float]:
    """Medians of first / second, of first and of second, after one round of warming up."""
    for side in (first, second):
        side(0)
    pairs: list[tuple[float, float]] = []
    for i in range(1, rounds + 1):
        if i % 2:
            pairs.append((first(i), second(i)))
        else:
            later = second(i)
            pairs.append((first(i), later))
    return (
        statistics.median(a / b for a, b in pairs),
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
    )


def report(name: str, value: float, must: float) -> bool:
    """Print one figure."""
    ok = value >= must
    print(json.dumps({"name": name, "value": round(value, 3), "must": f">= {must}", "ok": ok}), flush=True)
    return ok


def measure(path: Path, dtype: str, threads: int, rounds: int) -> bool:
    """Both figures for one dtype."""
    from transformers import AutoModelForCausalLM

    model = ModelConfig.model_validate({"name": "model", "path": path, "dtype": dtype})
    limits = EngineConfig(threads=threads, prefix_cache_mb=0, max_batch=STREAMS)
    engine = load_engine(model, limits, PrefillConfig(chunked_prefill_tokens=CHUNK_TOKENS), Path())
    net = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    engine.start()
    try:
        prefill_ratio, plain_s, engine_s = compare(
            rounds, lambda seed: plain_prefill_s(net, seed), lambda seed: engine_prefill_s(engine, seed)
        )
        decode_ratio, many, one = compare(
            rounds,
            lambda seed: decode_tokens_per_s(engine, STREAMS, seed),
            lambda seed: decode_tokens_per_s(engine, 1, seed),
        )
    finally:
        engine.close()
    note(f"{dtype}: prefill {PROMPT_TOKENS / engine_s:.0f} tokens/s, plain {PROMPT_TOKENS / plain_s:.0f} tokens/s")
    note(f"{dtype}: decode 1 stream {one:.1f} tokens/s, {STREAMS} streams {many:.1f} tokens/s")
    prefill_ok = report(f"engine_prefill_over_plain_{dtype}", prefill_ratio, 0.9)
    return report(f"engine_decode_{STREAMS}_streams_over_1_{dtype}", decode_ratio, 3.0) and prefill_ok


def note(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def machine() -> str:
    """Processor, cores, kernel and versions."""
    import torch
    import transformers

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{cpu}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, load {load}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=cache / "farfill/models/smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], action="append", help="default: both")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: all cores")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    note(machine())
    dtypes = args.dtype or ["bfloat16", "float32"]
    results = [measure(args.model, dtype, args.threads, args.rounds) for dtype in dtypes]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
