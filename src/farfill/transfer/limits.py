"""Deadlines of the transfer plane, derived from the configuration, and the meaning of reasons on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from farfill.config.model import KVTransferConfig
from farfill.core.cluster import FallbackReason
from farfill.topology.connections import MANY
from farfill.transfer.events import TransferLimits

HANDSHAKE_S = 5.0
MAX_OPEN_GRACE_S = 1.0

_FALLBACKS = frozenset(FallbackReason)
_KNOWN_REASONS = frozenset(
    {
        *("bad_frame", "bad_chunk", "bad_chunk_size", "oversize", "flooded", "checksum_missing"),
        *(
            "protocol_version",
            "wrong_name",
            "peer_not_allowed",
            "layout_mismatch",
            "manifest_mismatch",
            "lossy_mismatch",
            "identity_refused",
        ),
        *("ticket_malformed", "ticket_forged", "ticket_expired", "ticket_not_yet_valid", "ticket_replayed"),
        *("ticket_wrong_peer", "ticket_wrong_fingerprint", "ticket_wrong_transfer"),
        *("not_expected", "too_many_parked", "unknown_transfer", "connection_lost"),
        "early_refused",
    }
)
_FALLBACK_BY_REASON = {
    "fingerprint_mismatch": FallbackReason.FINGERPRINT_MISMATCH,
    "layout_mismatch": FallbackReason.FINGERPRINT_MISMATCH,
    "lossy_mismatch": FallbackReason.FINGERPRINT_MISMATCH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Of one connection: PING after `ping_s` without sending, dead after `dead_s` without hearing anything."""

    handshake_s: float
    ping_s: float
    dead_s: float


def liveness_of(config: KVTransferConfig) -> Liveness:
    """A dead connection is given up before the transfers on it time out, so that others can take over."""
    timeout_s = config.timeout_ms / 1000
    return Liveness(
        handshake_s=HANDSHAKE_S,
        ping_s=min(max(timeout_s / 8, 0.05), 1.0),
        dead_s=max(timeout_s * 0.75, 1.0),
    )


def limits_of(
    config: KVTransferConfig, timeout_s: float, rate_bytes_per_s: float | None = None
) -> TransferLimits:  # fmt: skip
    """Deadlines of one transfer with the given longest silence. A link that is cut for less loses nothing.

    `rate_bytes_per_s` is what the same peer's transfers reached before, if that is known.
    """
    return TransferLimits(
        timeout_s=timeout_s,
        grace_s=timeout_s,
        open_grace_s=min(timeout_s, MAX_OPEN_GRACE_S),
        retry=config.retry,
        keepalive_s=timeout_s / 8,
        rate_bytes_per_s=rate_bytes_per_s,
        connections=MANY if config.connections == "auto" else config.connections,
    )


def known_reason(reason: str) -> str:
    """A reason from the wire as a metric label: itself if Farfill uses it, else "other"."""
    return reason if reason in _KNOWN_REASONS or reason in _FALLBACKS else "other"


def fallback_reason(reason: str) -> FallbackReason:
    """What a reason on the wire means to the request. Unknown ones are the peer's fault: PROTOCOL."""
    if reason.startswith("ticket_"):
        return FallbackReason.TICKET_INVALID
    if reason in _FALLBACK_BY_REASON:
        return _FALLBACK_BY_REASON[reason]
    try:
        known = FallbackReason(reason)
    except ValueError:
        return FallbackReason.PROTOCOL
    # A failure that says "none" would read as success.
    return FallbackReason.PROTOCOL if known is FallbackReason.NONE else known
