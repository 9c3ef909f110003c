"""The life of a request as people read it: every step with its time, the scores, and what went wrong. Pure.

Times are seconds after the request was accepted, of the gateway's clock. What decode and the far side did is told in
durations of their own clocks, placed where the gateway saw it begin: `clock` names whose they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from farfill.gateway.decisions import Decision
from farfill.gateway.records import RequestRecord
from farfill.policy.replay import PlacementInputs


class Step(msgspec.Struct, kw_only=True):
    """One step. `took_s` None: it is an event. `at_s` None: it happened within the step before it."""

    name: str
    clock: str
    at_s: float | None = None
    took_s: float | None = None
    detail: str = ""


class Scored(msgspec.Struct, kw_only=True):
    """One candidate of a placement: its total and each scorer's score times its weight, or the filter it failed."""

    instance: str
    total: float | None = None
    scores: dict[str, float] = {}
    rejected: str = ""
    picked: bool = False


class Ranking(msgspec.Struct, kw_only=True):
    """One placement decision."""

    role: str
    candidates: list[Scored]


class Life(msgspec.Struct, kw_only=True):
    """GET /admin/requests/{id}. `gateway` is the process that served it; `record` all it is made of."""

    gateway: str
    state: str
    steps: list[Step]
    rankings: list[Ranking]
    record: RequestRecord


def life_of(record: RequestRecord, gateway: str) -> Life:
    """`record` may still be running."""
    return Life(
        gateway=gateway,
        state=record.outcome or "running",
        steps=list(_steps(record)),
        rankings=[ranking(decision) for decision in record.decisions if _is_placement(decision)],
        record=record,
    )


def ranking(decision: Decision) -> Ranking:
    """Who was asked, best first, then those a filter kept out."""
    inputs, choice = decision.inputs, decision.output
    assert isinstance(inputs, PlacementInputs), "checked by the caller"
    weights = {name: weight for name, weight in inputs.settings.weights.items() if weight}
    output: Any = choice
    passed = [
        Scored(
            instance=inputs.candidates[index].instance.name,
            total=total,
            scores={name: weight * score for (name, weight), score in zip(weights.items(), scores, strict=True)},
            picked=index == output.index,
        )
        for index, total, scores in output.scores
    ]
    passed.sort(key=lambda scored: (not scored.picked, -(scored.total or 0.0)))
    failed = [Scored(instance=inputs.candidates[i].instance.name, rejected=name) for i, name in output.rejected]
    return Ranking(role=str(inputs.request.role), candidates=[*passed, *failed])


def _is_placement(decision: Decision) -> bool:
    return decision.policy == "placement"


def _steps(record: RequestRecord) -> Iterator[Step]:
    yield Step(name="accepted", clock="gateway", at_s=0.0, detail=f"{record.endpoint}, {record.prompt_tokens} tokens")
    for name in ("tokenize", "hash", "queue"):
        if name in record.stages_at_s:
            yield Step(name=name, clock="gateway", at_s=record.stages_at_s[name], took_s=record.stages_s.get(name))
    dispatch_s = record.stages_at_s.get("dispatch")
    if dispatch_s is not None:
        yield Step(
            name="dispatch", clock="gateway", at_s=dispatch_s, took_s=record.stages_s.get("dispatch"),
            detail="from here to the first token",
        )  # fmt: skip
    yield from _placements(record)
    yield from _far(record)
    yield from _near(record)
    if record.ttft_s is not None:
        yield Step(name="first token", clock="gateway", at_s=record.ttft_s)
    if "stream" in record.stages_at_s:
        yield Step(
            name="decode",
            clock="gateway",
            at_s=record.stages_at_s["stream"],
            took_s=record.stages_s.get("stream"),
            detail=f"{record.completion_tokens} tokens"
            + ("" if record.tpot_s is None else f", {record.tpot_s * 1000:.1f} ms each"),
        )
    if record.error is not None:
        yield Step(name="error", clock="gateway", detail=f"{record.error.reason}: {record.error.message}")
    if record.outcome:
        yield Step(name="ended", clock="gateway", at_s=record.duration_s, detail=record.outcome)


def _placements(record: RequestRecord) -> Iterator[Step]:
    for number, tried in enumerate(record.tries):
        far = f", prefill {tried.prefill_instance}" if tried.prefill_instance else ", prefill there"
        yield Step(
            name="placement" if not number else f"placement {number + 1}",
            clock="gateway",
            at_s=tried.at_s,
            took_s=tried.took_s,
            detail=f"decode {tried.decode_instance}{far} ({tried.reason})",
        )


def _far(record: RequestRecord) -> Iterator[Step]:
    for step in record.continuations:
        yield Step(
            name="continued",
            clock="gateway",
            detail=f"{step.failed_instance} failed ({step.reason}: {step.detail}); {step.prefill_instance} goes on with"
            f" {step.held_bytes} bytes there already: {step.outcome or 'running'}",
        )
    if record.prefill_error is not None:
        error = record.prefill_error
        yield Step(
            name="far prefill failed", clock="gateway", took_s=record.prefill_leg_s,
            detail=f"{error.reason}: {error.message}",
        )  # fmt: skip
    report = record.prefill
    if report is None:
        return
    where = record.prefill_instance
    yield Step(name="prefill queue", clock=where, took_s=report.queued_s)
    yield Step(
        name="prefill", clock=where, took_s=report.prefill_s,
        detail=f"{report.computed_tokens} tokens computed, {report.cached_tokens} from its cache",
    )  # fmt: skip
    yield Step(
        name="transfer", clock=where, took_s=report.transfer_s,
        detail=f"{report.wire_bytes} bytes in {report.chunks} chunks ({report.codec}), {report.after_prefill_s:.3f} s"
        " of it after prefill",
    )  # fmt: skip
    for retry in report.retries:
        yield Step(
            name="chunk again", clock=where, detail=f"chunk {retry.chunk}, {retry.at_s:.3f} s into it: {retry.reason}"
        )
    if report.resent_chunks > len(report.retries):
        yield Step(name="chunk again", clock=where, detail=f"{report.resent_chunks - len(report.retries)} more")


def _near(record: RequestRecord) -> Iterator[Step]:
    start, where = record.start, record.decode_instance
    if record.fallback not in ("", "none"):
        yield Step(name="fallback", clock=where, detail=f"{record.fallback}: {record.fallback_detail}")
    if start is None:
        return
    if start.prefilled_at == "remote" or start.kv_wait_s:
        yield Step(
            name="KV arrived", clock=where, took_s=start.kv_wait_s,
            detail=f"{start.received_tokens} tokens, {start.wire_bytes} bytes",
        )  # fmt: skip
    if start.queued_s or start.prefill_s or start.computed_tokens:
        yield Step(name="decode queue", clock=where, took_s=start.queued_s)
        yield Step(
            name="local prefill", clock=where, took_s=start.prefill_s,
            detail=f"{start.computed_tokens} tokens computed, {start.cached_tokens} from its cache",
        )  # fmt: skip
    rest_s = start.first_token_s - start.kv_wait_s - start.queued_s - start.prefill_s
    yield Step(
        name="import and first token",
        clock=where,
        took_s=max(0.0, rest_s),
        detail=f"{start.first_token_s:.3f} s in all",
    )
