"""What the gateway works on: one prompt of an API request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from farfill.core.sampling import SamplingParams
from farfill.gateway.pipeline.deaths import Deaths
from farfill.gateway.pipeline.prompt import Prompt
from farfill.policy.offload import Forced
from farfill.wire.control import MediaMessage


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to generate from. `keys` are its prefix keys; times in the gateway's monotonic clock."""

    request_id: str
    prompt: Prompt
    keys: Sequence[bytes]
    salt: str
    tenant: str
    session: str = ""
    priority: int = 0
    sampling: SamplingParams
    forced: Forced | None
    traceparent: str
    accepted_s: float
    media: tuple[MediaMessage, ...] = ()
    position_offset: int = 0
    deaths: Deaths = msgspec.field(default_factory=Deaths)
