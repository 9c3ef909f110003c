"""Decisions as JSON lines, and the same decision again from a line. Pure.

A line holds the policy's name, everything it looked at, and what it decided. Replaying runs today's code on the inputs
of then: in a test, it proves that nothing else was looked at; on a recorded hour, what a change of policy would change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from farfill.core.errors import ProtocolError
from farfill.policy.budget import BudgetAnswer, BudgetInputs, decide_budget
from farfill.policy.candidates import Candidate, PlacementRequest
from farfill.policy.decider import OffloadDecision, OffloadQuery, decide_offload
from farfill.policy.placement import Choice, PlacementProfile, ProfileSettings
from farfill.policy.rollout import (
    GuardLimits,
    Share,
    ShareQuery,
    StepDecision,
    StepObservation,
    decide_step,
    in_share,
)
from farfill.policy.threshold import ThresholdInputs, ThresholdResult, search_threshold

VERSION = 1


@dataclass(frozen=True, slots=True)
class PlacementInputs:
    """A whole placement: settings, request, candidates."""

    settings: ProfileSettings
    request: PlacementRequest
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class ShareInputs:
    """Whether a request belongs to a share."""

    share: Share | None
    query: ShareQuery


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Whether a rollout may go on."""

    limits: GuardLimits
    seen: StepObservation


@dataclass(frozen=True, slots=True)
class _Policy:
    inputs: Any
    output: Any
    decide: Callable[[Any], Any]


def _place(inputs: PlacementInputs) -> Choice:
    return PlacementProfile(inputs.settings).choose(inputs.request, inputs.candidates)


def _share(inputs: ShareInputs) -> bool:
    return in_share(inputs.share, inputs.query)


def _step(inputs: StepInputs) -> StepDecision:
    return decide_step(inputs.limits, inputs.seen)


POLICIES: dict[str, _Policy] = {
    "placement": _Policy(PlacementInputs, Choice, _place),
    "offload": _Policy(OffloadQuery, OffloadDecision, decide_offload),
    "threshold": _Policy(ThresholdInputs, ThresholdResult, search_threshold),
    "fallback_budget": _Policy(BudgetInputs, BudgetAnswer, decide_budget),
    "rollout_share": _Policy(ShareInputs, bool, _share),
    "rollout_step": _Policy(StepInputs, StepDecision, _step),
}


class _Line(msgspec.Struct, kw_only=True):
    v: int = VERSION
    policy: str
    request: str = ""
    unix_s: float = 0.0
    inputs: msgspec.Raw
    output: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Replayed:
    """`same`: the decision is what it was."""

    policy: str
    request: str
    recorded: Any
    again: Any

    @property
    def same(self) -> bool:
        """Whether nothing changed."""
        return self.recorded == self.again


def record(policy: str, inputs: object, output: object, *, request: str = "", unix_s: float = 0.0) -> bytes:
    """One JSON line, without its line end."""
    assert policy in POLICIES, f"no policy is named {policy}"
    line = _Line(
        policy=policy,
        request=request,
        unix_s=unix_s,
        inputs=msgspec.Raw(msgspec.json.encode(inputs)),
        output=msgspec.Raw(msgspec.json.encode(output)),
    )
    return msgspec.json.encode(line)


def replay(line: bytes) -> Replayed:
    """Decide again. Raises ProtocolError when the line cannot be read."""
    try:
        found = msgspec.json.decode(line, type=_Line)
        if found.v != VERSION:
            raise ProtocolError(f"a decision of version {found.v}, this program reads {VERSION}")
        policy = POLICIES.get(found.policy)
        if policy is None:
            raise ProtocolError(f"no policy is named {found.policy!r}; there are: {', '.join(sorted(POLICIES))}")
        inputs = msgspec.json.decode(found.inputs, type=policy.inputs)
        recorded = msgspec.json.decode(found.output, type=policy.output)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"no recorded decision: {error}") from error
    return Replayed(found.policy, found.request, recorded, policy.decide(inputs))
