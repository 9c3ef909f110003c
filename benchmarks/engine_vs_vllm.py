"""The embedded engine against vLLM on this machine's CPU: the same model, type, threads and prompts, side by side.

* `prefill`: tokens/s of one long prompt, from its arrival to its first token.
* `decode`: tokens/s of 16 streams while all of them run.
* where each of them spends its time, by kinds of torch operators, from one more round under torch's profiler.

Each engine is a process of its own (`_engine_side.py`), vLLM in the environment of `make vllm`. They take turns, and
the one whose turn it is not is stopped, so that its idle threads cost nothing. Every prompt is new to both, so
neither reuses a prefix. The first round warms both and does not count; of the others the median of the rounds'
ratios does. One JSON line per figure on standard output, absolute numbers and profiles on standard error; exit status
1 when a figure falls short or vLLM is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import Figures, median, note, note_machine

HERE = Path(__file__).resolve().parent
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
PROMPT_TOKENS = 2048
STREAMS = 16
STREAM_PROMPT_TOKENS = 128
STREAM_OUTPUT_TOKENS = 65
MUST = 0.8
_LONELY = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


class Side:
    """One engine's process; it runs only while it is asked something."""

    def __init__(self, python: Path | str, engine: str, args: argparse.Namespace, dtype: str, log: Path) -> None:
        threads = args.threads or len(os.sched_getaffinity(0))
        environment = {
            **os.environ,
            **_LONELY,
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            # In this process, with the threads that it is given.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        command = [str(python), str(HERE / "_engine_side.py"), engine, str(args.model), dtype, str(threads)]
        self.name = engine
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, str(args.chunk_tokens)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        note(f"{engine}: {self._answer()['version']}")
        self._signal(signal.SIGSTOP)

    def ask(self, prompts: list[tuple[int, ...]], output: int, *, profile: bool = False) -> dict[str, Any]:
        """What it did with `prompts`: seconds to the last first token, tokens/s, and shares of time by kind."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        order = {"prompts": prompts, "output": output, "profile": profile}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        self._process.wait(60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            note(self._log.read_text(errors="replace")[-3000:])
            raise RuntimeError(f"the {self.name} side ended with status {self._process.wait()}")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


@dataclass(frozen=True)
class Round:
    """Tokens/s here and in vLLM, and how many of the streams' tokens came before their first difference."""

    prefill: tuple[float, float]
    decode: tuple[float, float]
    agreed: int


def compare(ours: Side, theirs: Side, dtype: str, rounds: int, figures: Figures) -> None:
    """All rounds with both sides, the first of them to warm up."""
    found = [one_round(ours, theirs, number) for number in range(rounds + 1)][1:]
    report(found, dtype, figures)
    profile((ours, theirs), dtype)


def one_round(ours: Side, theirs: Side, number: int) -> Round:
    """Prefill and decode on both sides, who begins in turns; every number has prompts of its own."""
    from _engine import prompt_of

    long = [prompt_of(PROMPT_TOKENS, 7000 + number)]
    streams = [prompt_of(STREAM_PROMPT_TOKENS, 8000 + number * STREAMS + index) for index in range(STREAMS)]
    order = (ours, theirs) if number % 2 else (theirs, ours)
    prefills = {side.name: side.ask(long, 1)["first_s"] for side in order}
    decodes = {side.name: side.ask(streams, STREAM_OUTPUT_TOKENS) for side in order}
    mine, its = decodes[ours.name], decodes[theirs.name]
    found = Round(
        (PROMPT_TOKENS / prefills[ours.name], PROMPT_TOKENS / prefills[theirs.name]),
        (mine["tokens_per_s"], its["tokens_per_s"]),
        sum(_common_start(*pair) for pair in zip(mine["tokens"], its["tokens"], strict=True)),
    )
    note(f"round {number}: {found}")
    return found


def report(rounds: Sequence[Round], dtype: str, figures: Figures) -> None:
    """Medians of the rounds' ratios."""
    for what, pairs in (("prefill", [r.prefill for r in rounds]), ("decode", [r.decode for r in rounds])):
        mine, its = (median([pair[side] for pair in pairs]) for side in (0, 1))
        note(f"{dtype}: {what} {mine:.0f} tokens/s here, {its:.0f} tokens/s in vLLM")
        figures.at_least(f"engine_{what}_over_vllm_{dtype}", median([a / b for a, b in pairs]), MUST)
    share = sum(r.agreed for r in rounds) / (len(rounds) * STREAMS * STREAM_OUTPUT_TOKENS)
    figures.reported(f"engine_tokens_before_first_difference_{dtype}", share)


def profile(sides: tuple[Side, Side], dtype: str) -> None:
    """Where each spends its time."""
    from _engine import prompt_of

    for what, prompts, output in (
        ("prefill", [prompt_of(PROMPT_TOKENS, 9000)], 1),
        ("decode", [prompt_of(STREAM_PROMPT_TOKENS, 9100 + index) for index in range(STREAMS)], 33),
    ):
        for side in sides:
            shares = side.ask(prompts, output, profile=True)["shares"]
            listed = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
            note(f"{dtype}: {side.name} spends its time in {what} on: {listed}")


def _common_start(one: list[int], other: list[int]) -> int:
    """How many tokens of both are equal from the start."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main() -> int:
    """Compare; the exit status."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=cache / "farfill/models/smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], action="append", help="default: both")
    parser.add_argument("--threads", type=int, default=0, help="threads of each engine; 0: all cores")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="tokens of one prefill chunk, of both")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    # Whoever is told to end ends the sides as well, which may be stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    figures = Figures()
    if not VLLM_PYTHON.exists():
        note("vllm is not installed; `make vllm` makes an environment that has it")
        figures.not_measured("engine_prefill_over_vllm_bfloat16", f">= {MUST}")
        return figures.exit_code
    note_machine()
    for dtype in args.dtype or ["bfloat16", "float32"]:
        with tempfile.TemporaryDirectory() as folder:
            sides: list[Side] = []
            try:
                for python, engine in ((sys.executable, "farfill"), (VLLM_PYTHON, "vllm")):
                    sides.append(Side(python, engine, args, dtype, Path(folder) / f"{engine}.log"))
                compare(sides[0], sides[1], dtype, args.rounds, figures)
            finally:
                for side in sides:
                    side.close()
    return figures.exit_code


if __name__ == "__main__":
    sys.exit(main())
