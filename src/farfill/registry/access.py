"""Who of the cluster may read and write what in the store through the registry."""

from __future__ import annotations

from farfill.registry import records
from farfill.transport.tls import PeerIdentity

_GATEWAY_WRITES = (
    records.LINKS,
    records.REQUESTS,
    records.PREFIXES,
    records.CONFIG,
    records.ROLLOUT,
    records.BREAKERS,
    records.OBSERVED,
    records.KEYS,
    records.GATEWAYS,
    records.ASKS,
    records.ANSWERS,
    records.AUDIT,
)
_WORKER_READS = (records.INSTANCES, records.LINKS, records.PREFIXES, records.CONFIG)


def may_read(peer: PeerIdentity, prefix: str) -> bool:
    """Gateways read all; workers what concerns their links and caches."""
    return peer.role == "gateway" or prefix.startswith(_WORKER_READS)


def may_write(peer: PeerIdentity, key: str) -> bool:
    """Nobody writes instances here: they are registered, one's own name only. Workers write where they stand."""
    if peer.role == "gateway":
        return key.startswith(_GATEWAY_WRITES)
    return key.startswith((f"{records.PREFIXES}{peer.site}/{peer.name}/", f"{records.LINKS}{peer.site}/"))
