"""Versions of the configuration: followed by all gateways, named where a restart is needed, and taken back."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from farfill.clock import WallClock
from farfill.core.errors import ConfigError, InvalidRequestError
from farfill.registry.audit import audit_log
from farfill.registry.configs import (
    KEPT_VERSIONS,
    ConfigChange,
    config_history,
    config_version,
    current_config,
    put_config,
)
from farfill.registry.embedded import EmbeddedStore
from support.gateway_harness import Harness, make_config, running_gateway
from support.memory_disk import MemoryDisk

NUMBERS = itertools.count()
"""No prompt twice: prefix hits would decide where it goes."""


@pytest.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as opened:
        yield opened


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def text(gateway: Harness, threshold: int, **sections: dict[str, Any]) -> str:
    """A cluster file like the gateway's own, with another threshold."""
    routing = {"remote_prefill_threshold_tokens": threshold, "allow_placement_override": True}
    tls = {"ca": "file:ca", "cert": "file:{name}.pem", "key": "file:{name}.key"}
    config = make_config(gateway.service.deps.config.model.path, routing=routing, tls=tls, **sections)
    return json.dumps(config.model_dump(mode="json", exclude_unset=True))


async def put(store: EmbeddedStore, content: str, reason: str = "") -> int:
    change = ConfigChange(content, "somebody", reason, 1000.0, "what changes")
    return (await put_config(store, change)).version


async def placed(gateway: Harness) -> str:
    body = {"model": "tiny", "prompt": f"{next(NUMBERS):04}{'x' * 96}", "max_tokens": 1}
    _, _, response = await gateway.post("/v1/completions", body)
    return response.headers["x-farfill-reason"]


async def test_all_gateways_follow_a_version_and_its_rollback(tmp_path: Path, store: EmbeddedStore) -> None:
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(running_gateway(tmp_path / str(i), store=store)) for i in range(2)]
        assert [await placed(g) for g in gateways] == ["above_threshold"] * 2
        first = text(gateways[0], 32)
        assert await put(store, first) == 1
        assert await put(store, text(gateways[0], 5000), "quieter link") == 2
        await until(lambda: [g.service.reloader.version for g in gateways] == [2, 2])
        assert [await placed(g) for g in gateways] == ["below_threshold"] * 2
        # The file of a gateway does not silently take back what is in force on all.
        with pytest.raises(ConfigError, match="version 2"):
            gateways[0].service.reloader.apply(gateways[0].service.deps.config)
        assert await put(store, (await config_version(store, 1)).text, "rollback to 1") == 3
        await until(lambda: [g.service.reloader.version for g in gateways] == [3, 3])
        assert [await placed(g) for g in gateways] == ["above_threshold"] * 2
    history = await config_history(store)
    assert [(r.version, r.previous, r.reason) for r in history] == [
        (1, 0, ""), (2, 1, "quieter link"), (3, 2, "rollback to 1"),
    ]  # fmt: skip
    assert [(line.who, line.what) for line in await audit_log(store)][1] == (
        "somebody", "config 1 -> 2: what changes",
    )  # fmt: skip


async def test_keys_that_need_a_restart_are_named_every_time(tmp_path: Path, store: EmbeddedStore) -> None:
    async with running_gateway(tmp_path, store=store) as gateway:
        await put(store, text(gateway, 32, kv_transfer={"timeout_ms": 1234}))
        await until(lambda: gateway.service.reloader.version == 1)
        assert "kv_transfer.timeout_ms" in gateway.service.reloader.restart
        await put(store, text(gateway, 64, kv_transfer={"timeout_ms": 1234}))
        await until(lambda: gateway.service.reloader.version == 2)
        assert "kv_transfer.timeout_ms" in gateway.service.reloader.restart
        await put(store, text(gateway, 64))
        await until(lambda: gateway.service.reloader.version == 3)
        assert "kv_transfer.timeout_ms" not in gateway.service.reloader.restart


async def test_version_that_makes_no_sense_here_changes_nothing(tmp_path: Path, store: EmbeddedStore) -> None:
    async with running_gateway(tmp_path, store=store) as gateway:
        await put(store, text(gateway, 5000))
        await until(lambda: gateway.service.reloader.version == 1)
        await put(store, "version: 1\nnot_a_key: true\n")
        await put(store, text(gateway, 6000))
        await until(lambda: gateway.service.reloader.version == 3)
        assert gateway.service.threshold.tokens == 6000


async def test_late_gateway_starts_with_the_version_in_force(tmp_path: Path, store: EmbeddedStore) -> None:
    async with running_gateway(tmp_path / "0", store=store) as gateway:
        await put(store, text(gateway, 5000))
    async with running_gateway(tmp_path / "1", store=store) as gateway:
        await until(lambda: gateway.service.reloader.version == 1)
        assert await placed(gateway) == "below_threshold"


async def test_history_is_bounded_same_text_is_no_version_and_lost_ones_are_named(store: EmbeddedStore) -> None:
    assert await current_config(store) is None
    for number in range(KEPT_VERSIONS + 3):
        await put(store, f"text {number}")
    assert await put(store, f"text {KEPT_VERSIONS + 2}") == KEPT_VERSIONS + 3
    history = await config_history(store)
    assert (len(history), history[0].version) == (KEPT_VERSIONS, 4)
    with pytest.raises(InvalidRequestError, match=f"4 to {KEPT_VERSIONS + 3}"):
        await config_version(store, 1)
