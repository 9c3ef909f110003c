"""Messages of prompts whose KV is held until somebody asks for it: what stock routers carry, and what decode asks."""

from __future__ import annotations

import msgspec


class HeldPrompt(msgspec.Struct, kw_only=True):
    """Where a prefilled prompt's KV is held: what a stock router carries from prefill to decode in
    `kv_transfer_params["farfill"]`. `url` is the prefill worker's control API, `transfer_address` where it lets decode
    workers in when those dial; `digest` is of all its token ids."""

    transfer_id: str
    prefill: str
    url: str
    fingerprint: str
    num_tokens: int
    digest: str
    transfer_address: str = ""


class PushCommand(msgspec.Struct, kw_only=True):
    """POST /v1/exports/{transfer_id}/push on a prefill worker, by the decode worker of `ticket`: push what is held
    to `target`. The answer comes when the transfer ended: `PushReport`, or `ErrorBody` with a non-200 status."""

    ticket: str
    target: str
    timeout_s: float


class PushReport(msgspec.Struct, kw_only=True):
    """What was pushed, in the sender's clock."""

    transfer_s: float
    raw_bytes: int
    wire_bytes: int
