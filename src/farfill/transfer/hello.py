"""Who may exchange KV with whom: what HELLO and WELCOME are checked for, on both ends."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from farfill.core.errors import FarfillError, IncompatiblePeerError
from farfill.transport.tls import PeerIdentity
from farfill.wire.frames import HelloPayload


def hello_problem(
    me: HelloPayload, peer: HelloPayload, certified: PeerIdentity, allowed: Sequence[str]
) -> FarfillError | None:
    """Why these two must not exchange KV; None when they may.

    `certified` is who the peer's certificate speaks for; `allowed` are patterns of site/role/name, none: everybody.
    """
    path = f"{certified.site}/{certified.role}/{certified.name}"
    if allowed and not any(fnmatchcase(path, pattern) for pattern in allowed):
        return IncompatiblePeerError(f"{path} is not in kv_transfer.allowed_peers", reason="peer_not_allowed")
    if peer.protocol_version != me.protocol_version:
        return IncompatiblePeerError(
            f"protocol version {peer.protocol_version} there, {me.protocol_version} here", reason="protocol_version"
        )
    if peer.instance != certified.name:
        return IncompatiblePeerError(
            f"calls itself {peer.instance[:64]!r}, its certificate says {certified.name!r}", reason="wrong_name"
        )
    if peer.fingerprint != me.fingerprint:
        return IncompatiblePeerError(
            f"model fingerprint {peer.fingerprint[:64]} there, {me.fingerprint[:64]} here",
            reason="fingerprint_mismatch",
        )
    return None
