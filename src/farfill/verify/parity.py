"""Does far prefill change a single token? Each case runs once forced remote and once forced local, and must agree.

Both runs have a prefix-cache salt of their own, so neither can profit from the other's KV, and each answer must prove
that it was served as forced: a comparison of two local runs would prove nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest

from farfill.verify.client import (
    Answer,
    ForcedPlacement,
    GatewayClient,
    GatewayRefusedError,
    Generation,
    TokenLogprob,
)
from farfill.verify.prompts import ParityCase, SamplingMode

TOP_LOGPROBS = 5
TEMPERATURE = 0.8
TOP_P = 0.95


class Verdict(StrEnum):
    """How a case ended; only `EQUAL` and `SKIPPED` do not fail the run."""

    EQUAL = "equal"
    DIFFERS = "differs"
    INVALID = "invalid"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first position (from 0) where the sides chose differently. An id is None past a side's end."""

    position: int
    remote_token: int | None
    local_token: int | None
    remote_top: tuple[TokenLogprob, ...]
    local_top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRow:
    """One case compared. `max_logprob_delta` covers the chosen tokens before any divergence."""

    source: str
    prompt_tokens: int
    mode: SamplingMode
    verdict: Verdict
    detail: str = ""
    equal_tokens: int = 0
    output_tokens: int = 0
    max_logprob_delta: float = 0.0
    kv_raw_bytes: int = 0
    kv_wire_bytes: int = 0
    remote_ttft_s: float | None = None
    local_ttft_s: float | None = None
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True)
class ParityResult:
    """All rows of a run."""

    rows: tuple[ParityRow, ...]

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing differed or was invalid."""
        verdicts = {row.verdict for row in self.rows}
        return Verdict.EQUAL in verdicts and verdicts <= {Verdict.EQUAL, Verdict.SKIPPED}


async def run_parity(
    client: GatewayClient,
    cases: Sequence[ParityCase],
    *,
    concurrency: int = 1,
    allow_lossy: bool = False,
    progress: Callable[[ParityRow], None] = lambda row: None,
) -> ParityResult:
    """Compare all cases, `concurrency` at a time. Answers from lossy KV are invalid unless `allow_lossy`.

    Raises GatewayUnreachableError when the gateway goes away.
    """
    room = asyncio.Semaphore(concurrency)
    run_salt = secrets.token_hex(8)

    async def one(number: int, case: ParityCase) -> ParityRow:
        async with room:
            row = await compare_case(client, case, f"parity-{run_salt}-{number}", allow_lossy=allow_lossy)
        progress(row)
        return row

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number, case)) for number, case in enumerate(cases)]
    except* Exception as errors:
        raise errors.exceptions[0] from None
    return ParityResult(tuple(task.result() for task in tasks))


async def compare_case(client: GatewayClient, case: ParityCase, salt: str, *, allow_lossy: bool = False) -> ParityRow:
    """Run one case on both sides and compare."""
    if case.skip:
        return _row(case, Verdict.SKIPPED, case.skip)
    try:
        remote = await client.complete(_generation(case, "remote", f"{salt}-remote"))
        local = await client.complete(_generation(case, "local", f"{salt}-local"))
    except GatewayRefusedError as error:
        return _row(case, Verdict.INVALID, str(error))
    wrong = _not_as_forced(remote, "remote") or _not_as_forced(local, "local")
    if not wrong and not allow_lossy:
        wrong = _not_exact(remote) or _not_exact(local)
    if wrong:
        return _row(case, Verdict.INVALID, wrong)
    if not remote.token_ids or not local.token_ids:
        return _row(case, Verdict.INVALID, "an answer has no tokens")
    return await _compared(client, case, remote, local)


def first_divergence(remote: Answer, local: Answer) -> Divergence | None:
    """Where the two outputs part, None when they are equal to the end."""
    for position, (theirs, ours) in enumerate(zip_longest(remote.token_ids, local.token_ids)):
        if theirs != ours:
            return Divergence(
                position=position,
                remote_token=theirs,
                local_token=ours,
                remote_top=remote.top[position] if position < len(remote.top) else (),
                local_top=local.top[position] if position < len(local.top) else (),
            )
    return None


def _generation(case: ParityCase, forced: ForcedPlacement, salt: str) -> Generation:
    seeded = case.mode is SamplingMode.SEEDED
    return Generation(
        prompt=case.token_ids,
        max_tokens=case.max_tokens,
        salt=salt,
        forced=forced,
        temperature=TEMPERATURE if seeded else 0.0,
        top_p=TOP_P if seeded else 1.0,
        seed=case.seed if seeded else None,
        logprobs=TOP_LOGPROBS,
    )


def _not_as_forced(answer: Answer, forced: ForcedPlacement) -> str:
    if answer.placement != forced:
        reason = answer.fallback or answer.reason
        return f"forced {forced} but served {answer.placement or 'without a placement header'} ({reason})"
    if answer.fallback:
        return f"forced {forced} but fell back ({answer.fallback})"
    return ""


def _not_exact(answer: Answer) -> str:
    if answer.lossy:
        return f"KV travelled as {answer.lossy} (kv_transfer.lossy), outputs may differ; say --allow-lossy to compare"
    return ""


async def _compared(client: GatewayClient, case: ParityCase, remote: Answer, local: Answer) -> ParityRow:
    divergence = first_divergence(remote, local)
    equal = len(remote.token_ids) if divergence is None else divergence.position
    deltas = [abs(a - b) for a, b in zip(remote.logprobs[:equal], local.logprobs[:equal], strict=True)]
    remote_record = await client.record(remote.request_id)
    local_record = await client.record(local.request_id)
    start = remote_record.start
    return replace(
        _row(case, Verdict.EQUAL if divergence is None else Verdict.DIFFERS),
        equal_tokens=equal,
        output_tokens=max(len(remote.token_ids), len(local.token_ids)),
        max_logprob_delta=max(deltas, default=0.0),
        kv_raw_bytes=start.raw_bytes if start is not None else 0,
        kv_wire_bytes=start.wire_bytes if start is not None else 0,
        remote_ttft_s=remote_record.ttft_s,
        local_ttft_s=local_record.ttft_s,
        divergence=divergence,
    )


def _row(case: ParityCase, verdict: Verdict, detail: str = "") -> ParityRow:
    return ParityRow(
        source=case.source, prompt_tokens=len(case.token_ids), mode=case.mode, verdict=verdict, detail=detail
    )
