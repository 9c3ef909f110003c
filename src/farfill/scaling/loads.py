"""What each group does now, asked of Prometheus: busy instances, waiting work, ready and starting workers."""

from __future__ import annotations

import asyncio
from math import isfinite
from typing import Any, cast

import aiohttp

from farfill.core.errors import FarfillError
from farfill.policy.scaling import Group, GroupLoad
from farfill.scaling.file import AutoscaleFile, GroupSection, group_of


class LoadUnknownError(FarfillError):
    """Prometheus did not answer, or with nothing that can be used."""

    reason = "load_unknown"
    retryable = True


class PrometheusLoads:
    """Asks with instant queries. A group without any worker is seen as having none."""

    def __init__(self, file: AutoscaleFile, session: aiohttp.ClientSession) -> None:
        self._file = file
        self._session = session

    async def read(self) -> dict[Group, GroupLoad]:
        """All groups. Raises LoadUnknownError: half a picture must not be decided on."""
        keys = list(self._file.groups)
        loads = await asyncio.gather(*(self._load(key, self._file.groups[key]) for key in keys))
        return {group_of(key): load for key, load in zip(keys, loads, strict=True)}

    async def _load(self, key: str, section: GroupSection) -> GroupLoad:
        group = group_of(key)
        queries = load_queries(group, self._file.prometheus.window, section.batch)
        values = await asyncio.gather(*(self._value(query) for query in queries.values()))
        found = dict(zip(queries, values, strict=True))
        return GroupLoad(
            ready=round(found["ready"]),
            starting=round(found["starting"]),
            busy=found["busy"],
            waiting_s=found["waiting_s"],
        )

    async def _value(self, query: str) -> float:
        try:
            async with self._session.get(
                f"{self._file.prometheus.url.rstrip('/')}/api/v1/query", params={"query": query}
            ) as response:
                response.raise_for_status()
                return _single(await response.json())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise LoadUnknownError(f"prometheus.url: {query}: {error or type(error).__name__}") from error


def load_queries(group: Group, window: str, batch: int) -> dict[str, str]:
    """PromQL by field of GroupLoad.

    Prefill is busy for as many seconds a second as prompts took to compute; what waits are tokens at the time one took
    of late. Decode is busy by its sequences over the batch of a full instance; those that wait are wanted at once.
    """
    where = f'site="{group.site}",role="{group.role}"'
    computed = f"sum(rate(farfill_prefill_seconds_sum{{{where}}}[{window}]))"
    tokens = f'sum(rate(farfill_prefill_tokens_total{{{where},source="computed"}}[{window}]))'
    if group.role == "prefill":
        busy, waiting = computed, f"sum(farfill_queue_tokens{{{where}}}) * {computed} / {tokens}"
    else:
        sequences = f"sum(farfill_running_sequences{{{where}}}) + sum(farfill_waiting_sequences{{{where}}})"
        busy, waiting = f"({sequences}) / {batch}", "vector(0)"
    # Each gateway sees all workers: they agree, so one of them is asked by taking the most.
    return {
        "ready": f'max(farfill_workers{{{where},state="ready"}})',
        "starting": f'max(farfill_workers{{{where},state="starting"}})',
        "busy": busy,
        "waiting_s": waiting,
    }


def _single(answer: Any) -> float:
    """The one number; 0 when there is no series, or nothing to divide by. Raises ValueError otherwise."""
    if not isinstance(answer, dict):
        raise ValueError("no JSON object came back")
    data = cast("dict[str, Any]", answer)
    if data.get("status") != "success":
        raise ValueError(str(data.get("error", "no success")))
    result = data["data"]["result"]
    if not result:
        return 0.0
    value = float(result[0]["value"][1])
    return value if isfinite(value) else 0.0
