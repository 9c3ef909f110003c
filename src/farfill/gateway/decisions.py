"""Decisions with all they rested on: for the request's record, and line by line for `farfill replay`.

The log is written by a thread of its own; what it cannot keep up with is dropped and counted, never waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from farfill.gateway.line_log import LineLog
from farfill.policy.replay import record


class Decision(msgspec.Struct, frozen=True):
    """One policy's answer: the fields of a line of `policy.replay`. Encoded only when somebody looks."""

    policy: str
    inputs: object
    output: object
    request: str
    unix_s: float
    v: int = 1

    def line(self) -> bytes:
        """One JSON line without its end."""
        return record(self.policy, self.inputs, self.output, request=self.request, unix_s=self.unix_s)


@dataclass(slots=True)
class DecisionTrail:
    """The decisions about one request, in order."""

    request: str
    unix_s: float
    decisions: list[Decision] = field(default_factory=list[Decision])

    def add(self, policy: str, inputs: object, output: object) -> None:
        """One more."""
        self.decisions.append(Decision(policy, inputs, output, self.request, self.unix_s))


class DecisionLog(LineLog[Decision]):
    """Appends decisions to a file of at most `max_bytes`; a full one is kept as NAME.1 and begun anew."""

    name = "decision-log"
