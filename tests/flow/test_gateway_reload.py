"""A changed cluster file applies to running gateways, as far as that is safe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.gateway_harness import Harness, make_config, running_gateway

COMPLETIONS = "/v1/completions"


async def reason(gateway: Harness, prompt: str) -> str:
    status, answer, response = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": prompt, "max_tokens": 1})
    return response.headers["x-farfill-reason"] if status == 200 else answer["error"]["code"]


def changed(gateway: Harness, **sections: dict[str, Any]) -> Any:
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
