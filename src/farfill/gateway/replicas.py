"""Which gateways are alive, and which part of each shared rate limit is this one's.

Every gateway says on its lease how much each limit is asked for there. Limits are divided by that (`policy.shares`), so
that together they hold, whatever a load balancer does. While the registry is away the last parts stay in force.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping

import structlog

from farfill.core.errors import FarfillError, ProtocolError
from farfill.gateway.limits import LimitMeter, Shares
from farfill.policy.shares import rate_share
from farfill.registry.mirror import Mirror
from farfill.registry.records import GATEWAYS, GatewayRecord, decode_record, encode_record
from farfill.registry.store import LeaseLostError, Put, Store

log = structlog.get_logger("farfill.gateway")

PERIOD_S = 0.5
LEASE_S = 10.0
MAX_LIMITS = 2000
TOLERANCE = 0.1
TENANT = "tenant:"


class Replicas:
    """Runs between `start` and `close`. `told` hears the tenants' parts, and the part of anybody not named."""

    def __init__(
        self,
        store: Store,
        own: GatewayRecord,
        meter: LimitMeter,
        told: Callable[[Shares, float], None],
        counted: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._own = own
        self._meter = meter
        self._told = told
        self._counted = counted
        self._mirror = Mirror(store, GATEWAYS, on_change=self._divide)
        self._demand: dict[str, tuple[float, float]] = {}
        self._said: dict[str, tuple[float, float]] | None = None
        self._lease = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """This gateway's, in the registry."""
        return self._own.gateway

    def others(self) -> list[GatewayRecord]:
        """The other gateways that are alive, as heard last."""
        return [record for record in self._records() if record.gateway != self._own.gateway]

    async def start(self) -> None:
        """Begin to listen and to tell."""
        await self._mirror.__aenter__()
        self._task = asyncio.create_task(self._run(), name="replicas")

    async def close(self) -> None:
        """Say goodbye, if the store can hear it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._mirror.__aexit__(None, None, None)
        if self._lease:
            with contextlib.suppress(FarfillError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._store.revoke(self._lease)

    async def _run(self) -> None:
        while True:
            try:
                self._demand = self._meter.demand()
                await self._tell()
                self._divide()
            except LeaseLostError:
                self._lease, self._said = 0, None
                continue
            except FarfillError as error:
                log.debug("demand_not_told", reason=error.reason, error=str(error))
            await asyncio.sleep(PERIOD_S)

    async def _tell(self) -> None:
        if not self._lease:
            self._lease, self._said = (await self._store.grant(LEASE_S)).id, None
        else:
            await self._store.keep_alive(self._lease)
        most = sorted(self._demand, key=lambda name: -max(self._demand[name]))[:MAX_LIMITS]
        demand = {name: self._demand[name] for name in most}
        if self._said is not None and not _differs(self._said, demand):
            return
        record = GatewayRecord(
            gateway=self._own.gateway,
            site=self._own.site,
            version=self._own.version,
            address=self._own.address,
            started_unix_s=self._own.started_unix_s,
            demand=demand,
        )
        await self._store.commit([Put(GATEWAYS + self._own.gateway, encode_record(record), self._lease)])
        self._said = demand

    def _divide(self) -> None:
        """What was said counts, of this gateway too: so all divide by the same numbers."""
        own, others = self._said or {}, self.others()
        names = own.keys() | {name for record in others for name in record.demand}
        shares = {
            name: (
                rate_share(own.get(name, (0.0, 0.0))[0], [r.demand.get(name, (0.0, 0.0))[0] for r in others]),
                rate_share(own.get(name, (0.0, 0.0))[1], [r.demand.get(name, (0.0, 0.0))[1] for r in others]),
            )
            for name in names
        }
        default = rate_share(0.0, [0.0] * len(others))
        self._meter.share(shares, default)
        self._told({n.removeprefix(TENANT): s for n, s in shares.items() if n.startswith(TENANT)}, default)
        self._counted(1 + len(others))

    def _records(self) -> Iterator[GatewayRecord]:
        for entry in self._mirror.entries():
            with contextlib.suppress(ProtocolError):
                yield decode_record(entry.value, GatewayRecord)


def _differs(said: Mapping[str, tuple[float, float]], now: Mapping[str, tuple[float, float]]) -> bool:
    """Whether it is worth a write: a tenth of any of them, or one that is new or gone."""
    if said.keys() != now.keys():
        return True
    pairs = ((old, new) for name in now for old, new in zip(said[name], now[name], strict=True))
    return any(abs(new - old) > TOLERANCE * old for old, new in pairs)
