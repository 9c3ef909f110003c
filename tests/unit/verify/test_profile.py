"""Measuring a profile through a gateway, played by one whose times are known."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from farfill.core.errors import ConfigError
from farfill.gateway.records import RequestRecord
from farfill.planner.profile_file import ProfileFile
from farfill.verify.client import gateway_client
from farfill.verify.profile import ProfileError, ProfilePlan, measure_profile
from farfill.wire.control import PrefillReport, StartEvent
from unit.verify.fake_gateway import FakeGateway

PREFILL_S = 0.001


@dataclass
class TimedGateway(FakeGateway):
    """Prefill takes 1 ms a token as workers report it; streams are counted, and all run at the same time."""

    instances: int = 1
    reports: bool = True
    salts: list[str] = field(default_factory=list)
    _lengths: dict[str, int] = field(default_factory=dict)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.salts.append(body["cache_salt"])
        request_id = f"{request.headers.get('x-farfill-force-placement', 'any')}-{len(self.salts)}"
        self._lengths[request_id] = len(body["prompt"])
        if not body["stream"]:
            answer = await super()._complete(request)
            answer.headers["x-request-id"] = request_id
            return answer
        response = web.StreamResponse(headers={"x-request-id": request_id, "x-farfill-placement": "local"})
        await response.prepare(request)
        for token in range(body["max_tokens"]):
            event = {"choices": [{"token_ids": [token]}]}
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
            await asyncio.sleep(0)
        return response

    async def _record(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        tokens = self._lengths[request_id]
        seconds = tokens * PREFILL_S if self.reports else 0.0
        record = RequestRecord(
            request_id=request_id,
            endpoint="completions",
            model="fake",
            accepted_unix_s=0.0,
            stream=False,
            decode_instance=f"decode-{int(request_id.rpartition('-')[2]) % self.instances}",
            start=StartEvent(
                prefilled_at="local",
                fallback="none",
                prompt_tokens=tokens,
                cached_tokens=0,
                received_tokens=0,
                computed_tokens=tokens,
                kv_wait_s=0.0,
                transfer_s=0.0,
                raw_bytes=0,
                wire_bytes=0,
                queued_s=0.0,
                prefill_s=seconds,
                first_token_s=0.0,
            ),
            prefill=PrefillReport(
                queued_s=0.0,
                prefill_s=seconds / 4,
                cached_tokens=0,
                computed_tokens=tokens,
                transfer_s=0.0,
                after_prefill_s=0.0,
                raw_bytes=0,
                wire_bytes=0,
                chunks=1,
                resent_chunks=0,
                codec="none",
            ),
        )
        return web.Response(body=msgspec.json.encode(record), content_type="application/json")


async def measure(gateway: TimedGateway, **changes: object) -> ProfileFile:
    plan = ProfilePlan(
        name="fake",
        accelerator="",
        gpus=1,
        remote=False,
        lengths=(16, 64),
        batches=(1, 3),
        output_tokens=40,
        repeat=2,
    )
    async with TestServer(gateway.app()) as server, gateway_client(str(server.make_url("/"))) as client:
        changed = replace(plan, **changes)  # pyright: ignore[reportArgumentType]
        return await measure_profile(client, changed, lambda _: None)


async def test_prefill_is_what_workers_report_and_no_cache_is_asked():
    gateway = TimedGateway()
    file = await measure(gateway)
    assert [(p.tokens, p.seconds) for p in file.prefill] == [(16, pytest.approx(0.016)), (64, pytest.approx(0.064))]
    prefills = [body["cache_salt"] for body in gateway.seen if body["forced"]]
    assert len(set(prefills)) == len(prefills) == 2 * (2 + 1)  # the first of each length is not counted
    assert [(d.batch, d.context_tokens) for d in file.decode] == [(1, 36), (3, 36), (1, 84), (3, 84)]
    assert all(d.step_s > 0 for d in file.decode)
    assert "model fake, prefill local, median of 2" in file.source


async def test_streams_of_a_batch_find_their_prefill_in_the_cache():
    gateway = TimedGateway()
    await measure(gateway)
    warmed = {body["cache_salt"] for body in gateway.seen if not body["forced"]}
    assert len(warmed) == 3 * 2  # one batch of 3 at two lengths
    assert all(gateway.salts.count(salt) == 2 for salt in warmed)


async def test_remote_takes_the_far_instances_time():
    file = await measure(TimedGateway(), remote=True)
    assert file.prefill[1].seconds == pytest.approx(0.016)


@pytest.mark.parametrize(
    ("gateway", "changes", "error", "told"),
    [
        (TimedGateway(served_as="local"), {"remote": True}, ProfileError, "was to be prefilled remote, but was local"),
        (TimedGateway(instances=2), {}, ProfileError, "3 sequences were decoded by 2 instances"),
        (TimedGateway(reports=False), {}, ProfileError, "no prefill time was reported for 16 tokens"),
        (TimedGateway(), {"lengths": (16, 500)}, ConfigError, "500 + 40 output tokens do not fit the model's context"),
        (TimedGateway(), {"lengths": (1, 16)}, ConfigError, "a prompt of one token has nothing to prefill"),
    ],
)  # fmt: skip
async def test_what_would_be_a_wrong_figure_is_refused(
    gateway: TimedGateway, changes: dict[str, object], error: type[Exception], told: str
):
    with pytest.raises(error) as caught:
        await measure(gateway, **changes)
    assert told in str(caught.value)
