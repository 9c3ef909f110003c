"""Reads request traces in Mooncake's JSONL form, and what a perfect prefix cache would find of each prompt.

One request a line: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}; each id stands for 512
tokens together with all before them. `hash_ids` may be left out: then nothing is cached. Recordings of a gateway
(`wire.recording`) are such traces, with `block_tokens` tokens an id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from farfill.core.errors import ConfigError
from farfill.wire.recording import RECORDING_VERSION, RecordedRequest

BLOCK_TOKENS = 512
_MAX_PROBLEMS = 20


class TraceError(ConfigError):
    """The trace cannot be used; the message names file and line."""

    reason = "trace_invalid"


class TraceLine(msgspec.Struct, kw_only=True):
    """One line; further keys are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    block_tokens: int = BLOCK_TOKENS


Line = TypeVar("Line", TraceLine, RecordedRequest)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`uncached_tokens` are to be prefilled; the others are in the prefix cache by then."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    uncached_tokens: int


def read_trace(path: Path, *, cache_blocks: int | None = None, doubts: list[str] | None = None) -> list[TraceRequest]:
    """All requests in order of arrival. `cache_blocks` bounds the prefix cache (least recently used goes first);
    None: it holds everything, 0: there is none. Raises TraceError naming every bad line."""
    return _with_cache(read_trace_lines(path, doubts=doubts), cache_blocks)


def read_trace_lines(path: Path, *, doubts: list[str] | None = None) -> list[TraceLine]:
    """The lines themselves in order of arrival; `doubts` is told when the file has another order (a recording has:
    its lines are written when answers end). Raises TraceError naming every bad line."""
    found = _read(path, TraceLine)
    late = sum(after.timestamp < before.timestamp for before, after in pairwise(found))
    if late and doubts is not None and not is_recording(path):
        doubts.append(
            f"{path.name}: not in order of time ({late} of {len(found)} lines are earlier than the one before); it is"
            " taken in that order, which is wrong if the file is several traces in a row"
        )
    found.sort(key=_when)
    if len({line.block_tokens for line in found}) > 1:
        raise TraceError(f"{path}: lines differ in block_tokens, so ids do not compare; keep those of one value")
    return found


def is_recording(path: Path) -> bool:
    """Whether the first line is one of a gateway's recording. False when it cannot be read."""
    try:
        with path.open("rb") as lines:
            return b'"block_tokens"' in next((line for line in lines if line.strip()), b"")
    except OSError:
        return False


def read_recording(path: Path) -> list[RecordedRequest]:
    """A gateway's recording in order of arrival. Raises TraceError naming every bad line."""
    return sorted(_read(path, RecordedRequest), key=_when)


def _when(line: TraceLine | RecordedRequest) -> float:
    return line.timestamp


def _read(path: Path, kind: type[Line]) -> list[Line]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    decoder = msgspec.json.Decoder(kind)
    found: list[Line] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_checked(decoder.decode(line)))
        except (msgspec.DecodeError, ValueError) as error:
            problems.append(f"{path}:{number}: {error}; mend the line or take it out")
    if problems:
        more = [f"{path}: and {len(problems) - _MAX_PROBLEMS} more lines"] if len(problems) > _MAX_PROBLEMS else []
        raise TraceError("\n".join(problems[:_MAX_PROBLEMS] + more))
    if not found:
        raise TraceError(
            f"{path}: empty; a trace has one JSON object with timestamp, input_length and output_length a line"
        )
    return found


def _checked(line: Line) -> Line:
    if line.input_length < 1:
        raise ValueError(f"input_length is at least 1, not {line.input_length}")
    if line.output_length < 0:
        raise ValueError(f"output_length is at least 0, not {line.output_length}")
    if line.timestamp < 0:
        raise ValueError(f"timestamp is at least 0, not {line.timestamp:g}")
    if line.block_tokens < 1:
        raise ValueError(f"block_tokens is at least 1, not {line.block_tokens}")
    if isinstance(line, RecordedRequest) and line.v != RECORDING_VERSION:
        raise ValueError(f"a recording of version {line.v}, this program reads {RECORDING_VERSION}")
    return line


def _with_cache(lines: Sequence[TraceLine], cache_blocks: int | None) -> list[TraceRequest]:
    cached: OrderedDict[int, None] = OrderedDict()
    requests: list[TraceRequest] = []
    for line in lines:
        hit = 0
        for block in line.hash_ids:
            if block not in cached:
                break
            hit += 1
        for block in line.hash_ids:
            cached[block] = None
            cached.move_to_end(block)
        while cache_blocks is not None and len(cached) > cache_blocks:
            cached.popitem(last=False)
        # Decode computes the last prompt token itself, whatever is cached.
        hit_tokens = min(hit * line.block_tokens, line.input_length - 1)
        requests.append(
            TraceRequest(line.timestamp / 1000, line.input_length, line.output_length, line.input_length - hit_tokens)
        )
    return requests


def arrival_burstiness(requests: Sequence[TraceRequest]) -> float:
    """Squared coefficient of variation of the gaps between arrivals: 1 for a Poisson stream, more for bursts."""
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    if mean <= 0:
        return 1.0
    return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
