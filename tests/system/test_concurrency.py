"""Many requests at once: they advance together, and nobody's prefill holds up the others' tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.system.cluster import Cluster
from tests.system.streams import Received, receive, receive_all

from farfill.verify.client import Generation
from farfill.verify.prompts import load_corpus


async def test_eight_requests_of_mixed_lengths_advance_together(hybrid_cluster: Cluster) -> None:
    lengths = (16, 30, 60, 120, 240, 400, 700, 1_000)  # the last three are prefilled far
    async with hybrid_cluster.client() as client:
        corpus = await load_corpus(client)
        wanted = [
            Generation(prompt=corpus.prompt_of(length, number), max_tokens=200, salt=f"together-{length}")
            for number, length in enumerate(lengths)
        ]
        together = await receive_all(client, wanted)
        alone = [await client.complete(replace(each, salt=f"{each.salt}-alone")) for each in wanted]
    assert [received.placement for received in together] == ["local"] * 5 + ["remote"] * 3
    assert [received.fallback for received in together] == [""] * 8
    # There is a moment when all eight have begun and none is done.
    assert max(received.at_s[0] for received in together) < min(received.at_s[-1] for received in together)
    assert [tuple(received.token_ids) for received in together] == [answer.token_ids for answer in alone]


async def test_a_long_local_prefill_stops_a_running_stream_for_about_one_prefill_chunk(real_cluster: Cluster) -> None:
    long_tokens, chunk_tokens = 1_500, 256
    async with real_cluster.client() as client:
        corpus = await load_corpus(client)
        running = asyncio.Event()

        def note(received: Received) -> None:
            if len(received.token_ids) >= 4:
                running.set()

        short = Generation(prompt=corpus.prompt_of(16, 20), max_tokens=100, salt="itl-short", forced="local")
        long = Generation(prompt=corpus.prompt_of(long_tokens, 21), max_tokens=2, salt="itl-long", forced="local")
        stream = asyncio.create_task(receive(client, short, note))
        await asyncio.wait_for(running.wait(), 60.0)
        began_s = asyncio.get_running_loop().time()
        prefilled = await receive(client, long)
        short_received = await stream
    assert prefilled.record is not None
    assert prefilled.record.start is not None
    first_token_s = prefilled.at_s[0]
    during = [at_s for at_s in short_received.at_s if began_s < at_s < first_token_s]
    chunks = -(-(long_tokens - 1) // chunk_tokens)
    assert len(during) >= chunks - 1, "the stream stood still while the long prompt was prefilled"
    # Later chunks attend to more tokens than the average one; and a decode step lies between two of them.
    chunk_s = (first_token_s - began_s) / chunks
    assert max(short_received.gaps_s) < 3 * chunk_s
