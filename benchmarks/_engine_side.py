"""One engine as a process: answers lines of JSON with what it did, for `engine_vs_vllm.py`.

    python _engine_side.py farfill|vllm MODEL DTYPE THREADS CHUNK_TOKENS

Needs nothing of Farfill when it runs vLLM. An order has `prompts`, `output` (tokens of each) and `profile`; the answer
has `first_s` (until all have their first token), `tokens_per_s` (while all run), `tokens`, and of a profile `shares`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

CONTEXT_TOKENS = 4096
# By parts of operators' names, the first that fits.
KINDS = {
    "attention": ("attention", "sdpa"),
    "matrix products": ("linear", "::mm", "addmm", "bmm", "matmul", "onednn_mm", "gemm"),
}
REST = "other operators"
OUTSIDE = "outside of operators"

# Ends of one run: (prompts, output tokens) -> each prompt's tokens, and when each came.
Run = Callable[[Sequence[Sequence[int]], int], tuple[list[list[int]], list[list[float]]]]


def open_farfill(folder: Path, dtype: str, chunk_tokens: int) -> tuple[Run, str]:
    """The embedded engine as `farfill worker` makes it."""
    import farfill
    from _engine import Bench, generate

    bench = Bench(folder, dtype, chunk_tokens)
    engine = bench.engine()

    def run(prompts: Sequence[Sequence[int]], output: int) -> tuple[list[list[int]], list[list[float]]]:
        sinks = [generate(engine, tuple(prompt), output) for prompt in prompts]
        for sink in sinks:
            sink.wait()
        return [sink.tokens for sink in sinks], [sink.times for sink in sinks]

    return run, f"farfill {farfill.__version__}"


def open_vllm(folder: Path, dtype: str, chunk_tokens: int) -> tuple[Run, str]:
    """vLLM with its defaults for a CPU, compiled, without prefix reuse."""
    # Files beside this one may have names of installed packages.
    sys.path = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        dtype=dtype,
        max_model_len=CONTEXT_TOKENS,
        max_num_batched_tokens=max(chunk_tokens, 2048),
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    numbers = itertools.count()

    def run(prompts: Sequence[Sequence[int]], output: int) -> tuple[list[list[int]], list[list[float]]]:
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=True)
        names = [str(next(numbers)) for _ in prompts]
        tokens: dict[str, list[int]] = {}
        times: dict[str, list[float]] = {name: [] for name in names}
        for name, prompt in zip(names, prompts, strict=True):
            llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        while llm.llm_engine.has_unfinished_requests():
            for one in llm.llm_engine.step():
                name = one.request_id.split("-")[0]
                tokens[name] = list(one.outputs[0].token_ids)
                new = len(tokens[name]) - len(times[name])
                times[name].extend([time.perf_counter()] * new)
        return [tokens[name] for name in names], [times[name] for name in names]

    return run, f"vllm {vllm.__version__}"


def carry_out(run: Run, order: dict[str, Any]) -> dict[str, Any]:
    """Do it and measure."""
    begun = time.perf_counter()
    tokens, times = run(order["prompts"], order["output"])
    all_run, one_ends = max(own[0] for own in times), min(own[-1] for own in times)
    within = sum(sum(all_run < at <= one_ends for at in own) for own in times)
    span = one_ends - all_run
    return {"first_s": all_run - begun, "tokens_per_s": within / span if span else 0.0, "tokens": tokens}


def profiled(run: Run, order: dict[str, Any]) -> dict[str, Any]:
    """Do it, and say for what kinds of operators the time went; of the thread that computes."""
    from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

    begun = time.perf_counter()
    with profile(
        activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
    ) as found:
        begun = time.perf_counter()
        run(order["prompts"], order["output"])
        wall_us = (time.perf_counter() - begun) * 1e6
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return {"shares": shares(json.loads(path.read_text())["traceEvents"], wall_us)}


def shares(events: Sequence[dict[str, Any]], wall_us: float) -> dict[str, float]:
    """Of a trace: each kind's part of the time, an operator's own time without those it calls counted once."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "cpu_op":
            threads[event["tid"]].append(event)
    busiest = max(threads.values(), key=len)
    own: dict[str, float] = dict.fromkeys([*KINDS, REST], 0.0)
    # A kind reaches down: what a product calls (copies, packing) is part of the product.
    open_until: list[tuple[float, str]] = []
    for event in sorted(busiest, key=lambda event: (event["ts"], -event["dur"])):
        while open_until and open_until[-1][0] <= event["ts"]:
            open_until.pop()
        outer = open_until[-1][1] if open_until else None
        kind = outer if outer not in (None, REST) else _kind(event["name"])
        if outer is not None:
            own[outer] -= event["dur"]
        own[kind] += event["dur"]
        open_until.append((event["ts"] + event["dur"], kind))
    inside = {kind: us / wall_us for kind, us in own.items()}
    return {**inside, OUTSIDE: 1.0 - sum(inside.values())}


def _kind(name: str) -> str:
    found = (kind for kind, parts in KINDS.items() if any(part in name for part in parts))
    return next(found, REST)


def serve(run: Run, version: str, answers: TextIO) -> None:
    """Until standard input ends."""

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer({"version": version})
    for line in sys.stdin:
        order = json.loads(line)
        answer((profiled if order["profile"] else carry_out)(run, order))


def main() -> None:
    """See the module's text."""
    engine, folder, dtype, threads, chunk_tokens = sys.argv[1:]
    # Libraries print: answers go out where only this module writes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(int(threads))
    open_engine = {"farfill": open_farfill, "vllm": open_vllm}[engine]
    serve(*open_engine(Path(folder), dtype, int(chunk_tokens)), answers)


if __name__ == "__main__":
    main()
