"""The gateway's recording: a line for each prompt, for `farfill plan capacity` and `farfill simulate --replay`.

Private: no text, no token ids, no names of clients. Prefix keys, tenants and sessions go through a hash whose key is
made at the start and kept nowhere, so equal ones can be told from different ones, within one run of a gateway, and
nothing else. `wire.recording` is the format.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from farfill.config.model import ClusterConfig
from farfill.gateway.line_log import LineLog
from farfill.gateway.pipeline.job import Job
from farfill.gateway.records import RequestRecord
from farfill.wire.control import PrefillReport, StartEvent
from farfill.wire.recording import (
    RECORDING_VERSION,
    RecordedEngine,
    RecordedPrefill,
    RecordedRequest,
    RecordedTransfer,
)

_ID_BITS = 63
"""Readers of other traces take ids for signed numbers."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One prompt; turned into its line by the writing thread."""

    recording: Recording
    record: RequestRecord
    keys: Sequence[bytes]
    session: str
    forced: str

    def line(self) -> bytes:
        return self.recording.encode(self.record, self.keys, self.session, self.forced)


class Recording(LineLog[_Entry]):
    """A file of at most `max_bytes`; a full one is kept as NAME.1 and begun anew."""

    name = "recording"

    def __init__(
        self, path: Path, max_bytes: int, on_dropped: Callable[[int], None], config: Callable[[], ClusterConfig]
    ) -> None:
        super().__init__(path, max_bytes, on_dropped)
        self._config = config
        self._key = secrets.token_bytes(32)

    def ended(self, record: RequestRecord, job: Job | None) -> None:
        """A prompt and its far prefill ended; `job` None: it never began. Never waits."""
        if job is None:
            self.add([_Entry(self, record, (), "", "")])
        else:
            self.add([_Entry(self, record, job.keys, job.session, "" if job.forced is None else str(job.forced))])

    def encode(self, record: RequestRecord, keys: Sequence[bytes], session: str, forced: str) -> bytes:
        """Its line, without the end."""
        config = self._config()
        stages, start, report = record.stages_s, record.start, record.prefill
        remote = record.placement == "remote"
        return msgspec.json.encode(
            RecordedRequest(
                timestamp=round(record.accepted_unix_s * 1000, 3),
                input_length=record.prompt_tokens,
                output_length=record.completion_tokens,
                hash_ids=[self._number(key) for key in keys],
                v=RECORDING_VERSION,
                block_tokens=config.prefill.chunked_prefill_tokens,
                model=record.model,
                engine=RecordedEngine(
                    type=config.engine.type,
                    max_batch=config.engine.max_batch,
                    step_tokens=config.engine.step_token_budget,
                    prefix_cache_mb=config.engine.prefix_cache_mb,
                ),
                tenant=self._name(record.tenant),
                session=self._name(f"{record.tenant}:{session}" if session else ""),
                outcome=record.outcome,
                error="" if record.error is None else record.error.reason,
                forced=forced,
                placed=record.placed,
                placement=record.placement,
                reason=record.reason,
                fallback=record.fallback,
                threshold_tokens=record.threshold_tokens,
                adaptive=config.routing.threshold == "auto",
                decode=record.decode_instance,
                decode_site=record.decode_site,
                cached_tokens=record.cached_tokens,
                before_s=_rounded(stages.get("tokenize", 0.0) + stages.get("hash", 0.0)),
                queued_s=_rounded(stages.get("queue", 0.0)),
                ttft_s=None if record.ttft_s is None else _rounded(record.ttft_s),
                tpot_s=None if record.tpot_s is None else _rounded(record.tpot_s),
                duration_s=_rounded(record.duration_s),
                prefill=_far(record, report) if remote and report is not None else _near(record, start),
                transfer=_transfer(report) if remote and report is not None else None,
            )
        )

    def _number(self, key: bytes) -> int:
        digest = blake2b(key, key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> (64 - _ID_BITS)

    def _name(self, text: str) -> str:
        return blake2b(text.encode(), key=self._key, digest_size=8).hexdigest() if text else ""


def _far(record: RequestRecord, report: PrefillReport) -> RecordedPrefill:
    return RecordedPrefill(
        instance=record.prefill_instance,
        site=record.prefill_site,
        seconds=_rounded(report.prefill_s),
        queued_s=_rounded(report.queued_s),
        cached_tokens=report.cached_tokens,
        computed_tokens=report.computed_tokens,
    )


def _near(record: RequestRecord, start: StartEvent | None) -> RecordedPrefill | None:
    """Decode computed the prompt, or never said what came of it."""
    if start is None or start.prefilled_at == "remote":
        return None
    return RecordedPrefill(
        instance=record.decode_instance,
        site=record.decode_site,
        seconds=_rounded(start.prefill_s),
        queued_s=_rounded(start.queued_s),
        cached_tokens=start.cached_tokens,
        computed_tokens=start.computed_tokens,
    )


def _transfer(report: PrefillReport) -> RecordedTransfer:
    return RecordedTransfer(
        seconds=_rounded(report.transfer_s),
        after_prefill_s=_rounded(report.after_prefill_s),
        raw_bytes=report.raw_bytes,
        wire_bytes=report.wire_bytes,
        pieces=report.chunks,
        link_bytes_per_s=round(report.link_bytes_per_s, 1),
        link_rtt_s=_rounded(report.link_rtt_s),
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
