"""Rollout: which share of requests may go far, and whether the share may grow. Pure.

A request's key (its session, or itself) falls into one of 10,000 slots that never change. Raising the share adds slots
and removes none, so a session that was in stays in. Shares are set per model and tenant; guards hold a step or take
everything back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

STEPS = (1.0, 10.0, 50.0, 100.0)
SLOTS = 10_000
ANY = "*"


class Sticky(StrEnum):
    """What falls into the share as one."""

    SESSION = "session"
    REQUEST = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """`percent` of requests, 0 to 100. Another `salt` draws other ones."""

    percent: float
    sticky: Sticky = Sticky.SESSION
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareQuery:
    """One request. Without a session it counts by itself."""

    model: str
    tenant: str
    session: str
    request: str


def share_for(shares: Mapping[tuple[str, str], Share], model: str, tenant: str) -> Share | None:
    """The most particular share of (model, tenant); `ANY` stands for all. None: no rollout concerns it."""
    for key in ((model, tenant), (model, ANY), (ANY, tenant), (ANY, ANY)):
        if key in shares:
            return shares[key]
    return None


def in_share(share: Share | None, query: ShareQuery) -> bool:
    """Whether the request may go far. Without a share everything may."""
    if share is None or share.percent >= 100:
        return True
    if share.percent <= 0:
        return False
    key = query.session if share.sticky is Sticky.SESSION and query.session else query.request
    return slot_of(share.salt, query.model, query.tenant, key) < share.percent * SLOTS / 100


def slot_of(salt: str, model: str, tenant: str, key: str) -> int:
    """0 .. SLOTS - 1, evenly. Length-prefixed, so that no two different inputs are the same bytes."""
    digest = blake2b(digest_size=8, person=b"farfill-share-1")
    for part in (salt, model, tenant, key):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little") % SLOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLimits:
    """When a step may be followed by the next, is held, or everything is taken back.

    `ttft_ratio`: p95 of prompts prefilled far over p95 of like prompts prefilled near. `link_utilisation` holds only.
    A step lasts at least `min_step_s` and `min_requests` far prefills, with `min_parity` parity samples if any.
    """

    min_step_s: float = 300.0
    min_requests: int = 100
    min_parity: int = 0
    success_rate: float = 0.995
    ttft_ratio_hold: float = 1.0
    ttft_ratio_revert: float = 1.5
    link_utilisation: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """What was seen since the step began. Ratios and rates are None while nothing was measured."""

    percent: float
    step_age_s: float
    far_requests: int
    far_failures: int
    ttft_ratio: float | None
    link_utilisation: float
    parity_samples: int
    parity_mismatches: int


class StepAction(StrEnum):
    """What happens to the share."""

    ADVANCE = "advance"
    HOLD = "hold"
    REVERT = "revert"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class StepDecision:
    """`percent` is the share from now on; `reason` is stable: audit log and metric label."""

    action: StepAction
    percent: float
    reason: str


def decide_step(limits: GuardLimits, seen: StepObservation, steps: tuple[float, ...] = STEPS) -> StepDecision:
    """Revert first: one wrong token, or too many failures, needs no minimum age. Then hold, then advance."""
    revert = _revert_reason(limits, seen)
    if revert:
        return StepDecision(StepAction.REVERT, 0.0, revert)
    hold = _hold_reason(limits, seen)
    if hold:
        return StepDecision(StepAction.HOLD, seen.percent, hold)
    following = [step for step in steps if step > seen.percent]
    if not following:
        return StepDecision(StepAction.DONE, seen.percent, "complete")
    return StepDecision(StepAction.ADVANCE, following[0], "guards_passed")


def _revert_reason(limits: GuardLimits, seen: StepObservation) -> str:
    if seen.parity_mismatches > 0:
        return "parity_mismatch"
    # With few requests a failure or two say little: so many that even a perfect rest would not make up for them.
    allowed = (1 - limits.success_rate) * max(seen.far_requests, limits.min_requests)
    if seen.far_failures > allowed:
        return "success_rate"
    enough = seen.far_requests >= limits.min_requests
    if enough and seen.ttft_ratio is not None and seen.ttft_ratio > limits.ttft_ratio_revert:
        return "ttft"
    return ""


def _hold_reason(limits: GuardLimits, seen: StepObservation) -> str:
    if seen.percent <= 0:
        return "stopped"  # reverted or not begun: only a person begins
    waits = (
        (seen.step_age_s < limits.min_step_s, "step_age"),
        (seen.far_requests < limits.min_requests, "few_requests"),
        (seen.parity_samples < limits.min_parity, "few_parity_samples"),
        # At the last step nobody is left to compare with.
        (seen.ttft_ratio is None and seen.percent < STEPS[-1], "ttft_unknown"),
        (seen.ttft_ratio is not None and seen.ttft_ratio > limits.ttft_ratio_hold, "ttft"),
        (seen.link_utilisation > limits.link_utilisation, "link_utilisation"),
    )
    return next((reason for holds, reason in waits if holds), "")


def version_of(shares: Mapping[str, Share], query: ShareQuery) -> tuple[str, tuple[str, ...]]:
    """(the worker version the request belongs to, "" if none; versions it must not go to), from shares by version.

    Of several versions on their way, the first one by name whose share has the request takes it.
    """
    avoided: list[str] = []
    for version in sorted(shares):
        if in_share(shares[version], query):
            return version, ()
        avoided.append(version)
    return "", tuple(avoided)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInputs:
    """Moving one role to another worker version: `old` and `new` are (fingerprint, protocol version)."""

    old: tuple[str, int]
    new: tuple[str, int]
    spoken: tuple[int, ...]
    prefill_percent: float
    decode_percent: float


def version_refusal(inputs: VersionInputs) -> str:
    """Why a version rollout must not go on as it stands; "" if it may. Prefill first, then decode.

    Two fingerprints exchange no KV: while both run, a prompt's far prefill needs one of its decode's own fingerprint.
    """
    if inputs.new[1] not in inputs.spoken:
        return "protocol_version"
    if inputs.decode_percent > 0 and inputs.prefill_percent < 100 and inputs.old[0] == inputs.new[0]:
        return "prefill_first"
    if inputs.old[0] != inputs.new[0] and inputs.decode_percent > 0 and inputs.prefill_percent <= 0:
        return "no_prefill_of_fingerprint"
    return ""
