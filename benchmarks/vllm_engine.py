"""vLLM as the engine: what waiting for KV costs, what the connector costs, and how soon the first token comes.

A tiny Llama on the real vLLM (CPU), in the environment of `make vllm`; run with another Python, the script starts
itself anew with that one.

- Waiting: KV of a prompt is on its way for 3 s while vLLM beside the worker has nothing else to do. CPU seconds of all
  of vLLM's processes and of this one in that time, over the time. A connector that lets vLLM wait costs 0.9.
- Connector: rounds of 8 requests, in turn through a server with the connector and through one started with the same
  flags but without it. The figure is the median of time without over time with, pair by pair.
- NIXL (`_vllm_nixl.py`): time to the first token against vLLM's own connector over TCP.
- WAN (`_vllm_wan.py`): time to the first token with SmolLM2 over 1 Gbit/s and 30 ms, in the lab.
- Window (Gemma 3): bytes that leave for 1500 tokens over those that decode needs.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from _common import Figures, median, note, note_machine
from _vllm_nixl import LENGTHS as NIXL_LENGTHS
from _vllm_nixl import compare, nixl_missing
from _vllm_wan import over_wan
from farfill.cli.model_store import find_source, model_folder
from farfill.core.errors import EngineError
from farfill.core.layout import TensorKind
from farfill.engine.vllm.api import Endpoint, VllmApi
from farfill.engine.vllm.server import TRANSFER_FLAG

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
WAIT_S = 3.0
SETTLE_S = 1.0
REQUESTS = 8
PROMPT_TOKENS = 200
OUTPUT_TOKENS = 64
START_S = 300.0
WINDOW_TOKENS = 1_500
PARTS = ("waiting", "connector", "window", "nixl", "wan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="of the connector's comparison; fewer elsewhere")
    parser.add_argument("--only", choices=PARTS, action="append", help="some parts")
    arguments = parser.parse_args()
    rounds: int = arguments.rounds
    wanted: list[str] = arguments.only or list(PARTS)
    figures = Figures()
    if importlib.util.find_spec("vllm") is None:
        if PYTHON.exists():
            os.execv(PYTHON, [str(PYTHON), *sys.argv])
        note("vllm is not installed; `make vllm` makes an environment that has it")
        figures.not_measured("vllm_waiting_cores", "<= 0.1")
        return figures.exit_code
    note_machine()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT))
    # Roles and vLLM's processes are started with this environment.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    from tests.vllm_engine.models import make_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llama = make_model("llama", folder / "llama")
        if {"waiting", "connector"} & set(wanted):
            _one_engine(figures, llama, folder, rounds, wanted)
        if "window" in wanted:
            window(figures, make_model("gemma3", folder / "gemma3"))
        if "nixl" in wanted:
            _against_nixl(figures, llama, folder, max(3, rounds // 3))
        if "wan" in wanted:
            over_wan(figures, model_folder(find_source("smollm2")), folder, max(3, rounds // 5))
    note(f"load average at the end {os.getloadavg()[0]:.2f}")
    return figures.exit_code


def _one_engine(figures: Figures, model: Path, folder: Path, rounds: int, wanted: list[str]) -> None:
    from tests.vllm_engine.conftest import start_engine

    engine = start_engine(model)
    try:
        server = next(p for p in psutil.Process().children() if "--enable-scale-out" in p.cmdline())
        if "waiting" in wanted:
            waiting(engine, server, figures)
        if "connector" in wanted:
            connector(engine, server, folder, rounds, figures)
    finally:
        engine.close()


def _against_nixl(figures: Figures, model: Path, folder: Path, rounds: int) -> None:
    if missing := nixl_missing():
        note(missing)
        for length in NIXL_LENGTHS:
            figures.not_measured(f"vllm_ttft_over_nixl_{length}", "<= 1")
        return
    compare(figures, model, folder, rounds)


def window(figures: Figures, model: Path) -> None:
    """Of sliding layers only the window leaves: bytes of a prompt over those that the next token looks at."""
    from tests.vllm_engine.calls import prompt_of, start_prefill
    from tests.vllm_engine.conftest import start_engine

    engine = start_engine(model)
    try:
        handle, pieces = start_prefill(engine, prompt_of(WINDOW_TOKENS))
        pieces.wait()
        sent = sum(len(data) for data in pieces.pieces.values())
        pieces.pieces.clear()
        handle.release()
        needed = 0
        for tensor in engine.info.layout.tensors:
            blocks = -(-(WINDOW_TOKENS - 1) // tensor.row_tokens)
            if tensor.kind is TensorKind.WINDOW:
                blocks -= (WINDOW_TOKENS - 1 - tensor.window_tokens) // tensor.row_tokens
            needed += tensor.row_bytes * blocks
        figures.at_most("vllm_gemma3_bytes_over_needed", sent / needed, 1.05)
    finally:
        engine.close()


def waiting(engine: Any, server: psutil.Process, figures: Figures) -> None:
    """CPU while a prompt's KV is on its way, and that the answer is right afterwards."""
    from tests.vllm_engine.calls import Tokens, fill, local, prompt_of, start_prefill, work_of

    prompt = prompt_of(1500)
    expected = local(engine, prompt)[0].token_ids
    handle, pieces = start_prefill(engine, prompt)
    pieces.wait()
    slot = engine.reserve(work_of(prompt, "waits"))
    family = [psutil.Process(), server, *server.children(recursive=True)]
    time.sleep(SETTLE_S)
    before = _cpu_s(family)
    time.sleep(WAIT_S)
    each = [(after - old) / WAIT_S for old, after in zip(before, _cpu_s(family), strict=True)]
    cores = sum(each)
    note(f"cores of this process, vLLM's server and its children: {', '.join(f'{one:.3f}' for one in each)}")
    fill(slot, pieces)
    pieces.pieces.clear()
    handle.release()
    sink = Tokens()
    engine.generate(work_of(prompt, "waits"), sink, slot=slot, valid_tokens=len(prompt) - 1)
    if sink.wait()[0].token_ids != expected:
        raise AssertionError("the KV that arrived gave other tokens")
    figures.at_most("vllm_waiting_cores", cores, 0.1)


def _cpu_s(family: list[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in family]


def connector(engine: Any, server: psutil.Process, folder: Path, rounds: int, figures: Figures) -> None:
    """Throughput with the connector over that without."""
    from farfill.config.processes import start_child

    plain = folder / "plain.sock"
    command = [
        f"--uds={plain}" if word.startswith("--uds=") else word
        for word in server.cmdline()
        if not word.startswith(TRANSFER_FLAG)
    ]
    with (folder / "plain.log").open("wb") as log:
        process = start_child(command, log, server.environ())
    try:
        with_s, without_s = asyncio.run(_in_turn(engine.endpoint, Endpoint(socket=plain), process, rounds))
    finally:
        process.terminate()
        process.wait(60)
    tokens = REQUESTS * OUTPUT_TOKENS
    note(f"with: {tokens / median(with_s):.0f} tokens/s, without: {tokens / median(without_s):.0f} tokens/s (medians)")
    ratio = median([b / a for a, b in zip(with_s, without_s, strict=True)])
    figures.at_least("vllm_throughput_with_connector", ratio, 0.98)


async def _in_turn(
    ours: Endpoint, plain: Endpoint, process: subprocess.Popen[bytes], rounds: int
) -> tuple[list[float], list[float]]:
    end_s = time.monotonic() + START_S
    apis = [VllmApi(ours), VllmApi(plain)]
    for api in apis:
        await api.open()
    try:
        while True:
            if process.poll() is not None or time.monotonic() > end_s:
                raise EngineError("vLLM without the connector did not start")
            try:
                if await apis[1].health(5) == 200:
                    break
            except EngineError:
                await asyncio.sleep(0.5)
        found: tuple[list[float], list[float]] = ([], [])
        for number in range(-1, rounds):
            order = (0, 1) if number % 2 else (1, 0)
            for which in order:
                seconds = await _round(apis[which], number)
                if number >= 0:  # the first one warms both
                    found[which].append(seconds)
        return found
    finally:
        for api in apis:
            await api.close()


async def _round(api: Any, number: int) -> float:
    from tests.vllm_engine.calls import prompt_of

    async def ask(index: int) -> None:
        body = {
            "token_ids": list(prompt_of(PROMPT_TOKENS, seed=1_000 + number * REQUESTS + index)),
            "sampling_params": {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True},
        }
        async for _ in api.stream(body):
            pass

    started_s = time.monotonic()
    await asyncio.gather(*(ask(index) for index in range(REQUESTS)))
    return time.monotonic() - started_s


if __name__ == "__main__":
    sys.exit(main())
