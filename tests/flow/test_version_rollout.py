"""A new worker version: prefill first, then decode; pairs that cannot work, guards, and going back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from farfill.clock import WallClock
from farfill.core.cluster import Role
from farfill.core.errors import InvalidRequestError
from farfill.registry.audit import audit_log
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.members import Members
from farfill.registry.mirror import Mirror
from farfill.registry.records import INSTANCES
from farfill.registry.rollouts import ANY, ShareChange, change_share, revert_all, version_share
from farfill.registry.versions import change_version, revert_version
from farfill.wire.control import PROTOCOL_VERSION, ErrorBody
from support.gateway_harness import Harness, running_gateway
from support.memory_disk import MemoryDisk
from support.stub_worker import StubWorker

LONG = "x" * 100
NEW = "new"


@pytest.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as opened:
        yield opened


@asynccontextmanager
async def upgrading(folder: Path, store: EmbeddedStore, **changes: Any) -> AsyncIterator[Harness]:
    """Old and new workers of both roles, as the registry and the gateway know them."""
    rollout = {"min_step_s": 0, "min_requests": 1, "success_rate": 0.5, "version_ttft_ratio_hold": 1e9,
               "ttft_ratio_revert": 1e9}  # fmt: skip
    sections = {"routing": {"remote_prefill_threshold_tokens": 32, "rollout": rollout}}
    async with running_gateway(folder, store=store, **sections) as gateway, AsyncExitStack() as stack:
        for role, name in ((Role.DECODE, "decode-new"), (Role.PREFILL, "prefill-new")):
            site = "near" if role is Role.DECODE else "far"
            worker = StubWorker(name, role, gateway.decode.transfers, site=site, version=NEW, **changes)
            await worker.start()
            stack.push_async_callback(worker.stop)
            gateway.membership.workers.append(worker)
        members = Members(store, await stack.enter_async_context(Mirror(store, INSTANCES)), 60.0)
        for instance in gateway.membership.instances():
            await members.put(instance)
        yield gateway


def to(percent: float, *, automatic: bool = False) -> ShareChange:
    return ShareChange(percent, automatic, "test", "because", time.time(), "request")


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def percent(gateway: Harness, role: Role) -> float | None:
    record = gateway.service.rollout.records.get(version_share(role, NEW))
    return None if record is None else record.percent


async def served(gateway: Harness, number: int) -> tuple[str, str]:
    """(decode, prefill) that served a long prompt."""
    body = {"model": "tiny", "prompt": f"{number:03}{LONG}", "max_tokens": 1}
    status, answer, response = await gateway.post("/v1/completions", body, **{"X-Request-Id": f"r{number}"})
    assert status == 200, answer
    return response.headers["x-farfill-decode-instance"], response.headers["x-farfill-prefill-instance"]


async def move(gateway: Harness, store: EmbeddedStore, role: Role, share: float) -> None:
    await change_version(store, role, NEW, to(share))
    await until(lambda: percent(gateway, role) == share)


async def test_prefill_moves_first_then_decode_by_share_and_back(tmp_path: Path, store: EmbeddedStore) -> None:
    async with upgrading(tmp_path, store) as gateway:
        with pytest.raises(InvalidRequestError) as refused:
            await change_version(store, Role.DECODE, NEW, to(10))
        assert refused.value.reason == "prefill_first"
        await move(gateway, store, Role.PREFILL, 50)
        pairs = [await served(gateway, i) for i in range(24)]
        assert {prefill for _, prefill in pairs} == {"prefill-far", "prefill-new"}
        await move(gateway, store, Role.PREFILL, 100)
        assert {prefill for _, prefill in [await served(gateway, i) for i in range(30, 36)]} == {"prefill-new"}
        await move(gateway, store, Role.DECODE, 100)
        assert {await served(gateway, i) for i in range(40, 46)} == {("decode-new", "prefill-new")}
        await revert_version(store, NEW, "test", "back", time.time())
        await until(lambda: percent(gateway, Role.PREFILL) == percent(gateway, Role.DECODE) == 0)
        assert {await served(gateway, i) for i in range(50, 56)} == {("decode-near", "prefill-far")}
        told = [line.what for line in await audit_log(store)]
        assert told[0] == "rollout @prefill new: unset -> 50 %"
        assert told[-1] == "rollout @prefill new: 100 % -> 0 %"


async def test_other_version_serves_where_the_wanted_one_is_gone(tmp_path: Path, store: EmbeddedStore) -> None:
    async with upgrading(tmp_path, store) as gateway:
        await move(gateway, store, Role.PREFILL, 100)
        gateway.membership.workers[:] = [w for w in gateway.membership.workers if w.name != "prefill-new"]
        assert await served(gateway, 1) == ("decode-near", "prefill-far")


async def test_other_fingerprint_is_never_paired_and_needs_prefill_of_its_own(
    tmp_path: Path, store: EmbeddedStore
) -> None:
    async with upgrading(tmp_path, store, fingerprint="other") as gateway:
        with pytest.raises(InvalidRequestError) as refused:
            await change_version(store, Role.DECODE, NEW, to(10))
        assert refused.value.reason == "no_prefill_of_fingerprint"
        await move(gateway, store, Role.PREFILL, 100)
        # Wanted new, but decode is old: its own fingerprint goes before the share.
        assert await served(gateway, 1) == ("decode-near", "prefill-far")
        await move(gateway, store, Role.DECODE, 50)
        pairs = {await served(gateway, i) for i in range(10, 34)}
        assert pairs == {("decode-near", "prefill-far"), ("decode-new", "prefill-new")}


async def test_other_protocol_is_refused_and_never_placed_on(tmp_path: Path, store: EmbeddedStore) -> None:
    async with upgrading(tmp_path, store, protocol=PROTOCOL_VERSION + 1) as gateway:
        with pytest.raises(InvalidRequestError) as refused:
            await change_version(store, Role.PREFILL, NEW, to(10))
        assert refused.value.reason == "protocol_version"
        assert {await served(gateway, i) for i in range(8)} == {("decode-near", "prefill-far")}


async def test_version_nobody_runs_is_refused_with_those_that_run(tmp_path: Path, store: EmbeddedStore) -> None:
    async with upgrading(tmp_path, store):
        with pytest.raises(InvalidRequestError, match="old"):
            await change_version(store, Role.PREFILL, "unheard-of", to(10))


async def test_automatic_rollout_goes_through_prefill_then_decode(tmp_path: Path, store: EmbeddedStore) -> None:
    async with upgrading(tmp_path, store) as gateway:
        await change_version(store, Role.PREFILL, NEW, to(50, automatic=True))
        await until(lambda: percent(gateway, Role.PREFILL) == 50)
        number = 0
        async with asyncio.timeout(60):
            while percent(gateway, Role.DECODE) is None:
                number += 1
                await served(gateway, number)
        assert percent(gateway, Role.PREFILL) == 100
        record = gateway.service.rollout.records[version_share(Role.DECODE, NEW)]
        assert (record.automatic, record.percent) == (True, 1.0)


async def test_version_whose_workers_fail_goes_back_by_itself(tmp_path: Path, store: EmbeddedStore) -> None:
    async with upgrading(tmp_path, store) as gateway:
        new = next(w for w in gateway.membership.workers if w.name == "prefill-new")
        new.refuse = (500, ErrorBody(reason="boom", message="a bad release"))
        await change_version(store, Role.PREFILL, NEW, to(50, automatic=True))
        await until(lambda: percent(gateway, Role.PREFILL) == 50)
        number = 0
        async with asyncio.timeout(60):
            while percent(gateway, Role.PREFILL) != 0:
                number += 1
                await served(gateway, number)
        assert percent(gateway, Role.DECODE) is None
        assert {prefill for _, prefill in [await served(gateway, i) for i in range(900, 906)]} == {"prefill-far"}


async def test_far_revert_leaves_worker_versions_alone(tmp_path: Path, store: EmbeddedStore) -> None:
    async with upgrading(tmp_path, store) as gateway:
        await move(gateway, store, Role.PREFILL, 100)
        await change_share(store, (ANY, ANY), lambda _: to(50))
        assert await revert_all(store, "test", "stop", time.time()) == [(ANY, ANY)]
        await until(lambda: gateway.service.rollout.records[ANY, ANY].percent == 0)
        assert percent(gateway, Role.PREFILL) == 100
