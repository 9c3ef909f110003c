"""What the gateway costs: latency it adds to a short request, and how long its event loop stands still.

The gateway runs in this process, alone on its event loop; a child process plays the workers and the client, as
other machines would. (a) The same short generation is asked of the worker directly and through the gateway, in
turns. (b) A ticker in the gateway's loop measures its longest standstill while prompts of 100 000 tokens pass
through every step: JSON, chat template, tokenizer, hashing, placement, both legs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import io
import json
import pydoc_data.topics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import structlog
import uvloop
from aiohttp import web

from _common import Figures, median, note, note_machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from farfill.cli.model_store import fetch, find_source
from farfill.core.cluster import Role
from farfill.gateway.app import build_runner
from farfill.gateway.service import GatewayDeps
from farfill.gateway.tokenizer import LoadedTokenizer, load_tokenizer
from farfill.wire.control import DecodeCommand, SamplingMessage, TokensEvent
from farfill.wire.events import EventReader
from support.gateway_harness import StubMembership, make_config
from support.stub_worker import StubWorker, Transfers, sign_stub_ticket

ADDED_MS_LIMIT = 3.0
BLOCK_MS_LIMIT = 50.0
LONG_PROMPT_TOKENS = 100_000
TICK_S = 0.001


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2 from the model cache)")
    parser.add_argument("--requests", type=int, default=300, help="short requests each way")
    parser.add_argument("--long-requests", type=int, default=5, help="long requests of each kind")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        uvloop.run(play_peer(args.requests, args.long_requests))
        return 0
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    note_machine()
    folder = args.model or fetch(find_source("smollm2"), accept_terms=False, report=note)
    figures = Figures()
    uvloop.run(measure(folder, args.requests, args.long_requests, figures))
    return figures.exit_code


async def measure(folder: Path, requests: int, long_requests: int, figures: Figures) -> None:
    """The gateway's side: serve, tick, and turn what the peer measured into figures."""
    model = dataclasses.replace(load_tokenizer(folder), context_tokens=1_000_000)
    command = [sys.executable, __file__, "--peer", "--requests", str(requests), "--long-requests", str(long_requests)]
    peer = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 26
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    try:
        workers = json.loads(await peer.stdout.readline())
        async with gateway(model, workers) as url:
            peer.stdin.write(f"{json.dumps({'url': url, 'text': long_text(model), 'ids': long_ids(model)})}\n".encode())
            await peer.stdin.drain()
            short = json.loads(await peer.stdout.readline())
            added_ms = (median(short["gateway_s"]) - median(short["direct_s"])) * 1000
            note(
                f"direct {median(short['direct_s']) * 1000:.2f} ms, gateway {median(short['gateway_s']) * 1000:.2f} ms"
            )
            figures.at_most("gateway_added_ms_median", added_ms, ADDED_MS_LIMIT)
            for kind, worst_ms in (await longest_blocks(peer.stdout)).items():
                figures.at_most(f"gateway_loop_blocked_ms_{kind}", worst_ms, BLOCK_MS_LIMIT)
    finally:
        if peer.returncode is None:
            peer.stdin.close()
            await peer.wait()


async def longest_blocks(told: asyncio.StreamReader) -> dict[str, float]:
    """Longest standstill of this loop, in ms, for each kind of long request the peer tells of.

    The worst of all requests of one kind, so run it on a quiet machine: what else runs here counts too.
    """
    blocked_ms: dict[str, list[float]] = {}
    async with ticking() as late:
        while line := await told.readline():
            done = json.loads(line)
            longest_ms = max(late) * 1000
            late.clear()
            note(
                f"{done['kind']}: {done['prompt_tokens']} tokens, {done['seconds']:.2f} s, {done['placement']}, "
                f"blocked {longest_ms:.1f} ms"
            )
            if done["prompt_tokens"] < LONG_PROMPT_TOKENS or done["placement"] != "remote":
                raise RuntimeError("the long prompt did not take the whole path")
            blocked_ms.setdefault(done["kind"], []).append(longest_ms)
    return {kind: max(values) for kind, values in blocked_ms.items()}


@contextlib.asynccontextmanager
async def gateway(model: LoadedTokenizer, workers: dict[str, str]) -> AsyncIterator[str]:
    """A gateway in front of the peer's workers; yields its address."""
    transfers = Transfers()
    decode = StubWorker("decode-near", Role.DECODE, transfers, max_context_tokens=2_000_000)
    prefill = StubWorker("prefill-far", Role.PREFILL, transfers, site="far")
    decode.listen_at(workers["decode"])
    prefill.listen_at(workers["prefill"])
    deps = GatewayDeps(
        config=make_config(Path("unused"), routing={"remote_prefill_threshold_tokens": 4096},
                           prefill={"chunked_prefill_tokens": 512}),
        model=model,
        membership=StubMembership([decode, prefill]),
        sign_ticket=sign_stub_ticket,
        worker_tls=None,
    )  # fmt: skip
    runner = build_runner(deps, shutdown_timeout_s=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[float]]:
    """A list that grows by how late (seconds) each tick of the running loop was."""
    late: list[float] = []

    async def tick() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(time.monotonic() - due_s)

    ticker = asyncio.create_task(tick())
    try:
        yield late
    finally:
        ticker.cancel()


def long_ids(model: LoadedTokenizer) -> list[int]:
    """Token ids of at least 100 000 tokens of prose."""
    prose = "\n".join(pydoc_data.topics.topics.values())
    ids = model.encode(prose, add_special_tokens=False)
    while len(ids) < LONG_PROMPT_TOKENS:
        ids = ids + ids
    return ids[: LONG_PROMPT_TOKENS + 100]


def long_text(model: LoadedTokenizer) -> str:
    """Their text; with a margin, because it may tokenize a little differently."""
    ids = long_ids(model)
    return model.decode(ids + ids[:500])


async def play_peer(requests: int, long_requests: int) -> None:
    """Workers and client: announce the workers, wait for the gateway, measure, tell, exit."""
    transfers = Transfers()
    decode = StubWorker("decode-near", Role.DECODE, transfers)
    prefill = StubWorker("prefill-far", Role.PREFILL, transfers, site="far")
    await decode.start()
    await prefill.start()
    tell({"decode": decode.url, "prefill": prefill.url})
    told = json.loads(await asyncio.to_thread(sys.stdin.readline))
    async with aiohttp.ClientSession() as client:
        tell(await short_requests(client, told["url"], decode.url, requests))
        for i in range(long_requests):
            for kind, path, body in long_bodies(told["text"], told["ids"], salt=str(i)):
                started_s = time.monotonic()
                async with client.post(told["url"] + path, data=io.BytesIO(body)) as response:
                    answer = await response.json()
                seconds = time.monotonic() - started_s
                placement = response.headers.get("x-farfill-placement", "")
                tokens = answer["usage"]["prompt_tokens"]
                tell({"kind": kind, "seconds": seconds, "prompt_tokens": tokens, "placement": placement})
    await prefill.stop()
    await decode.stop()


async def short_requests(
    client: aiohttp.ClientSession, gateway_url: str, worker_url: str, requests: int
) -> dict[str, list[float]]:
    """Seconds of each request, whole, in turns: first warmed up, then measured."""
    body = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Tell me a story. " * 10}]}
    async with client.post(gateway_url + "/tokenize", json={"messages": body["messages"]}) as response:
        ids = (await response.json())["tokens"]
    command = msgspec.msgpack.encode(
        DecodeCommand(request_id="r", token_ids=ids, sampling=SamplingMessage(max_tokens=8), timeout_s=4.0)
    )
    seconds: dict[str, list[float]] = {"gateway_s": [], "direct_s": []}
    for i in range(requests + 30):
        started_s = time.perf_counter()
        async with client.post(worker_url + "/v1/decode", data=command) as response:
            events = list(EventReader().feed(await response.read()))
        between_s = time.perf_counter()
        async with client.post(gateway_url + "/v1/chat/completions", json=body) as response:
            answer = json.loads(await response.read())
        ended_s = time.perf_counter()
        text = "".join(event.text for event in events if isinstance(event, TokensEvent))
        if answer["choices"][0]["message"]["content"] != text:
            raise RuntimeError("the two ways gave different answers")
        if i >= 30:
            seconds["direct_s"].append(between_s - started_s)
            seconds["gateway_s"].append(ended_s - between_s)
    return seconds


def long_bodies(text: str, ids: list[int], salt: str) -> list[tuple[str, str, bytes]]:
    """Kind, path and body of each long request. No two share a salt: all are placed far."""
    bodies = [
        ("chat_text", "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("completion_text", "/v1/completions", {"prompt": text}),
        ("completion_ids_echoed", "/v1/completions", {"prompt": ids, "echo": True}),
    ]
    return [
        (kind, path, json.dumps({"model": "tiny", "max_tokens": 2, "cache_salt": kind + salt, **fields}).encode())
        for kind, path, fields in bodies
    ]


def tell(message: object) -> None:
    """One line to the measuring process."""
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
