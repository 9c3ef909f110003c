"""The bounds of one engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """`info.kv_total_bytes` bounds sequences; `prefix_cache_bytes` comes on top.

    `step_token_budget`: tokens of prefill and decode in one step, after which running streams get their next token.
    `output_reserve_tokens`: output tokens whose KV memory is held from the start, more is taken as the output grows;
    None holds memory for all of them, as a device needs where room costs as much as what is in it.
    `prefix_ttl_s`: snapshots nobody used for so long are dropped; 0 keeps them.
    """

    max_batch: int
    max_queue: int
    prefix_cache_bytes: int
    step_token_budget: int = 256
    output_reserve_tokens: int | None = None
    prefix_ttl_s: float = 0.0
