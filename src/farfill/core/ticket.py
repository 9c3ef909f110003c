"""The permission to push one request's KV: single use, signed by the gateway, bound to both peers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What the gateway signs. Times are Unix seconds (wall clock); receivers allow for clock error.

    `prefill` and `decode` are instance names as in their certificates; `num_tokens` is how many prompt
    tokens' KV the transfer carries (the prompt length minus one). `continues`: the receiver has part of it,
    brought by another sender or thought to be in its prefix cache, so nothing leaves before it has told what it holds.
    """

    transfer_id: str
    fingerprint: str
    tenant: str
    prefill: str
    decode: str
    num_tokens: int
    issued_unix_s: float
    expires_unix_s: float
    continues: bool = False
