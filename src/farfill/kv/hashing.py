"""Keys under which the KV of a prompt's leading tokens is found again.

A key names everything its chunk's KV depends on: the salt (tenant and model), every token up to the chunk's end, and
the digest of whatever stands behind tokens that are no text. Keys are chained, so equal keys mean equal prefixes, and
a longer prefix never has a shorter one's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import pack

KEY_BYTES = 16
_PERSON = b"farfill-prefix-1"


KeyMaterial = tuple[int, bytes]
"""(position of the first token it stands behind, digest): an image's placeholder tokens say nothing of the image."""


def prefix_keys(
    token_ids: Sequence[int], chunk_tokens: int, salt: str, material: Sequence[KeyMaterial] = ()
) -> tuple[bytes, ...]:
    """One 16-byte key per whole chunk of `chunk_tokens` tokens; a shorter rest has none."""
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    parent = root_key(salt)
    keys: list[bytes] = []
    for start in range(0, len(token_ids) - chunk_tokens + 1, chunk_tokens):
        end = start + chunk_tokens
        chunk = pack(f"<{chunk_tokens}I", *token_ids[start:end])
        # Tokens have a fixed length, so what follows them cannot be taken for one.
        behind = b"".join(pack("<II", at, len(digest)) + digest for at, digest in material if start <= at < end)
        parent = chain_key(parent, chunk, behind)
        keys.append(parent)
    return tuple(keys)


def root_key(salt: str) -> bytes:
    """What the first chunk's key is chained to."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES, person=_PERSON).digest()


def chain_key(parent: bytes, tokens: bytes, behind: bytes = b"") -> bytes:
    """The key of a chunk after `parent`: its tokens as little-endian uint32, then what stands behind them."""
    return blake2b(parent + tokens + behind, digest_size=KEY_BYTES, person=_PERSON).digest()
