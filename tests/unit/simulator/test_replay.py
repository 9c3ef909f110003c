"""A recording is learned from and replayed: what went into it comes out of the fit, and the command judges the rest."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from farfill.cli.main import app
from farfill.core.errors import ConfigError
from farfill.planner.trace import read_trace
from farfill.simulator.fit import scenario_of_recording
from farfill.simulator.run import simulate
from farfill.wire.recording import (
    RecordedEngine,
    RecordedPrefill,
    RecordedRequest,
    RecordedTransfer,
)

STEP_S = 0.02
KV_BYTES = 1000
LINK = 2e6


def prefill_s(tokens: int) -> float:
    """Of either site."""
    return 1e-3 * tokens + 1e-7 * tokens**2


def recorded(number: int) -> RecordedRequest:
    """One request every five seconds, so that none waits for another; every other one goes far."""
    prompt, output, far = 300 + 37 * number, 5 + number % 7, bool(number % 2)
    computed = prompt - 1
    seconds, size = prefill_s(computed), computed * KV_BYTES
    moved = size / LINK
    # In chunks of 256: the first one must be computed before anything leaves, and the last one left after all.
    first = prefill_s(min(256, computed)) / 16
    arrives_s = max(seconds + min(256, computed) / 16 * KV_BYTES / LINK, first + moved) + 0.005
    return RecordedRequest(
        timestamp=5000.0 * number,
        input_length=prompt,
        output_length=output,
        hash_ids=list(range(1000 * number, 1000 * number + prompt // 256)),
        v=1,
        block_tokens=256,
        model="m",
        engine=RecordedEngine(type="torch", max_batch=8, step_tokens=256, prefix_cache_mb=64),
        tenant="t",
        outcome="ok",
        placed="remote" if far else "local",
        placement="remote" if far else "local",
        reason="above_threshold",
        forced="remote" if far else "local",
        threshold_tokens=512,
        decode="d",
        decode_site="near",
        before_s=0.001,
        ttft_s=0.001 + (arrives_s if far else seconds) + STEP_S,
        tpot_s=STEP_S,
        duration_s=0.001 + (arrives_s if far else seconds) + STEP_S * output,
        prefill=RecordedPrefill(
            instance="p" if far else "d", site="far" if far else "near", seconds=seconds, computed_tokens=computed
        ),
        transfer=RecordedTransfer(
            seconds=arrives_s,
            after_prefill_s=arrives_s - seconds,
            raw_bytes=size,
            wire_bytes=size,
            pieces=16 * -(-computed // 256),
            link_bytes_per_s=LINK,
            link_rtt_s=0.01,
        )
        if far
        else None,
    )


def recording(folder: Path, *, requests: int = 24, slower: float = 1.0) -> Path:
    """The file; with `slower` what clients waited is not what its parts say."""
    path = folder / "recording.jsonl"
    lines = [recorded(number) for number in range(requests)]
    for line in lines:
        line.ttft_s = (line.ttft_s or 0.0) * slower
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def test_the_parts_come_out_of_the_recording(tmp_path: Path) -> None:
    scenario = scenario_of_recording(recording(tmp_path))
    (far, link), near = scenario.problem.far[0], scenario.problem.near
    assert (near.name, far.name, scenario.fleet.near_decode, scenario.fleet.far) == ("near", "far", 1, {"far": 1})
    for profile in (near.profile, far.profile):
        assert profile.seconds_at(1000) == pytest.approx(prefill_s(1000), rel=0.01)
    assert near.profile.step_s(1, 500) == pytest.approx(STEP_S, rel=0.05)
    assert (link.bytes_per_s, link.rtt_s) == (LINK, 0.01)
    assert scenario.problem.kv.bytes_at(1000) == pytest.approx(1000 * KV_BYTES, rel=0.01)
    assert scenario.file.engine.pieces_per_chunk == 16
    assert scenario.file.caches.decode_tokens == pytest.approx(64 * 2**20 / KV_BYTES, rel=0.01)


def test_what_decode_had_already_makes_kv_no_smaller(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    lines = [recorded(number) for number in range(24)]
    for line in lines[15:21:2]:
        assert line.transfer is not None
        line.transfer.wire_bytes //= 2
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    kv = scenario_of_recording(path).problem.kv
    assert kv.bytes_at(1000) == pytest.approx(1000 * KV_BYTES, rel=0.01)
    assert kv.bytes_at(1) < 20 * KV_BYTES


def test_a_link_carries_at_least_what_it_carried(tmp_path: Path) -> None:
    """Senders that wait for prefill see less than there is."""
    path = tmp_path / "recording.jsonl"
    lines = [recorded(number) for number in range(24)]
    for line in lines[1::2]:
        assert line.transfer is not None
        line.transfer.link_bytes_per_s = LINK / 10
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    fastest = max(line.transfer.wire_bytes / line.transfer.seconds for line in lines if line.transfer is not None)
    assert scenario_of_recording(path).problem.far[0][1].bytes_per_s == pytest.approx(fastest, rel=0.01)


def test_a_machine_that_is_slower_at_times_is_so_in_the_replay(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    lines = [recorded(number) for number in range(24)]
    for number, line in enumerate(lines):
        assert line.prefill is not None
        assert line.ttft_s is not None
        if number % 4 >= 2:
            line.ttft_s += line.prefill.seconds
            line.prefill.seconds *= 2
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    scenario = scenario_of_recording(path)
    fast = [pace for number, pace in enumerate(scenario.paces) if number % 4 < 2]
    slow = [pace for number, pace in enumerate(scenario.paces) if number % 4 >= 2]
    assert max(fast) < 1 < min(slow)
    replayed = simulate(scenario).replayed
    assert replayed is not None
    assert abs(replayed.ttft_off) < 0.03


def test_a_replay_waits_as_long_as_was_measured(tmp_path: Path) -> None:
    replayed = simulate(scenario_of_recording(recording(tmp_path))).replayed
    assert replayed is not None
    assert (replayed.requests, replayed.same_placement, replayed.within) == (24, 1.0, True)
    assert abs(replayed.ttft_off) < 0.03
    assert abs(replayed.throughput_off) < 0.01


@pytest.mark.parametrize(("slower", "status"), [(1.0, 0), (1.5, 1)])
def test_the_command_says_whether_it_is_within_the_bound(tmp_path: Path, slower: float, status: int) -> None:
    path = str(recording(tmp_path, slower=slower))
    table = CliRunner().invoke(app, ["simulate", "--replay", path])
    assert table.exit_code == status
    assert "mean TTFT" in table.stdout
    as_json = CliRunner().invoke(app, ["simulate", "--replay", path, "--json", "--bound", "0.1"])
    assert as_json.exit_code == status
    assert json.loads(as_json.stdout)["replayed"]["within"] is not bool(status)


def test_a_recording_is_a_trace_with_blocks_of_its_own(tmp_path: Path) -> None:
    requests = read_trace(recording(tmp_path))
    assert requests[3].input_tokens == 300 + 37 * 3


def test_too_little_to_learn_from_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 requests ended well, too few"):
        scenario_of_recording(recording(tmp_path, requests=3))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "empty; a trace has one JSON object"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n', "no gateway's recording"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "block_tokens": 16}\n', "missing required field `v`"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 1\n', ":2: "),
    ],
)
def test_what_is_no_recording_is_refused_with_what_it_is(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    ran = CliRunner().invoke(app, ["simulate", "--replay", str(path)])
    assert told in str(ran.exception)


def test_a_trace_of_different_blocks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    line = '{"timestamp": 0, "input_length": 5, "output_length": 1, "block_tokens": %d}\n'
    path.write_text(line % 16 + line % 32)
    with pytest.raises(ConfigError, match="differ in block_tokens"):
        read_trace(path)
