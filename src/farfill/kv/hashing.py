"""Keys under which the KV of a prompt's leading tokens is found again.

A key names everything its chunk's KV depends on: the salt (tenant and model) and every token up to the chunk's
end. Keys are chained, so equal keys mean equal prefixes, and a longer prefix never has a shorter one's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

KEY_BYTES = 16
_PERSON = b"farfill-prefix-1"


def prefix_keys(token_ids: Sequence[int], chunk_tokens: int, salt: str) -> tuple[bytes, ...]:
    """One 16-byte key per whole chunk of `chunk_tokens` tokens; a shorter rest has none."""
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    parent = blake2b(salt.encode(), digest_size=KEY_BYTES, person=_PERSON).digest()
    keys: list[bytes] = []
    for start in range(0, len(token_ids) - chunk_tokens + 1, chunk_tokens):
        chunk = pack(f"<{chunk_tokens}I", *token_ids[start : start + chunk_tokens])
        parent = blake2b(parent + chunk, digest_size=KEY_BYTES, person=_PERSON).digest()
        keys.append(parent)
    return tuple(keys)
