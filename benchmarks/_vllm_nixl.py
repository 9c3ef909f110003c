"""Time to the first token with KV from another vLLM: through Farfill, and through vLLM's own NixlConnector over TCP.

Two pairs of vLLM with the same model and flags on this machine, one pair for each. Both are driven alike, as a stock
router does: one request to prefill, whose `kv_transfer_params` go along with a request to decode; the clock runs from
the first request to the first token. While one pair works all processes of the other one are stopped, so that each has
the machine to itself; rounds take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from _common import Figures, median, note

LENGTHS = (500, 1_500, 3_000)
PEERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farfill" / "bench-peers"
_NIXL = "nixl_cu13"
_UCX = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
_WANTED: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Where prefill and decode answer, as what, and all processes of both."""

    name: str
    model: str
    prefill: str
    decode: str
    roots: tuple[int, ...]

    def tell(self, number: signal.Signals) -> None:
        """`number` to every process."""
        for root in self.roots:
            process = psutil.Process(root)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)


def compare(figures: Figures, model: Path, folder: Path, rounds: int) -> None:
    """Ratios of medians, a length at a time."""
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(_farfill(model, folder)), stack.enter_context(_nixl(model, folder))]
        times = asyncio.run(_measure(pairs, rounds))
    for length in LENGTHS:
        ours, theirs = (median(times[pair.name, length]) for pair in pairs)
        note(f"{length} tokens: first token after {ours:.3f} s through Farfill, {theirs:.3f} s through NIXL (medians)")
        figures.at_most(f"vllm_ttft_over_nixl_{length}", ours / theirs, 1.0)


async def _measure(pairs: list[Pair], rounds: int) -> dict[tuple[str, int], list[float]]:
    times: dict[tuple[str, int], list[float]] = {(pair.name, length): [] for pair in pairs for length in LENGTHS}
    # A pair that was stopped closes connections that were idle meanwhile just when it goes on: none is used twice.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), connector=connector) as session:
        for number in range(-1, rounds):
            for pair in pairs if number % 2 else pairs[::-1]:
                others = [other for other in pairs if other is not pair]
                for other in others:
                    other.tell(signal.SIGSTOP)
                try:
                    for length in LENGTHS:
                        took_s = await _first_token(session, pair, length, number)
                        note(f"{pair.name}, {length} tokens: {took_s:.3f} s{' (warm-up)' if number < 0 else ''}")
                        if number >= 0:  # the first round warms both
                            times[pair.name, length].append(took_s)
                finally:
                    for other in others:
                        other.tell(signal.SIGCONT)
    return times


async def _first_token(session: aiohttp.ClientSession, pair: Pair, length: int, number: int) -> float:
    from tests.vllm_engine.calls import prompt_of

    prompt = list(prompt_of(length, seed=50 + number))
    body: dict[str, Any] = {"model": pair.model, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    started_s = time.monotonic()
    asked = {**body, "max_tokens": 1, "kv_transfer_params": _WANTED}
    async with session.post(f"{pair.prefill}/v1/completions", json=asked) as answer:
        answer.raise_for_status()
        params = (await answer.json())["kv_transfer_params"]
    asked = {**body, "max_tokens": 2, "stream": True, "kv_transfer_params": params, "return_token_ids": True}
    async with session.post(f"{pair.decode}/v1/completions", json=asked) as answer:
        answer.raise_for_status()
        first_s = 0.0
        async for line in answer.content:
            if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
                first_s = first_s or time.monotonic()
    if not first_s:
        raise RuntimeError(f"{pair.name}: no token")
    return first_s - started_s


@contextlib.contextmanager
def _farfill(model: Path, folder: Path) -> Iterator[Pair]:
    from farfill.cli.local_cluster import DECODE, PREFILL, LocalCluster, LocalPlan
    from farfill.cli.local_ports import HOST, free_ports
    from farfill.cli.local_ready import until_ready

    port, *fronts = free_ports(3)
    listens = {name: {"vllm_listen": f"{HOST}:{front}"} for name, front in zip((PREFILL, DECODE), fronts, strict=True)}
    plan = LocalPlan(
        model_name="tiny",
        model_dir=model,
        port=port,
        threshold_tokens=1,
        chunk_tokens=256,
        timeout_ms=60_000,
        kv_cache_mb=256,
        overrides={
            "engine": {"type": "vllm", "vllm_args": ["--enforce-eager"], "prefix_cache_mb": 0},
            "kv_transfer": {"compression": "none"},
            "workers": listens,
        },
    )
    with LocalCluster(plan, keep_logs=folder / "farfill-logs") as cluster:
        cluster.start()
        asyncio.run(until_ready(cluster, note))
        urls = [f"http://{HOST}:{front}" for front in fronts]
        roots = tuple(child.pid for child in cluster.children)
        yield Pair(name="farfill", model="tiny", prefill=urls[0], decode=urls[1], roots=roots)


@contextlib.contextmanager
def _nixl(model: Path, folder: Path) -> Iterator[Pair]:
    from tests.vllm_engine.serve import free_port, launch, serving

    path = os.pathsep.join([str(_nixl_packages(folder)), *filter(None, [os.environ.get("PYTHONPATH")])])
    servers = [
        launch(
            model,
            folder / f"nixl-{role}.log",
            "--served-model-name=tiny",
            transfer={"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"},
            environment={**_UCX, "PYTHONPATH": path, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        )
        for role in ("kv_producer", "kv_consumer")
    ]
    with serving(servers):
        yield Pair(
            name="nixl",
            model="tiny",
            prefill=servers[0].url,
            decode=servers[1].url,
            roots=tuple(server.process.pid for server in servers),
        )


def nixl_missing() -> str:
    """Why there is no NIXL to compare with; empty when there is."""
    return "" if list(PEERS.glob(f"lib/python3*/site-packages/{_NIXL}")) else "run `make bench-peers` first"


def _nixl_packages(folder: Path) -> Path:
    """NIXL and no other package of its environment, also under the name that vLLM looks for."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = PEERS / "lib" / version / "site-packages"
    target = folder / "nixl-packages"
    (target / "nixl").mkdir(parents=True)
    for name in (_NIXL, f"{_NIXL}.libs", f".{_NIXL}.mesonpy.libs"):
        if (packages / name).exists():
            (target / name).symlink_to(packages / name)
    (target / "nixl" / "__init__.py").write_text("")
    for module in ("_api", "_bindings"):
        (target / "nixl" / f"{module}.py").write_text(f"from {_NIXL}.{module} import *\n")
    (target / "nixl" / "_api.py").write_text(f"from {_NIXL}._api import nixl_agent, nixl_agent_config\n")
    return target
