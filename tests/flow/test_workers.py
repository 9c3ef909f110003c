"""A request through a prefill and a decode worker: the same tokens whatever fails, and nothing left behind."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog

from farfill.core.cluster import FallbackReason
from farfill.kv.manifest import build_manifest
from farfill.wire.control import MAX_TEXT_BYTES, FailTransferCommand
from support.transfer_harness import DECODE, PREFILL
from support.worker_harness import CHUNK, RefusedError, TwoWorkers

LENGTH = 5 * CHUNK + 7
PREFIX_BYTES = 1 << 20


async def remote(two: TwoWorkers, prompt: list[int], *, continues: bool = False, **options):
    """Both legs at the same moment, as a gateway starts them; `continues`: decode is expected to hold some already."""
    ticket = two.ticket(prompt, continues=continues)
    return await asyncio.gather(two.prefill(prompt, ticket), two.decode(prompt, ticket, **options))


@pytest.mark.parametrize("length", [2, CHUNK, CHUNK + 1, CHUNK + 2, LENGTH])
async def test_far_prefill_gives_the_tokens_of_local_prefill(tmp_path: Path, length: int):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(length)
        report, answer = await remote(two, prompt)
        assert answer.tokens == two.expected(prompt)
        assert answer.start.prefilled_at == "remote"
        assert answer.start.fallback == "none"
        assert answer.start.received_tokens == report.computed_tokens == length - 1
        assert answer.start.computed_tokens == answer.start.cached_tokens == 0
        assert answer.start.raw_bytes == report.raw_bytes > 0
        assert two.metric(PREFILL, "farfill_prefill_tokens_total", source="computed") == length - 1
        assert two.metric(DECODE, "farfill_transfers_total", outcome="ok") == 1


@pytest.mark.parametrize("length", [10, LENGTH])
async def test_windows_travel_too_and_alone_cannot_be_resumed(tmp_path: Path, length: int):
    async with TwoWorkers.running(tmp_path, window_tokens=20) as two:
        prompt = two.prompt(length)
        _, answer = await remote(two, prompt)
        assert answer.tokens == two.expected(prompt)
        assert answer.start.prefilled_at == "remote"
        full, window = two.row_bytes
        assert answer.start.raw_bytes == (length - 1) * full + min(length - 1, 20) * window


async def test_local_prompt_of_one_token_is_served(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(1)
        answer = await two.decode(prompt)
        assert answer.tokens == two.expected(prompt)
        assert answer.start.prefilled_at == "local"


async def test_prompt_that_comes_as_text_gives_the_tokens_of_its_ids(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        text = "a short prompt"
        answer = await two.decode([], text=text)
        assert answer.tokens == two.expected(list(text.encode()))
        assert answer.start.prompt_tokens == len(text)


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [([1], {"text": "x"}, "text"), ([], {"text": "x" * (MAX_TEXT_BYTES + 1)}, "text"), ([], {"text": ""}, "token_ids")],
)
async def test_prompt_is_either_text_or_ids_and_not_long_text(
    tmp_path: Path, prompt: list[int], fields: dict[str, Any], param: str
):
    async with TwoWorkers.running(tmp_path) as two:
        with pytest.raises(RefusedError) as refused:
            await two.decode(prompt, **fields)
        assert refused.value.status == 400
        assert param in refused.value.body.message or "prompt tokens" in refused.value.body.message


async def test_choices_share_one_prefill(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        report, answer = await remote(two, prompt, n=3)
        assert answer.tokens.count(two.expected(prompt)[0]) >= 3
        assert len(answer.tokens) == 3 * 12
        assert report.computed_tokens == LENGTH - 1


async def test_failure_told_by_the_gateway_falls_back_with_its_reason(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        ticket = two.ticket(prompt)
        waiting = asyncio.create_task(two.decode(prompt, ticket, timeout_s=15.0))
        await two.until(lambda: two.ends.receiver.held_transfers() == 1)
        await two.fail(ticket.transfer_id, FailTransferCommand(reason="prefill_unreachable", detail="refused"))
        answer = await waiting
        assert answer.tokens == two.expected(prompt)
        assert (answer.start.prefilled_at, answer.start.fallback) == ("local", "prefill_unreachable")
        assert answer.start.computed_tokens == LENGTH - 1
        assert two.metric(DECODE, "farfill_worker_fallbacks_total", reason="prefill_unreachable") == 1


async def test_failure_told_before_the_wait_began_counts_too(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        ticket = two.ticket(prompt)
        await two.fail(ticket.transfer_id, FailTransferCommand(reason="prefill_lost"))
        answer = await two.decode(prompt, ticket, timeout_s=15.0)
        assert answer.tokens == two.expected(prompt)
        assert answer.start.fallback == "prefill_lost"


async def test_silent_far_side_times_out_and_is_computed_here(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        answer = await two.decode(prompt, two.ticket(prompt), timeout_s=0.2)
        assert answer.tokens == two.expected(prompt)
        assert answer.start.fallback == "transfer_timeout"


@pytest.mark.parametrize("chunks", [1, 3, 5])
async def test_failed_prefill_resumes_from_the_chunks_that_arrived(tmp_path: Path, chunks: int):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        expected = two.expected(prompt)
        ticket = two.ticket(prompt)
        two.gates[PREFILL].hold("prefill", after=chunks)
        prefilling = asyncio.create_task(two.prefill(prompt, ticket))
        decoding = asyncio.create_task(two.decode(prompt, ticket, timeout_s=15.0))
        pieces_per_chunk = len(two.decode_engine.info.layout.tensors)
        received = two.ends.receiver_seen.counts
        await two.until(lambda: received["received:none"] == chunks * pieces_per_chunk)
        prefilling.cancel()
        await asyncio.wait([prefilling])
        answer = await decoding
        two.gates[PREFILL].release()
        assert answer.tokens == expected
        assert answer.start.received_tokens == chunks * CHUNK
        assert answer.start.computed_tokens == LENGTH - 1 - chunks * CHUNK
        assert answer.start.fallback == "prefill_lost"


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
async def test_failed_prefill_of_a_hybrid_resumes_from_its_last_checkpoint(tmp_path: Path, chunks: int):
    async with TwoWorkers.running(tmp_path, window_tokens=20, states=True, checkpoint_every_chunks=2) as two:
        prompt = two.prompt(LENGTH)
        expected = two.expected(prompt)
        ticket = two.ticket(prompt)
        two.gates[PREFILL].hold("prefill", after=chunks)
        prefilling = asyncio.create_task(two.prefill(prompt, ticket))
        decoding = asyncio.create_task(two.decode(prompt, ticket, timeout_s=15.0))
        manifest = build_manifest(two.decode_engine.info.layout, LENGTH - 1)
        pieces = sum(len(group) for group in manifest.by_prefill_chunk[:chunks])
        received = two.ends.receiver_seen.counts
        await two.until(lambda: received["received:none"] == pieces)
        prefilling.cancel()
        await asyncio.wait([prefilling])
        answer = await decoding
        two.gates[PREFILL].release()
        assert answer.tokens == expected
        usable = chunks // 2 * 2 * CHUNK
        assert answer.start.received_tokens == usable
        assert answer.start.computed_tokens == LENGTH - 1 - usable


async def test_engine_error_far_away_is_told_at_once(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        expected = two.expected(prompt)

        def broken(kind: str) -> None:
            raise RuntimeError("cosmic ray")

        two.prefill_engine.executor.step = broken
        ticket = two.ticket(prompt)
        prefilling = asyncio.create_task(two.prefill(prompt, ticket))
        answer = await two.decode(prompt, ticket, timeout_s=15.0)
        with pytest.raises(RefusedError, match="cosmic ray"):
            await prefilling
        assert answer.tokens == expected
        assert answer.start.fallback == "prefill_failed"


async def test_without_fallback_the_answer_is_503_with_retry_after(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        with pytest.raises(RefusedError) as refused:
            await two.decode(prompt, two.ticket(prompt), timeout_s=0.2, allow_fallback=False)
        assert refused.value.status == 503
        assert refused.value.body.reason == "transfer_timeout"
        assert int(refused.value.headers["Retry-After"]) >= 1


async def test_no_kv_memory_to_receive_falls_back_and_waits_its_turn(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        engine = two.decode_engine
        prompt = two.prompt(LENGTH)
        expected = two.expected(prompt)
        per_token = engine.info.layout.bytes_per_token
        room = engine.info.max_context_tokens - 32
        big = two.prompt(engine.info.kv_total_bytes // per_token - 64) if room <= 0 else two.prompt(room)
        two.gates[DECODE].hold("decode")
        hogs = [
            asyncio.create_task(two.decode(big, max_tokens=16, request_id=f"hog-{i}"))
            for i in range(engine.info.kv_total_bytes // (per_token * len(big)) + 1)
        ]
        await two.until(lambda: engine.load().waiting_sequences > 0)
        ticket = two.ticket(prompt)
        waiting = asyncio.create_task(two.decode(prompt, ticket))
        await two.until(lambda: two.metric(DECODE, "farfill_worker_fallbacks_total", reason="kv_memory") == 1)
        two.gates[DECODE].release()
        answer = await waiting
        assert answer.tokens == expected
        assert answer.start.fallback == str(FallbackReason.KV_MEMORY)
        for hog in hogs:
            assert len((await hog).tokens) == 16


async def test_client_that_leaves_while_kv_is_on_its_way_frees_both_sides(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        ticket = two.ticket(prompt)
        two.gates[PREFILL].hold("prefill", after=2)
        legs = [
            asyncio.create_task(two.prefill(prompt, ticket, timeout_s=15.0)),
            asyncio.create_task(two.decode(prompt, ticket, timeout_s=15.0)),
        ]
        await two.until(lambda: two.ends.receiver_seen.counts["received:none"] > 0)
        for leg in legs:
            leg.cancel()
        await asyncio.wait(legs)
        two.gates[PREFILL].release()
        await two.idle()
        assert two.metric(DECODE, "farfill_worker_requests_total", outcome="cancelled") == 1


async def test_client_that_leaves_while_nothing_came_yet_ends_the_wait_at_once(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        leg = asyncio.create_task(two.decode(prompt, two.ticket(prompt), timeout_s=600.0))
        await two.until(lambda: two.ends.receiver.held_transfers() == 1)
        leg.cancel()
        await asyncio.wait([leg])
        await two.idle()
        await two.until(lambda: two.metric(DECODE, "farfill_worker_requests_total", outcome="cancelled") == 1)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_client_that_leaves_during_local_work_frees_it(tmp_path: Path, phase: str):
    async with TwoWorkers.running(tmp_path) as two:
        two.gates[DECODE].hold(phase, after=2)
        leg = asyncio.create_task(two.decode(two.prompt(LENGTH), max_tokens=64))
        await asyncio.to_thread(two.gates[DECODE].entered.wait, 10.0)
        leg.cancel()
        await asyncio.wait([leg])
        two.gates[DECODE].release()
        await two.idle()
        await two.until(lambda: two.metric(DECODE, "farfill_worker_requests_total", outcome="cancelled") == 1)


async def test_generation_that_breaks_after_its_first_token_ends_with_an_error(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        steps = iter(range(1000))

        def break_later(kind: str) -> None:
            if kind == "decode" and next(steps) >= 3:
                raise RuntimeError("lost the device")

        two.decode_engine.executor.step = break_later
        answer = await two.decode(two.prompt(40))
        assert len(answer.tokens) == 3
        assert answer.failed is not None
        assert "lost the device" in answer.failed.message
        assert answer.events[-1] is answer.failed


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"prefill": "another"}, 403, "ticket_wrong_peer"),
        ({"expires_unix_s": 1.0}, 403, "ticket_expired"),
        ({"fingerprint": "0" * 64}, 409, "fingerprint_mismatch"),
        ({"num_tokens": 5}, 400, "invalid_request"),
    ],
)
async def test_prefill_refuses_a_ticket_that_does_not_fit(tmp_path: Path, changes, status: int, reason: str):
    async with TwoWorkers.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        with pytest.raises(RefusedError) as refused:
            await two.prefill(prompt, two.ticket(prompt, **changes))
        assert (refused.value.status, refused.value.body.reason) == (status, reason)


async def test_other_fingerprint_far_away_is_refused_before_any_byte(tmp_path: Path):
    async with TwoWorkers.running(tmp_path, far_fingerprint="0" * 64) as two:
        prompt = two.prompt(LENGTH)
        ticket = two.ticket(prompt, fingerprint="0" * 64)
        expected = two.expected(prompt)
        prefilling = asyncio.create_task(two.prefill(prompt, ticket))
        answer = await two.decode(prompt, ticket)
        assert answer.tokens == expected
        assert answer.start.fallback == "fingerprint_mismatch"
        with pytest.raises(RefusedError):
            await prefilling
        assert two.ends.receiver_seen.counts["received:none"] == 0


async def test_only_gateways_of_this_version_are_served(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        worker = two.ends.pki.name("prefill-other", role="prefill", site="far").client()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=worker)) as session:
            async with session.post(two.urls[DECODE] + "/v1/decode", data=b"") as response:
                assert response.status == 403
            async with session.get(two.urls[DECODE] + "/metrics") as response:
                assert b"farfill_held_transfers" in await response.read()
        async with two.session.post(
            two.urls[DECODE] + "/v1/decode", data=b"", headers={"x-farfill-protocol": "99"}
        ) as response:
            assert response.status == 426
        async with two.session.post(two.urls[DECODE] + "/v1/decode", data=b"\xc1") as response:
            assert response.status == 400


async def test_control_port_logs_a_handshake_it_refuses(tmp_path: Path):
    async with TwoWorkers.running(tmp_path) as two:
        anonymous = ssl.create_default_context(cafile=str(two.ends.pki.ca))
        anonymous.check_hostname = False
        with structlog.testing.capture_logs() as logged:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=anonymous)) as session:
                with pytest.raises(aiohttp.ClientError):
                    await session.get(two.urls[DECODE] + "/health")
            await two.until(lambda: logged)
        assert logged[0]["reason"] == "identity_refused"
        assert "certificate" in logged[0]["detail"]


@pytest.mark.parametrize(("token_ids", "max_tokens"), [([], 4), ([33] * 5000, 4), ([33], 5000), ([33], 0), ([999], 4)])
async def test_impossible_commands_are_refused(tmp_path: Path, token_ids, max_tokens: int):
    async with TwoWorkers.running(tmp_path) as two:
        with pytest.raises(RefusedError) as refused:
            await two.decode(token_ids, max_tokens=max_tokens)
        assert refused.value.status == 400


async def test_what_decode_holds_of_a_prefix_is_not_sent(tmp_path: Path):
    """A prompt that begins like an earlier one: only the rest travels, counted in bytes on the wire on both ends."""
    async with TwoWorkers.running(tmp_path, prefix_cache_bytes=PREFIX_BYTES) as two:
        prompt = two.prompt(LENGTH)
        await two.decode(prompt[: 3 * CHUNK + 2])  # three whole chunks stay in decode's prefix cache
        report, answer = await remote(two, prompt, continues=True)
        assert answer.tokens == two.expected(prompt)
        assert answer.start.prefilled_at == "remote"
        row_bytes, _ = two.row_bytes
        missing = LENGTH - 1 - 3 * CHUNK
        assert report.raw_bytes == answer.start.raw_bytes == missing * row_bytes
        sent = two.metric(PREFILL, "farfill_transfer_wire_bytes_total")
        assert (
            sent == two.metric(DECODE, "farfill_transfer_wire_bytes_total") == report.wire_bytes == missing * row_bytes
        )
        assert answer.start.received_tokens == missing


@pytest.mark.parametrize("length", [4 * CHUNK + 1, 4 * CHUNK + 2])
async def test_prefix_held_whole_sends_only_what_is_not_there(tmp_path: Path, length: int):
    """N-1 tokens are four whole chunks: nothing travels; one more token: that one alone."""
    async with TwoWorkers.running(tmp_path, prefix_cache_bytes=PREFIX_BYTES) as two:
        prompt = two.prompt(length)
        await two.decode(prompt[: 4 * CHUNK + 1])
        ticket = two.ticket(prompt)
        answer = (
            await two.decode(prompt, ticket)
            if length == 4 * CHUNK + 1
            else (await remote(two, prompt, continues=True))[1]
        )
        assert answer.tokens == two.expected(prompt)
        row_bytes, _ = two.row_bytes
        assert answer.start.raw_bytes == (length - 1 - 4 * CHUNK) * row_bytes
        assert answer.start.prefilled_at == "remote"


async def test_another_tenants_prefix_saves_nothing(tmp_path: Path):
    async with TwoWorkers.running(tmp_path, prefix_cache_bytes=PREFIX_BYTES) as two:
        prompt = two.prompt(LENGTH)
        await two.decode(prompt, cache_salt="one")
        ticket = two.ticket(prompt)
        report, answer = await asyncio.gather(
            two.prefill(prompt, ticket, cache_salt="two"), two.decode(prompt, ticket, cache_salt="two")
        )
        assert answer.tokens == two.expected(prompt)
        row_bytes, _ = two.row_bytes
        assert report.raw_bytes == (LENGTH - 1) * row_bytes


async def test_windows_travel_though_the_rows_before_them_are_held(tmp_path: Path):
    """Windows of the end are of this prompt alone; what grows and is held at decode need not come."""
    async with TwoWorkers.running(tmp_path, window_tokens=20, prefix_cache_bytes=PREFIX_BYTES) as two:
        prompt = two.prompt(LENGTH)
        await two.decode(prompt[: 3 * CHUNK + 2])
        report, answer = await remote(two, prompt, continues=True)
        assert answer.tokens == two.expected(prompt)
        full, window = two.row_bytes
        assert report.raw_bytes == (LENGTH - 1 - 3 * CHUNK) * full + 20 * window


async def test_lossy_kv_is_marked_and_reused_only_where_it_is_marked_again(tmp_path: Path):
    async with TwoWorkers.running(tmp_path, prefix_cache_bytes=PREFIX_BYTES, lossy="int8") as two:
        prompt = two.prompt(LENGTH)
        _, answer = await remote(two, prompt)
        assert answer.start.lossy == "int8"
        assert two.metric(DECODE, "farfill_lossy_requests_total", form="int8") == 1
        local = await two.decode(prompt)
        assert (local.start.lossy, local.start.cached_tokens) == ("", 0)
        report, again = await remote(two, [*prompt, *two.prompt(CHUNK, seed=2)], continues=True)
        assert again.start.lossy == "int8"
        row_bytes, _ = two.row_bytes
        assert report.raw_bytes < LENGTH * row_bytes, "what came before did not travel again"
        assert two.metric(DECODE, "farfill_lossy_requests_total", form="int8") == 2


async def test_fallback_without_any_received_kv_is_not_marked_lossy(tmp_path: Path):
    async with TwoWorkers.running(tmp_path, lossy="int8") as two:
        prompt = two.prompt(LENGTH)
        answer = await two.decode(prompt, two.ticket(prompt), timeout_s=0.2)
        assert answer.start.fallback == "transfer_timeout"
        assert answer.start.lossy == ""
