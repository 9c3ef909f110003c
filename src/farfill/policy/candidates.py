"""What placement looks at: one request, and every instance that might take it. Pure values."""

from __future__ import annotations

import msgspec

from farfill.core.cluster import Instance, Role


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`session` is what repeated requests of one conversation share ("" if nothing); `spread` differs between requests.

    `total_tokens` is the prompt and the longest output; `kv_bytes` what both need, 0 when not known. `fingerprint` is
    demanded of the instance when not empty, and one of `protocols` when there are any. `version` is preferred, without
    one whatever is not among `avoid_versions`. `tenant_share` is the part of an instance this tenant may fill (0..1).
    """

    model: str
    role: Role
    prompt_tokens: int
    total_tokens: int
    kv_bytes: int = 0
    fingerprint: str = ""
    capabilities: tuple[str, ...] = ()
    session: str = ""
    spread: str = ""
    tenant: str = ""
    tenant_share: float = 1.0
    exclude: tuple[str, ...] = ()
    protocols: tuple[int, ...] = ()
    version: str = ""
    avoid_versions: tuple[str, ...] = ()


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """An instance, and what this gateway knows of it beyond the registry. Recorded as an array.

    `waiting_tokens`: to compute before a new prompt; `running`: requests on it; `tenant_tokens`: of those waiting, the
    asking tenant's; `hit_tokens`: the prefix hit expected there; `allowed`: its breaker lets a request through;
    `reachable`: the last connection did not fail; `models`: further names it serves (aliases).
    """

    instance: Instance
    hit_tokens: int = 0
    waiting_tokens: int = 0
    running: int = 0
    tenant_tokens: int = 0
    allowed: bool = True
    reachable: bool = True
    models: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()


def candidate(  # noqa: PLR0917 (made for every instance of every decision: keywords cost)
    instance: Instance,
    hit_tokens: int = 0,
    outstanding_tokens: int = 0,
    outstanding_requests: int = 0,
    tenant_tokens: int = 0,
    allowed: bool = True,
    reachable: bool = True,
    models: tuple[str, ...] = (),
    capabilities: tuple[str, ...] = (),
) -> Candidate:
    """`outstanding_*` is what this gateway gave it and has not seen finished: what the registry says lags behind."""
    queued, running = instance.queued_tokens, instance.running_requests
    return Candidate(
        instance,
        hit_tokens,
        queued if queued > outstanding_tokens else outstanding_tokens,
        running if running > outstanding_requests else outstanding_requests,
        tenant_tokens,
        allowed,
        reachable,
        models,
        capabilities,
    )
