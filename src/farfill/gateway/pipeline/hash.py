"""Prefix block keys of a prompt, salted by the caller; long prompts off the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from farfill.gateway.tokenizer import INLINE_TOKENS, TokenizerPool
from farfill.kv.hashing import KeyMaterial, prefix_keys


async def hash_prompt(
    pool: TokenizerPool,
    token_ids: Sequence[int],
    chunk_tokens: int,
    salt: str,
    material: Sequence[KeyMaterial] = (),
) -> list[bytes]:
    """Chained keys of the whole prefill chunks of `token_ids`; `material` tells of their images."""
    if len(token_ids) < chunk_tokens:
        return []
    return await pool.run(
        len(token_ids), INLINE_TOKENS, lambda: list(prefix_keys(token_ids, chunk_tokens, salt, material))
    )
