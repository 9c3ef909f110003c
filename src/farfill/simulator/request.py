"""One request on its way through the simulated sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from farfill.policy.offload import Forced


class Request:
    """What is asked for, and what has happened to it so far. `attempt` grows when it starts over: what an earlier
    attempt had under way no longer matters. `pace`: its prompt takes so many times as long as others of
    its length. Times are virtual seconds, -1 before they come."""

    __slots__ = (
        "arrival_s",
        "asked",
        "attempt",
        "budgeted_s",
        "cached",
        "compared",
        "decode",
        "estimate_s",
        "excluded",
        "fallback",
        "far",
        "first_s",
        "flow",
        "forced",
        "given",
        "ident",
        "keys",
        "output",
        "pace",
        "prefill",
        "prefill_from_s",
        "prefill_to_s",
        "probe",
        "prompt",
        "sent_s",
        "session",
        "tenant",
        "to_send",
        "turn",
        "uncached",
    )

    def __init__(
        self,
        ident: str,
        arrival_s: float,
        prompt: int,
        output: int,
        *,
        keys: Sequence[bytes],
        session: Any = None,
        turn: int = 0,
        tenant: str = "",
        forced: Forced | None = None,
    ) -> None:
        self.ident = ident
        self.arrival_s = arrival_s
        self.prompt = prompt
        self.output = output
        self.keys = keys
        self.session = session
        self.turn = turn
        self.tenant = tenant
        self.forced = forced
        self.asked: Any = None
        self.attempt = 0
        self.budgeted_s = -1.0
        self.cached = 0
        self.compared = 0
        self.decode: Any = None
        self.estimate_s = -1.0
        self.excluded: tuple[str, ...] = ()
        self.fallback = ""
        self.far = ""
        self.first_s = -1.0
        self.flow: Any = None
        self.given = 0.0
        self.pace = 1.0
        self.prefill: Any = None
        self.prefill_from_s = -1.0
        self.prefill_to_s = -1.0
        self.probe = False
        self.sent_s = -1.0
        self.to_send = -1.0
        self.uncached = 0


Told = Callable[[Request], None]


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told what happens to a request at servers. `computing`: a piece of its prompt, its tokens from and to,
    begins to take so many seconds; only servers that compute prompts in turns say so."""

    prefill_started: Told
    computing: Callable[[Request, int, int, float], None]
    prefill_finished: Told
    locally_prefilled: Told
    first_token: Told
    finished: Told
