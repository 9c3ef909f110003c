"""Rate limits of keys at one gateway, and at several that share them through a registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from farfill.clock import VirtualClock, WallClock
from farfill.gateway.errors import OverloadedError
from farfill.gateway.limits import LimitMeter, Shares
from farfill.gateway.principal import Principal, RateLimits
from farfill.gateway.replicas import Replicas
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.records import GATEWAYS, GatewayRecord
from farfill.registry.store import StoreError
from support.memory_disk import MemoryDisk

DEADLINE_S = 20.0


def principal(requests: float = 0.0, tokens: float = 0.0, burst_s: float = 10.0, name: str = "key:a") -> Principal:
    return Principal(name=name, tenant="t", limits=RateLimits(requests, tokens, burst_s))


def admitted(meter: LimitMeter, who: Principal, tries: int) -> int:
    """How many of so many requests pass."""
    passed = 0
    for _ in range(tries):
        try:
            meter.request(who)
        except OverloadedError:
            continue
        passed += 1
    return passed


@contextmanager
def refused(reason: str) -> Iterator[pytest.ExceptionInfo[OverloadedError]]:
    with pytest.raises(OverloadedError) as caught:
        yield caught
    assert caught.value.reason == reason


def test_key_without_limits_is_not_counted() -> None:
    meter = LimitMeter(VirtualClock())
    free = Principal(name="key:a", tenant="t")
    assert admitted(meter, free, 1000) == 1000
    with meter.tokens(free, "t", 10**9):
        pass
    assert "key:a" not in meter.demand()


def test_requests_pass_at_their_rate_after_the_burst() -> None:
    clock, told = VirtualClock(), []
    meter, who = LimitMeter(clock, told.append), principal(requests=2.0)
    assert admitted(meter, who, 30) == 20
    with refused("key_requests") as caught:
        meter.request(who)
    assert caught.value.retry_after_s == pytest.approx(0.5)
    clock.advance(5)
    assert admitted(meter, who, 30) == 10
    assert set(told) == {"key_requests"}


def test_tokens_not_used_count_again_and_of_a_refused_request_all() -> None:
    meter, who = LimitMeter(VirtualClock()), principal(tokens=100.0)
    with meter.tokens(who, "t", 900) as spent:
        spent.used = 100
    with meter.tokens(who, "t", 900) as spent:
        spent.used = 900
    with refused("key_tokens"), meter.tokens(who, "t", 10):
        pass
    other = principal(tokens=100.0, name="key:b")
    with pytest.raises(ZeroDivisionError), meter.tokens(other, "t", 1000):
        raise ZeroDivisionError
    with meter.tokens(other, "t", 1000):
        pass


def test_changed_limit_keeps_what_was_used() -> None:
    meter = LimitMeter(VirtualClock())
    assert admitted(meter, principal(requests=2.0), 20) == 20
    assert admitted(meter, principal(requests=4.0), 5) == 0, "no fresh bucket for whoever changes a key"
    meter.share({"key:a": (0.5, 0.5)}, 1.0)
    assert admitted(meter, principal(requests=4.0), 5) == 0


def test_part_of_a_gateway_bounds_rate_and_burst() -> None:
    clock = VirtualClock()
    meter, who = LimitMeter(clock), principal(requests=10.0)
    meter.share({"key:a": (0.25, 1.0)}, 0.5)
    assert admitted(meter, who, 100) == 25
    clock.advance(4)
    assert admitted(meter, who, 100) == 10
    assert admitted(meter, principal(requests=10.0, name="key:new"), 100) == 50, "not named: the default part"


def test_demand_counts_refused_requests_and_is_forgotten() -> None:
    clock = VirtualClock()
    meter, who = LimitMeter(clock), principal(requests=1.0, burst_s=1.0)
    admitted(meter, who, 10)
    clock.advance(1)
    assert meter.demand()["key:a"][0] == pytest.approx(5.0)
    assert meter.demand()["key:a"][0] == pytest.approx(5.0), "no time passed: nothing new"
    for _ in range(30):
        clock.advance(1)
        found = meter.demand()
    assert found == {}


class Fleet:
    """Gateways that share one store; each has one key's limit."""

    def __init__(self, store: EmbeddedStore, count: int) -> None:
        self.clock = WallClock()
        self.meters = [LimitMeter(self.clock) for _ in range(count)]
        self.parts: list[dict[str, tuple[float, float]]] = [{} for _ in range(count)]
        self.defaults = [1.0] * count
        self.counted = [0] * count
        self.replicas = [
            Replicas(store, GatewayRecord(gateway=f"g{i}", site="near"), meter, self._told(i), self._count(i))
            for i, meter in enumerate(self.meters)
        ]

    def _told(self, i: int) -> Callable[[Shares, float], None]:
        def told(shares: Shares, default: float) -> None:
            self.parts[i], self.defaults[i] = dict(shares), default

        return told

    def _count(self, i: int) -> Callable[[int], None]:
        def counted(count: int) -> None:
            self.counted[i] = count

        return counted


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.02)


async def test_gateways_divide_limits_by_demand_and_take_over_from_one_that_leaves() -> None:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as store:
        fleet = Fleet(store, 3)
        for replicas in fleet.replicas:
            await replicas.start()
        await until(lambda: fleet.counted == [3, 3, 3])
        await until(lambda: all(default == pytest.approx(1 / 3) for default in fleet.defaults))
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                for meter, count in zip(fleet.meters, (3, 1, 0), strict=True):
                    for _ in range(count):
                        with meter.tokens(Principal(name="open", tenant="team"), "team", 100):
                            pass
                await asyncio.sleep(0.02)

        loading = asyncio.create_task(load())

        def divided() -> bool:
            shares = [parts.get("team", (0.0, 0.0))[1] for parts in fleet.parts]
            return shares[0] > 2 * shares[1] > 4 * shares[2] > 0 and sum(shares) == pytest.approx(1.0, abs=0.15)

        await until(divided)
        assert sorted(record.gateway for record in fleet.replicas[0].others()) == ["g1", "g2"]
        await fleet.replicas[0].close()
        await until(lambda: fleet.counted[1:] == [2, 2] and fleet.parts[1].get("team", (0, 0))[1] > 0.8)
        stop.set()
        await loading
        for replicas in fleet.replicas[1:]:
            await replicas.close()
        assert (await store.scan(GATEWAYS)).entries == ()


class Away:
    """A store that does not answer."""

    born = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        raise StoreError("away")


async def test_without_a_registry_the_whole_limit_is_one_gateways() -> None:
    meter = LimitMeter(VirtualClock())
    replicas = Replicas(Away(), GatewayRecord(gateway="g", site="near"), meter, lambda _s, _d: None)  # type: ignore[arg-type]
    await replicas.start()
    assert admitted(meter, principal(requests=2.0), 30) == 20
    await replicas.close()
