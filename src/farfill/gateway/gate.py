"""Who may come in and how much they may ask for: access, limits, and what gateways share of them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import structlog

import farfill
from farfill.clock import Clock
from farfill.config.model import ClusterConfig
from farfill.gateway.access import Access, Credential
from farfill.gateway.access_observe import AccessObserver
from farfill.gateway.limits import LimitMeter
from farfill.gateway.pipeline.admit import Admission
from farfill.gateway.principal import Principal
from farfill.gateway.replicas import Replicas
from farfill.registry.records import GatewayRecord
from farfill.registry.store import Store

log = structlog.get_logger("farfill.gateway")

OPEN = Principal(name="open", tenant="")
"""Anybody, where there is no access section; the tenant comes from `admission.tenant_header`."""


@dataclass(frozen=True, slots=True)
class Gate:
    """`access` None: the API is open."""

    access: Access | None
    meter: LimitMeter
    replicas: Replicas | None
    _running: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def start(self) -> None:
        """Follow keys and other gateways. Raises ConfigError when a file of keys cannot be used."""
        if self.access is None:
            log.warning("api_open", detail="no access section in the cluster file: whoever reaches the API may use it")
        else:
            await self._running.enter_async_context(self.access.running())
        if self.replicas is not None:
            await self.replicas.start()

    async def close(self) -> None:
        """Stop following."""
        if self.replicas is not None:
            await self.replicas.close()
        await self._running.aclose()

    async def identify(self, credential: Credential) -> Principal:
        """Who calls the API; see `Access.identify`."""
        return OPEN if self.access is None else await self.access.identify(credential)


def build_gate(
    config: ClusterConfig,
    clock: Clock,
    observer: AccessObserver,
    *,
    name: str,
    access: Access | None,
    store: Store | None,
    admission: Admission,
) -> Gate:
    """Not started yet. `name` is this gateway's in the registry."""
    meter = LimitMeter(clock, observer.key_limited)
    if store is None:
        return Gate(access, meter, None)
    own = GatewayRecord(
        gateway=name,
        site=config.gateway.site,
        version=farfill.__version__,
        address=config.gateway.listen,
        started_unix_s=clock.unix_s(),
    )
    return Gate(access, meter, Replicas(store, own, meter, admission.share, observer.gateways_alive))
