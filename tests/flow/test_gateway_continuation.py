"""Another prefill instance continues after one failed: chosen by the gateway, agreed with decode, told to people."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import Role
from farfill.wire.control import ErrorBody
from support.gateway_harness import Harness, running_gateway
from support.stub_worker import HELD_BYTES, StubWorker

COMPLETIONS = "/v1/completions"
BODY = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 2}
BROKEN = (500, ErrorBody(reason="engine_error", message="broke"))
FULL = (503, ErrorBody(reason="capacity", message="full", retryable=True, retry_after_s=1))
CUT = (503, ErrorBody(reason="link_lost", message="cut", retryable=True, side="link"))


async def add_prefill(gateway: Harness, name: str, site: str, **knobs: Any) -> StubWorker:
    """Another far worker; `stop` is the caller's."""
    stub = StubWorker(name, Role.PREFILL, gateway.decode.transfers, site=site, **knobs)
    await stub.start()
    gateway.membership.workers.append(stub)
    return stub


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path, kv_transfer={"timeout_ms": 2000}) as harness:
        yield harness


@pytest.fixture
async def other(gateway: Harness) -> AsyncIterator[StubWorker]:
    """A second one at another site; it comes later in the order of equals."""
    stub = await add_prefill(gateway, "prefill-other", "other")
    yield stub
    await stub.stop()


async def complete(gateway: Harness, request_id: str = "r1") -> tuple[dict[str, Any], dict[str, str]]:
    status, answer, response = await gateway.post(COMPLETIONS, BODY, **{"X-Request-Id": request_id})
    assert status == 200, answer
    return answer, {name.lower(): value for name, value in response.headers.items()}


async def idle(gateway: Harness) -> None:
    async def settled() -> None:
        work, service = gateway.service.work, gateway.service
        while (
            len(service.background)
            or service.admission.in_progress
            or any(work.requests(w.instance) or work.tokens(w.instance) for w in gateway.membership.workers)
        ):
            await asyncio.sleep(0)

    await asyncio.wait_for(settled(), 10)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        ({"refuse": BROKEN}, "prefill_failed"),
        ({"drop_connections": 9}, "prefill_lost"),
        ({"refuse": CUT}, "link_lost"),
        ({"refuse": FULL}, "prefill_refused"),
    ],
)
async def test_failed_far_worker_is_replaced_and_the_client_sees_tokens_only(
    gateway: Harness, other: StubWorker, break_it: dict[str, Any], reason: str
) -> None:
    for knob, value in break_it.items():
        setattr(gateway.prefill, knob, value)
    answer, headers = await complete(gateway)
    assert answer["choices"][0]["text"] == "w0 w1 "
    assert headers["x-farfill-placement"] == "remote"
    assert headers["x-farfill-continued"] == reason
    assert headers["x-farfill-prefill-instance"] == "prefill-other"
    assert "x-farfill-fallback" not in headers
    first, second = gateway.decode.decodes[0].ticket, other.prefills[0].ticket
    assert first == gateway.prefill.prefills[0].ticket != second
    assert [(i, c.ticket, c.reason) for i, c in gateway.decode.continued] == [(first, second, reason)]
    assert other.prefills[0].token_ids == gateway.prefill.prefills[0].token_ids
    assert gateway.decode.failures_told == []
    record = await gateway.record("r1")
    assert (record["placement"], record["fallback"]) == ("remote", "none")
    assert (record["prefill_instance"], record["prefill_site"]) == ("prefill-other", "other")
    assert (record["transfer_id"], record["prefill_error"]) == (second, None)
    (step,) = record["continuations"]
    assert (step["reason"], step["transfer_id"], step["outcome"]) == (reason, first, "ok")
    assert (step["failed_instance"], step["prefill_instance"]) == ("prefill-far", "prefill-other")
    assert step["held_bytes"] == HELD_BYTES
    await idle(gateway)
    assert gateway.observer.legs == [reason, "ok"]
    assert gateway.observer.continued == [(reason, "ok")]
    assert gateway.observer.finished[0].continued == (reason,)


async def test_unreachable_far_worker_is_replaced(gateway: Harness, other: StubWorker) -> None:
    await gateway.prefill.stop()
    _, headers = await complete(gateway)
    assert headers["x-farfill-continued"] == "prefill_unreachable"
    assert headers["x-farfill-placement"] == "remote"


async def test_silent_far_worker_is_replaced_once_decode_says_so(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, kv_transfer={"timeout_ms": 200}) as gateway:
        gateway.prefill.hold_prefill = asyncio.Event()
        other = await add_prefill(gateway, "prefill-other", "other")
        try:
            _, headers = await complete(gateway)
            assert headers["x-farfill-continued"] == "transfer_timeout"
            assert headers["x-farfill-placement"] == "remote"
            await asyncio.wait_for(gateway.prefill.withdrawn.acquire(), 10)
            await idle(gateway)
            assert gateway.observer.legs == ["transfer_timeout", "ok"]
        finally:
            await other.stop()


async def test_when_the_next_one_fails_too_decode_prefills_with_the_last_reason(
    gateway: Harness, other: StubWorker
) -> None:
    gateway.prefill.refuse = BROKEN
    other.drop_connections = 9
    _, headers = await complete(gateway)
    assert headers["x-farfill-placement"] == "local"
    assert headers["x-farfill-continued"] == "prefill_failed"
    assert headers["x-farfill-fallback"] == "prefill_lost"
    assert [i for i, _ in gateway.decode.failures_told] == [other.prefills[0].ticket]
    await idle(gateway)
    assert gateway.observer.continued == [("prefill_failed", "failed"), ("prefill_lost", "no_instance")]


async def test_continuations_are_limited(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, kv_transfer={"continuations": 2}) as gateway:
        gateway.prefill.refuse = BROKEN
        others = [await add_prefill(gateway, f"prefill-{i}", "other", refuse=BROKEN) for i in range(3)]
        try:
            _, headers = await complete(gateway)
            assert headers["x-farfill-placement"] == "local"
            assert headers["x-farfill-continued"] == "prefill_failed, prefill_failed"
            assert sum(len(stub.prefills) for stub in (gateway.prefill, *others)) == 3
            await idle(gateway)
            assert gateway.observer.continued[-1] == ("prefill_failed", "exhausted")
        finally:
            for stub in others:
                await stub.stop()


async def test_switched_off_nobody_continues_and_decode_does_not_wait(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, kv_transfer={"continuations": 0}) as gateway:
        gateway.prefill.refuse = BROKEN
        other = await add_prefill(gateway, "prefill-other", "other")
        try:
            _, headers = await complete(gateway)
            assert headers["x-farfill-fallback"] == "prefill_failed"
            assert gateway.decode.decodes[0].hold_s == 0.0
            assert other.prefills == []
        finally:
            await other.stop()


@pytest.mark.parametrize(("broken", "takes_over"), [(CUT, "prefill-other"), (BROKEN, "prefill-far-2")])
async def test_fault_of_the_way_goes_to_another_site_first(
    gateway: Harness, other: StubWorker, broken: tuple[int, ErrorBody], takes_over: str
) -> None:
    gateway.prefill.refuse = broken
    neighbour = await add_prefill(gateway, "prefill-far-2", "far")
    try:
        _, headers = await complete(gateway)
        assert headers["x-farfill-prefill-instance"] == takes_over
    finally:
        await neighbour.stop()


async def test_instance_of_another_model_never_continues(gateway: Harness, other: StubWorker) -> None:
    other.fingerprint = "another"
    gateway.prefill.refuse = BROKEN
    _, headers = await complete(gateway)
    assert headers["x-farfill-fallback"] == "prefill_failed"
    assert other.prefills == []


async def test_decode_that_has_moved_on_is_not_sent_a_second_prefill(gateway: Harness, other: StubWorker) -> None:
    gateway.decode.refuse_continuation = True
    gateway.prefill.refuse = BROKEN
    _, headers = await complete(gateway)
    assert headers["x-farfill-fallback"] == "prefill_failed"
    assert other.prefills == []
    await idle(gateway)
    assert gateway.observer.continued == [("prefill_failed", "refused")]


async def test_client_that_leaves_while_another_continues_withdraws_it(gateway: Harness, other: StubWorker) -> None:
    gateway.prefill.refuse = BROKEN
    other.hold_prefill = asyncio.Event()
    request = asyncio.create_task(gateway.post(COMPLETIONS, BODY))
    await asyncio.wait_for(other.received.acquire(), 10)
    request.cancel()
    await asyncio.wait([request])
    await asyncio.wait_for(other.withdrawn.acquire(), 10)
    await asyncio.wait_for(gateway.decode.withdrawn.acquire(), 10)
    await idle(gateway)
    assert gateway.observer.continued == [("prefill_failed", "cancelled")]


async def test_deadline_of_the_request_ends_continuing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, gateway={"site": "near", "request_timeout_s": 0.02}) as gateway:
        gateway.prefill.refuse = BROKEN
        other = await add_prefill(gateway, "prefill-other", "other")
        gateway.decode.hold_before_start = asyncio.Event()
        try:
            status, _, _ = await gateway.post(COMPLETIONS, BODY)
            assert status == 504
            await idle(gateway)
            assert other.prefills == []
        finally:
            await other.stop()
