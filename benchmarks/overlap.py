"""Overlap: does the KV really travel while prefill computes?

A two-site cluster on this machine, SmolLM2, with the path from prefill to decode worker going through a relay that
limits rate and adds delay. Before each run the relay is set so that moving the KV takes about 0.7 of the prefill time
of the run before it (the first one unlimited); what was reached is a figure of its own (0.5 to 0.9). Then

    TTFT(offloaded) <= 1.15 x max(prefill, transfer) + 2 RTT

with TTFT as the client sees it (request sent to first token read), prefill as the far worker reports it for that very
request, and transfer as the bytes that passed the relay over its rate. The figure printed is
(TTFT - 2 RTT) / max(prefill, transfer), the median over the repetitions. Without overlap it would be about 1.7.

Each worker computes with one thread, so each site has a core of its own; no codec, so that bytes are bytes; every
request has its own cache salt, so no prefix hit helps. Only the KV path is slowed down, not the control calls.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass

from _common import Figures, median, note, note_machine
from farfill.cli.local_cluster import DECODE, LocalCluster, LocalPlan
from farfill.cli.local_ports import HOST, free_ports
from farfill.cli.local_ready import until_ready
from farfill.cli.model_store import find_source, model_folder
from farfill.testing.relay import Relay
from farfill.verify.client import GatewayClient, Generation, gateway_client
from farfill.verify.corpus import Corpus
from farfill.verify.prompts import load_corpus

LENGTHS = (2_000, 4_000, 6_000)
CHUNK_TOKENS = 256
TRANSFER_SHARE = 0.7
ONE_WAY_S = 0.02
RTT_S = 2 * ONE_WAY_S
LIMIT = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One offloaded request. `kv_bytes` passed the relay, chunks that were sent again included."""

    ttft_s: float
    prefill_s: float
    kv_bytes: int
    resent_chunks: int


async def main() -> int:
    """Measure; the exit status."""
    arguments = _arguments()
    note_machine()
    source = find_source("smollm2")
    transfer_port, relay_port, port = free_ports(3)
    plan = LocalPlan(
        model_name=source.folder,
        model_dir=model_folder(source),
        port=port,
        threshold_tokens=1,
        chunk_tokens=CHUNK_TOKENS,
        timeout_ms=60_000,
        dtype="bfloat16",
        overrides={
            "engine": {"threads": 1},
            "kv_transfer": {"compression": "none"},
            "workers": {
                DECODE: {
                    "transfer_listen": f"{HOST}:{transfer_port}",
                    "transfer_advertise": f"{HOST}:{relay_port}",
                }
            },
        },
    )
    note(
        f"model {source.title}, bfloat16, prefill chunks of {CHUNK_TOKENS} tokens, one-way delay {ONE_WAY_S * 1e3:g} ms"
    )
    figures = Figures()
    with Relay(f"{HOST}:{transfer_port}", listen=f"{HOST}:{relay_port}") as relay, LocalCluster(plan) as cluster:
        cluster.start()
        await until_ready(cluster, note)
        async with gateway_client(cluster.url) as client:
            corpus = await load_corpus(client)
            await _offloaded(client, relay, corpus.prompt_of(600), "warm-up")
            for length in LENGTHS:
                await _measure(client, relay, corpus, length, arguments.repeat, figures)
    return figures.exit_code


async def _measure(
    client: GatewayClient, relay: Relay, corpus: Corpus, length: int, repeat: int, figures: Figures
) -> None:
    relay.set_rate(None)
    relay.delay_s = 0.0
    before = await _offloaded(client, relay, corpus.prompt_of(length, 0), f"free-{length}")
    note(f"{length} tokens, no limit: {_told(before)}")
    relay.delay_s = ONE_WAY_S
    shares: list[float] = []
    ratios: list[float] = []
    for variant in range(1, repeat + 1):
        rate = before.kv_bytes / (TRANSFER_SHARE * before.prefill_s)
        relay.set_rate(rate)
        before = run = await _offloaded(client, relay, corpus.prompt_of(length, variant), f"{length}-{variant}")
        transfer_s = run.kv_bytes / rate
        note(f"{length} tokens, {rate / 1e6:.2f} MB/s: {_told(run)}, transfer {transfer_s:.2f} s")
        shares.append(transfer_s / run.prefill_s)
        ratios.append((run.ttft_s - 2 * RTT_S) / max(run.prefill_s, transfer_s))
    figures.between(f"overlap_transfer_share_of_prefill_{length}", median(shares), 0.5, 0.9)
    figures.at_most(f"overlap_ttft_over_max_prefill_transfer_{length}", median(ratios), LIMIT)


async def _offloaded(client: GatewayClient, relay: Relay, prompt: tuple[int, ...], salt: str) -> Run:
    """One request forced to the far site. Raises RuntimeError when it was not prefilled there."""
    loop = asyncio.get_running_loop()
    before = relay.up.bytes
    generation = Generation(prompt=prompt, max_tokens=2, salt=f"overlap-{salt}", forced="remote")
    sent_s = loop.time()
    first_s = 0.0
    async with client.stream(generation) as answer:
        async for at_s, _ in answer.events():
            first_s = first_s or at_s
    record = await client.record(answer.request_id)
    if record.placement != "remote" or record.fallback != "none" or record.prefill is None:
        raise RuntimeError(f"not prefilled far away: {record}")
    return Run(
        ttft_s=first_s - sent_s,
        prefill_s=record.prefill.prefill_s,
        kv_bytes=relay.up.bytes - before,
        resent_chunks=record.prefill.resent_chunks,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Overlap of prefill and transfer.")
    parser.add_argument("--repeat", type=int, default=3, help="limited runs per prompt length")
    return parser.parse_args()


def _told(run: Run) -> str:
    again = f" ({run.resent_chunks} chunks again)" if run.resent_chunks else ""
    return f"prefill {run.prefill_s:.2f} s, TTFT {run.ttft_s:.2f} s, KV {run.kv_bytes / 1e6:.1f} MB{again}"


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
