"""vLLM's own API as both workers of the test cluster offer it to stock routers."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.system.cluster import DECODE, PREFILL, Cluster
from tests.vllm_engine.router import post
from tests.vllm_engine.serve import free_port

FRONTS = {PREFILL: free_port(), DECODE: free_port()}
TEXT = "The quick brown fox jumps over the lazy dog. " * 60


def front(name: str) -> str:
    return f"http://127.0.0.1:{FRONTS[name]}"


def asked(prompt: object, **changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **changes,
    }


def answer_of(url: str, body: dict[str, Any]) -> list[int]:
    return post(f"{url}/v1/completions", body)["choices"][0]["token_ids"]


def held(prompt: object) -> dict[str, Any]:
    """What the prefill worker tells a router to tell decode, after it took `prompt`."""
    answer = post(f"{front(PREFILL)}/v1/completions", asked(prompt, kv_transfer_params={"do_remote_decode": True}))
    return answer["kv_transfer_params"]


def spoilt(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`params` with other words about the KV."""
    return {**params, "farfill": {**params["farfill"], **changes}}


def running_requests(cluster: Cluster) -> int:
    """As the gateway counts them."""
    with urllib.request.urlopen(f"{cluster.url}/v1/farfill/instances", timeout=5) as answer:
        return sum(entry["outstanding_requests"] for entry in json.load(answer)["instances"])
