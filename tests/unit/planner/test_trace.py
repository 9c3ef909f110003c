"""Traces in Mooncake's form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farfill.planner.trace import TraceError, arrival_burstiness, read_trace


def write(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def request(at_ms: float, tokens: int, *blocks: int, output: int = 10) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": list(blocks)}


def test_a_perfect_cache_finds_leading_blocks(tmp_path: Path):
    path = write(
        tmp_path,
        request(0, 1500, 1, 2, 3),
        request(1000, 1600, 1, 2, 9, 10),
        "",
        request(2000, 1024, 1, 2),
        request(3000, 1024, 7, 2),
    )
    found = read_trace(path)
    assert [r.uncached_tokens for r in found] == [1500, 1600 - 1024, 1, 1024]
    assert [r.arrival_s for r in found] == [0, 1, 2, 3]


def test_a_small_cache_forgets_the_least_recently_used(tmp_path: Path):
    path = write(tmp_path, request(0, 512, 1), request(1, 512, 2), request(2, 600, 1), request(3, 600, 2))
    assert [r.uncached_tokens for r in read_trace(path, cache_blocks=1)] == [512, 512, 600, 600]
    assert [r.uncached_tokens for r in read_trace(path, cache_blocks=2)] == [512, 512, 88, 88]
    assert [r.uncached_tokens for r in read_trace(path, cache_blocks=0)] == [512, 512, 600, 600]


def test_requests_are_sorted_by_arrival(tmp_path: Path):
    assert [r.input_tokens for r in read_trace(write(tmp_path, request(9, 2), request(1, 1)))] == [1, 2]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "trace.jsonl:2: "),
        ({"timestamp": 0, "input_length": 1}, "trace.jsonl:2: Object missing required field `output_length`"),
        (request(0, -5), "trace.jsonl:2: input_length is at least 1, not -5"),
        (request(0, 5, output=-1), "trace.jsonl:2: output_length is at least 0, not -1"),
        (request(-1, 5), "trace.jsonl:2: timestamp is at least 0, not -1"),
        ({**request(0, 1), "input_length": "long"}, "Expected `int`, got `str`"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: object, told: str):
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path, request(0, 5), line, request(0, 5)))
    assert told in str(caught.value)


def test_many_broken_lines_are_summed_up(tmp_path: Path):
    with pytest.raises(TraceError, match="and 30 more lines"):
        read_trace(write(tmp_path, *["x"] * 50))


def test_an_empty_trace_is_refused(tmp_path: Path):
    with pytest.raises(TraceError, match="empty; a trace has one JSON object"):
        read_trace(write(tmp_path))
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "nowhere")


def test_burstiness_is_zero_for_a_clock_and_high_for_bursts(tmp_path: Path):
    clock = read_trace(write(tmp_path, *(request(1000 * i, 1) for i in range(50))))
    bursts = read_trace(write(tmp_path, *(request(10_000 * (i // 10) + i % 10, 1) for i in range(50))))
    assert arrival_burstiness(clock) == pytest.approx(0.0)
    assert arrival_burstiness(bursts) > 5
    assert arrival_burstiness(clock[:1]) == 1.0


def test_lines_out_of_order_are_sorted_and_doubted(tmp_path: Path):
    path = write(tmp_path, request(5000, 100), request(1000, 200), request(9000, 300), request(2000, 400))
    doubts: list[str] = []
    assert [r.input_tokens for r in read_trace(path, doubts=doubts)] == [200, 400, 100, 300]
    assert len(doubts) == 1
    assert doubts[0].startswith("trace.jsonl: not in order of time (2 of 4 lines are earlier than the one before)")
    assert read_trace(write(tmp_path, request(1000, 1), request(1000, 2)), doubts=doubts)
    assert len(doubts) == 1


def test_a_recording_may_have_another_order(tmp_path: Path):
    lines = [{**request(at, 100), "block_tokens": 512} for at in (5000, 1000)]
    doubts: list[str] = []
    assert [r.arrival_s for r in read_trace(write(tmp_path, *lines), doubts=doubts)] == [1, 5]
    assert not doubts
