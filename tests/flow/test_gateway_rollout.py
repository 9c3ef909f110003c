"""Rollout shares, guards and breakers that several gateways share through one store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from farfill.clock import WallClock
from farfill.core.sampling import SamplingParams
from farfill.gateway.pipeline.job import Job
from farfill.gateway.pipeline.prompt import Prompt
from farfill.registry.audit import audit_log
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.records import RolloutRecord
from farfill.registry.rollouts import ANY, ShareChange, change_share, revert_all
from farfill.registry.store import StoreError
from farfill.wire.control import ErrorBody
from support.gateway_harness import Harness, running_gateway
from support.memory_disk import MemoryDisk

COMPLETIONS = "/v1/completions"
DEADLINE_S = 20.0


@pytest.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as opened:
        yield opened


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.01)


def change(percent: float, *, automatic: bool = False, sticky: str = "session") -> Callable[[Any], ShareChange]:
    return lambda _: ShareChange(percent, automatic, "test", "because", time.time(), sticky)


def body(text: str) -> dict[str, Any]:
    return {"model": "tiny", "prompt": text * 100, "max_tokens": 1}


async def placed(gateway: Harness, text: str, **headers: str) -> tuple[str, str]:
    status, answer, response = await gateway.post(COMPLETIONS, body(text), **headers)
    assert status == 200, answer
    return response.headers["x-farfill-placement"], response.headers["x-farfill-reason"]


def percent(gateway: Harness) -> float | None:
    record = gateway.service.rollout.records.get((ANY, ANY))
    return None if record is None else record.percent


async def test_share_is_followed_by_all_gateways_and_sticks_to_sessions(tmp_path: Path, store: EmbeddedStore) -> None:
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(running_gateway(tmp_path / str(i), store=store)) for i in range(2)]
        assert await placed(gateways[0], "a") == ("remote", "above_threshold")
        await change_share(store, (ANY, ANY), change(50))
        await until(lambda: [percent(g) for g in gateways] == [50, 50])
        far: dict[str, set[tuple[str, str]]] = {}
        for i in range(24):
            session = f"s{i % 12}"
            where = await placed(gateways[i // 12], f"{i:02}", **{"X-Session-ID": session})
            far.setdefault(session, set()).add(where)
        assert all(len(places) == 1 for places in far.values()), "both gateways draw the same sessions"
        assert set().union(*far.values()) == {("remote", "above_threshold"), ("local", "rollout")}
        await revert_all(store, "test", "stop", time.time())
        await until(lambda: [percent(g) for g in gateways] == [0, 0])
        assert [await placed(g, "z") for g in gateways] == [("local", "rollout")] * 2
        status, shown, _ = await gateways[1].get("/v1/farfill/rollout")
        assert (status, shown["shares"][0]["percent"], shown["shares"][0]["reason"]) == (200, 0, "stop")
        assert [a.what for a in await audit_log(store)] == [
            "rollout * *: unset -> 50 %",
            "rollout * *: 50 % -> 0 %",
        ]


async def test_automatic_rollout_reverts_by_itself_when_far_prefill_fails(tmp_path: Path, store: EmbeddedStore) -> None:
    routing = {"rollout": {"min_requests": 2}, "circuit_breaker": {"min_requests": 1000}}
    async with running_gateway(tmp_path, store=store, routing=routing) as gateway:
        await change_share(store, (ANY, ANY), change(50, automatic=True, sticky="request"))
        await until(lambda: percent(gateway) == 50)
        gateway.prefill.refuse = (500, ErrorBody(reason="engine_error", message="broke"))
        for i in range(12):
            await placed(gateway, f"{i:02}")
        await until(lambda: percent(gateway) == 0)
        record = gateway.service.rollout.records[ANY, ANY]
        assert (record.automatic, record.reason) == (False, "revert: success_rate")
        assert record.author.startswith("gateway-")
        assert await placed(gateway, "zz") == ("local", "rollout")


async def test_automatic_rollout_goes_on_when_its_guards_hold(tmp_path: Path, store: EmbeddedStore) -> None:
    routing = {"rollout": {"min_requests": 1, "min_step_s": 0.0, "ttft_ratio_hold": 1e9, "ttft_ratio_revert": 1e9}}
    async with running_gateway(tmp_path, store=store, routing=routing) as gateway:
        await change_share(store, (ANY, ANY), change(50, automatic=True, sticky="request"))
        await until(lambda: percent(gateway) == 50)
        i = 0
        while percent(gateway) != 100:
            await placed(gateway, f"{i:03}")
            i += 1
            assert i < 400
        record = gateway.service.rollout.records[ANY, ANY]
        assert (record.automatic, record.reason) == (True, "advance: guards_passed")
        assert i >= 40, "a share advances only on 20 first tokens from either side"


async def test_breaker_opened_by_one_gateway_is_open_at_the_other(tmp_path: Path, store: EmbeddedStore) -> None:
    routing = {"circuit_breaker": {"min_requests": 2, "open_s": 60.0}}
    async with (
        running_gateway(tmp_path / "a", store=store, routing=routing) as first,
        running_gateway(tmp_path / "b", store=store, routing=routing) as second,
    ):
        assert await placed(second, "a") == ("remote", "above_threshold")
        first.prefill.refuse = (500, ErrorBody(reason="engine_error", message="broke"))
        for i in range(2):
            await placed(first, f"{i}")
        await until(lambda: first.service.health.state(first.prefill.instance) == "open")
        await until(lambda: second.service.health.state(second.prefill.instance) == "open")
        assert await placed(second, "b") == ("local", "breaker_open")
        _, shown, _ = await second.get("/v1/farfill/instances")
        assert shown["sites"]["far"]["breaker"] == "closed", "one instance's fault is not its site's"


async def test_gateway_keeps_the_share_it_knew_while_the_store_is_away(tmp_path: Path) -> None:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as store:
        broken = Breakable(store)
        async with running_gateway(tmp_path, store=broken) as gateway:  # type: ignore[arg-type]
            await change_share(store, (ANY, ANY), change(0))
            await until(lambda: percent(gateway) == 0)
            broken.away = True
            shared = gateway.service.shared
            assert shared is not None
            await change_share(store, (ANY, ANY), change(100))  # wakes the watch, which finds the store away
            await until(lambda: shared.stale_s > 0)
            assert await placed(gateway, "a") == ("local", "rollout")
            _, shown, _ = await gateway.get("/v1/farfill/rollout")
            assert shown["registry"].startswith("away for")
            broken.away = False
            await until(lambda: percent(gateway) == 100)
            assert await placed(gateway, "b") == ("remote", "above_threshold")


async def test_gateway_that_starts_knows_the_shares_before_its_first_request(
    tmp_path: Path, store: EmbeddedStore
) -> None:
    await change_share(store, (ANY, ANY), change(0))
    async with running_gateway(tmp_path, store=store) as gateway:
        assert await placed(gateway, "a") == ("local", "rollout")


async def test_gateway_that_starts_while_the_store_is_away_undoes_no_revert(
    tmp_path: Path, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farfill.gateway.shared.FIRST_ANSWER_S", 0.05)
    broken = Breakable(store)
    broken.away = True
    async with running_gateway(tmp_path, store=broken) as gateway:  # type: ignore[arg-type]
        assert await placed(gateway, "a") == ("local", "rollout")
        broken.away = False
        await until(lambda: gateway.service.rollout.share("tiny", "default") is None)
        assert await placed(gateway, "b") == ("remote", "above_threshold")


class Breakable:
    """A store that can be away."""

    def __init__(self, store: EmbeddedStore) -> None:
        self._store = store
        self.away = False

    def __getattr__(self, name: str) -> Any:
        if name == "watch":
            return self._watch
        call = getattr(self._store, name)

        async def checked(*args: Any, **kwargs: Any) -> Any:
            self._check()
            return await call(*args, **kwargs)

        return checked

    async def _watch(self, prefix: str, after: int) -> AsyncIterator[Any]:
        self._check()
        async for batch in self._store.watch(prefix, after):
            self._check()
            yield batch

    def _check(self) -> None:
        if self.away:
            raise StoreError("away", reason="unreachable")


async def test_share_of_one_tenant_counts_before_that_of_all(tmp_path: Path, store: EmbeddedStore) -> None:
    async with running_gateway(tmp_path, store=store, admission={"tenant_header": "X-Tenant"}) as gateway:
        await change_share(store, (ANY, ANY), change(0))
        await change_share(store, ("tiny", "gold"), change(100))
        await until(lambda: len(gateway.service.rollout.records) == 2)
        assert await placed(gateway, "a", **{"X-Tenant": "gold"}) == ("remote", "above_threshold")
        assert await placed(gateway, "b", **{"X-Tenant": "other"}) == ("local", "rollout")
        assert isinstance(gateway.service.rollout.records["tiny", "gold"], RolloutRecord)


async def test_parity_sample_that_differs_takes_everything_back(tmp_path: Path, store: EmbeddedStore) -> None:
    routing = {"rollout": {"parity_sample": 1.0}}
    async with running_gateway(tmp_path, store=store, routing=routing) as gateway:
        await change_share(store, (ANY, ANY), change(100, automatic=True))
        await until(lambda: percent(gateway) == 100)
        greedy = {**body("a"), "max_tokens": 3, "temperature": 0}
        assert (await gateway.post(COMPLETIONS, greedy))[0] == 200
        await until(lambda: len(gateway.decode.decodes) == 2)
        far, near = gateway.decode.decodes
        assert (near.ticket, near.token_ids, near.sampling.max_tokens) == ("", far.token_ids, 3)
        assert near.cache_salt.startswith(f"{far.cache_salt}:parity-")
        await until(lambda: not len(gateway.service.background))
        assert percent(gateway) == 100
        gateway.decode.texts = ["one"]  # decode stops after a token now, as if another one had come out
        await gateway.service.parity.compare(_job_like(gateway), [65, 66, 67])
        await until(lambda: percent(gateway) == 0)
        assert gateway.service.rollout.records[ANY, ANY].reason == "revert: parity_mismatch"


async def test_sampled_answers_are_no_parity_samples(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, routing={"rollout": {"parity_sample": 1.0}}) as gateway:
        assert (await gateway.post(COMPLETIONS, {**body("a"), "temperature": 1.0}))[0] == 200
        assert (await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "short", "temperature": 0}))[0] == 200
        await until(lambda: not len(gateway.service.background))
        assert len(gateway.decode.decodes) == 2


def _job_like(gateway: Harness) -> Job:
    command = gateway.decode.decodes[0]
    return Job(
        request_id="again",
        prompt=Prompt(command.token_ids),
        keys=(),
        salt=command.cache_salt,
        tenant="default",
        sampling=SamplingParams(max_tokens=3, temperature=0.0),
        forced=None,
        traceparent="",
        accepted_s=0.0,
    )
