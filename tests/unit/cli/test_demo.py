"""What `farfill up` says about a request, and when it calls it served as placed."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import web
from rich.console import Console

from farfill.cli import demo_prompts
from farfill.cli.demo import DemoAnswer, DemoFailedError, DemoPrompt, ask
from farfill.cli.demo_report import report
from farfill.cli.local_ports import free_ports, port_is_free
from farfill.gateway.records import RequestRecord
from farfill.wire.control import PrefillReport, StartEvent

LONG = DemoPrompt(title="Long prompt", text="tell me", max_tokens=4, expected="remote")
RECORD = RequestRecord(
    request_id="r",
    endpoint="chat",
    model="tiny",
    accepted_unix_s=0.0,
    stream=True,
    outcome="ok",
    placed="remote",
    placement="remote",
    reason="above_threshold",
    decode_instance="decode-near",
    decode_site="near",
    prefill_instance="prefill-far",
    prefill_site="far",
    prompt_tokens=1450,
    uncached_tokens=1449,
    threshold_tokens=512,
    completion_tokens=64,
    ttft_s=2.5,
    tpot_s=0.05,
    start=StartEvent(
        prefilled_at="remote", fallback="none", prompt_tokens=1450, cached_tokens=0, received_tokens=1449,
        computed_tokens=1, kv_wait_s=2.3, transfer_s=2.2, raw_bytes=66_000_000, wire_bytes=44_000_000,
        queued_s=0.0, prefill_s=0.25, first_token_s=2.4,
    ),
    prefill=PrefillReport(
        queued_s=0.0, prefill_s=2.0, cached_tokens=0, computed_tokens=1449, transfer_s=2.0, after_prefill_s=0.1,
        raw_bytes=66_000_000, wire_bytes=44_000_000, chunks=180, resent_chunks=2, codec="zstd",
    ),
)  # fmt: skip


def shown(record: RequestRecord, prompt: DemoPrompt = LONG) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(report(DemoAnswer(prompt, "A story.", record)))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_far_prefill_is_told_with_bytes_and_hidden_time():
    text = shown(RECORD)
    for part in (
        "Long prompt · as placed",
        "1 450 tokens",
        "at site far by prefill-far: 1 449 uncached tokens are at or above the threshold of 512 (above_threshold)",
        "66.0 MB",
        "44.0 MB (zstd, 1.50x, 180 chunks, 2 sent again)",
        "2.00 s, of these 1.90 s (95%) hidden behind prefill",
        "2.50 s",
        "50.0 ms, 64 tokens",
        "A story.",
    ):
        assert part in text


def test_fallback_is_told_and_not_as_placed():
    record = msgspec.structs.replace(RECORD, placement="local", fallback="link_lost", prefill=None)
    text = shown(record)
    assert "NOT as placed" in text
    assert "link_lost" in text
    assert "at site near by decode-near" in text
    assert "0.25 s for 1 tokens" in text


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"placement": "local"}, False),
        ({"placed": "local", "placement": "local"}, False),
        ({"fallback": "checksum"}, False),
        ({"outcome": "error"}, False),
    ],
)
def test_as_placed_means_placed_and_served_there(changes: dict[str, str], good: bool):
    assert DemoAnswer(LONG, "", msgspec.structs.replace(RECORD, **changes)).as_placed is good


class Gateway:
    """Answers as scripted."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.bodies: list[dict] = []
        self.status = 200

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            await response.write(f"data: {event}\n\n".encode())
        return response

    async def record(self, request: web.Request) -> web.Response:
        assert request.query["wait_s"]
        record = msgspec.structs.replace(RECORD, request_id=request.match_info["request_id"])
        return web.Response(body=msgspec.json.encode(record), content_type="application/json")


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[Gateway, str]]:
    script = Gateway()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", script.generate)
    app.router.add_post("/v1/completions", script.generate)
    app.router.add_get("/v1/farfill/requests/{request_id}", script.record)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield script, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def delta(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


async def test_stream_becomes_text_and_record(gateway):
    script, url = gateway
    script.events = [delta("A "), delta("story."), json.dumps({"choices": []}), "[DONE]"]
    answer = await ask(url, "tiny", LONG, chat=True)
    assert answer.text == "A story."
    assert answer.record.request_id.startswith("up-")
    assert script.bodies[0]["messages"][0]["content"] == "tell me"


async def test_base_models_are_asked_to_continue(gateway):
    script, url = gateway
    script.events = [json.dumps({"choices": [{"text": "more"}]}), "[DONE]"]
    assert (await ask(url, "tiny", LONG, chat=False)).text == "more"
    assert script.bodies[0]["prompt"] == "tell me"


@pytest.mark.parametrize(
    ("events", "status", "complaint"),
    [
        ([delta("A ")], 200, "ended early"),
        ([json.dumps({"error": {"message": "decode died"}})], 200, "decode died"),
        (["{not json"], 200, "Long prompt"),
        ([], 503, "503"),
    ],
)
async def test_answer_that_breaks_is_told(gateway, events, status, complaint):
    script, url = gateway
    script.events, script.status = events, status
    with pytest.raises(DemoFailedError, match=complaint):
        await ask(url, "tiny", LONG, chat=True)


async def test_nobody_there_is_told():
    (port,) = free_ports(1)
    with pytest.raises(DemoFailedError, match="Long prompt"):
        await ask(f"http://127.0.0.1:{port}", "tiny", LONG, chat=True)


def test_ports_are_different_and_free():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(port_is_free(port) for port in ports)


def test_demo_prompts_fall_on_both_sides_of_the_threshold():
    assert 1000 < len(demo_prompts.long_chat_prompt().split()) < 1400
    assert len(demo_prompts.long_base_prompt().split()) > 1000
    assert len(demo_prompts.SHORT.split()) < 20


def test_ports_are_not_given_twice() -> None:
    """Whoever was given one may bind it only later."""
    given = [port for _ in range(300) for port in free_ports(3)]
    assert len(set(given)) == len(given)


def test_a_short_prompt_is_told_with_what_its_worker_counted():
    """The gateway decides on a bound of it."""
    near = {"placement": "local", "reason": "below_threshold", "prefill": None}
    text = shown(msgspec.structs.replace(RECORD, prompt_tokens=37, uncached_tokens=179, **near))
    assert "37 uncached tokens are below the threshold of 512" in text
