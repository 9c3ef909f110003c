"""A changed cluster file applies to running gateways, as far as that is safe."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.gateway_harness import Harness, make_config, running_gateway

COMPLETIONS = "/v1/completions"


async def reason(gateway: Harness, prompt: str) -> str:
    status, answer, response = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": prompt, "max_tokens": 1})
    return response.headers["x-farfill-reason"] if status == 200 else answer["error"]["code"]


def changed(gateway: Harness, /, **sections: dict[str, Any]) -> Any:
    return make_config(gateway.service.deps.config.model.path, **sections)


async def test_threshold_and_limits_apply_at_once_and_the_rest_is_named(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        assert await reason(gateway, "a" * 100) == "above_threshold"
        done = gateway.service.reloader.apply(
            changed(
                gateway,
                routing={"remote_prefill_threshold_tokens": 1000, "allow_placement_override": True},
                admission={"tenants": {"*": {"tokens_per_s": 1.0}}, "tenant_header": "X-T"},
                kv_transfer={"timeout_ms": 1234},
            )
        )
        assert done.applied == ("admission.tenants.*", "routing.remote_prefill_threshold_tokens")
        assert done.restart == ("admission.tenant_header", "kv_transfer.timeout_ms")
        assert await reason(gateway, "b" * 100) == "below_threshold"
        assert await reason(gateway, "c" * 100) == "tenant_tokens"


async def test_weights_apply_at_once(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        before = gateway.service.placer._decode.settings.weights
        weights = {"decode_weights": {"least_work": 0.0, "outstanding_tokens": 2.0}}
        done = gateway.service.reloader.apply(
            changed(
                gateway,
                routing={
                    "remote_prefill_threshold_tokens": 32,
                    "allow_placement_override": True,
                    "placement": weights,
                },
            )
        )
        assert done.applied == (
            "routing.placement.decode_weights.least_work",
            "routing.placement.decode_weights.outstanding_tokens",
        )
        after = gateway.service.placer._decode.settings.weights
        assert (before["least_work"], "least_work" in after, after["outstanding_tokens"]) == (4.0, False, 2.0)
        assert await reason(gateway, "a" * 100) == "above_threshold"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def test_who_runs_and_who_waits_is_served_whatever_limits_change_to(tmp_path: Path) -> None:
    limits = {"gateway": {"site": "near", "max_concurrent_requests": 1}, "admission": {"max_queue": 8}}
    async with running_gateway(tmp_path, **limits) as gateway:
        machine = gateway.service.admission._machine
        gateway.decode.hold_before_start = asyncio.Event()
        asked = [asyncio.create_task(reason(gateway, f"{i}" * 40)) for i in range(6)]
        await until(lambda: (machine.running, machine.waiting) == (1, 5))
        wider = {"gateway": {"site": "near", "max_concurrent_requests": 3}, "admission": {"max_queue": 8}}
        gateway.service.reloader.apply(changed(gateway, **wider))
        # Not only when somebody ends: nobody does here.
        await until(lambda: (machine.running, machine.waiting, len(gateway.decode.decodes)) == (3, 3, 3))
        narrower = {"gateway": {"site": "near", "max_concurrent_requests": 1}}
        narrower["admission"] = {"max_queue": 0, "max_kv_tokens": 30}
        gateway.service.reloader.apply(changed(gateway, **narrower))
        assert (machine.running, machine.waiting) == (3, 3)
        assert await reason(gateway, "z" * 40) == "rate_limit_exceeded"
        gateway.decode.hold_before_start.set()
        assert await asyncio.gather(*asked) == ["above_threshold"] * 6
        assert await reason(gateway, "z" * 40) == "too_large"


async def test_reload_over_and_over_under_load_loses_nothing(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        files = [
            changed(
                gateway,
                routing={"remote_prefill_threshold_tokens": threshold, "placement": {"picker": picker}},
                gateway={"site": "near", "max_concurrent_requests": running},
            )
            for threshold, picker, running in ((32, "best", 2), (1000, "spread", 64), (32, "spread", 5))
        ]
        asked = [asyncio.create_task(reason(gateway, f"{i:03}" * 20)) for i in range(90)]
        for turn in range(60):
            gateway.service.reloader.apply(files[turn % len(files)])
            await asyncio.sleep(0)
        found = Counter(await asyncio.gather(*asked))
    assert set(found) <= {"above_threshold", "below_threshold"}, found
    assert found.total() == 90
