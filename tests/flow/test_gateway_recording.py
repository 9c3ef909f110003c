"""The gateway's recording: a line a prompt, private, bounded, and a trace that the planner reads."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farfill.planner.trace import read_trace
from farfill.wire.recording import RecordedRequest
from support.gateway_harness import running_gateway

COMPLETIONS = "/v1/completions"
SECRETS = ("alice", "secret words", "conversation-1")


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2, **more}


async def recorded(
    tmp_path: Path, prompts: list[str], **gateway_settings: object
) -> tuple[Path, list[RecordedRequest]]:
    path = tmp_path / "log" / "recording.jsonl"
    async with running_gateway(tmp_path, gateway={"record_file": path, **gateway_settings}) as gateway:
        for prompt in prompts:
            await gateway.post(COMPLETIONS, body(prompt, user="alice"), **{"X-Session-ID": "conversation-1"})
        await gateway.post(COMPLETIONS, body("x", max_tokens=10**9))
    return path, [msgspec.json.decode(line, type=RecordedRequest) for line in path.read_bytes().splitlines()]


async def test_every_prompt_has_its_line_with_what_became_of_it(tmp_path: Path) -> None:
    path, lines = await recorded(tmp_path, ["secret words " * 20, "secret words " * 20 + "more " * 20, "short"])
    refused = [line for line in lines if line.outcome != "ok"]
    far = [line for line in lines if line.placement == "remote"]
    near = [line for line in lines if line.placement == "local"]
    assert (len(lines), len(refused), len(far), len(near)) == (4, 1, 2, 1)
    assert refused[0].error == "context_length_exceeded"
    for line in far:
        assert line.transfer is not None
        assert line.prefill is not None
        assert line.prefill.site == "far"
        assert line.ttft_s is not None
        assert line.ttft_s > 0
        assert line.reason == "above_threshold"
        assert len(line.hash_ids) == (line.input_length - 1) // line.block_tokens
    assert far[0].hash_ids == far[1].hash_ids[: len(far[0].hash_ids)], "the same beginning has the same ids"
    assert near[0].prefill is not None
    assert near[0].prefill.site == "near"
    assert len({line.session for line in (*far, *near)}) == 1
    text = path.read_text()
    assert not [secret for secret in SECRETS if secret in text]


async def test_the_keys_of_two_runs_have_nothing_in_common(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    _, first = await recorded(one, ["secret words " * 20])
    _, second = await recorded(other, ["secret words " * 20])
    assert not set(first[0].hash_ids) & set(second[0].hash_ids)
    assert first[0].tenant != second[0].tenant


async def test_a_recording_is_a_trace_for_the_planner(tmp_path: Path) -> None:
    path, lines = await recorded(tmp_path, ["secret words " * 20, "secret words " * 20])
    requests = read_trace(path)
    assert [r.input_tokens for r in requests] == [line.input_length for line in lines]
    cached = len(lines[1].hash_ids) * lines[1].block_tokens
    assert requests[1].uncached_tokens == lines[1].input_length - cached


async def test_a_full_recording_begins_anew_and_keeps_the_former(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    async with running_gateway(tmp_path, gateway={"record_file": path}) as gateway:
        recording = gateway.service.recording
        assert recording is not None
        recording._max_bytes = 4000
        for i in range(12):
            await gateway.post(COMPLETIONS, body(f"{i}" * 200))
    assert path.stat().st_size <= 4000
    assert path.with_name("recording.jsonl.1").stat().st_size <= 4000


async def test_what_cannot_be_written_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "recording.jsonl"
    async with running_gateway(tmp_path, gateway={"record_file": path}) as gateway:
        path.unlink()
        path.parent.rmdir()
        recording, dropped = gateway.service.recording, list[int]()
        assert recording is not None
        recording._on_dropped = dropped.append
        status, _, _ = await gateway.post(COMPLETIONS, body("x" * 50), **{"X-Request-Id": "r"})
        await gateway.record("r")
        recording.close()
    assert (status, dropped) == (200, [1])
