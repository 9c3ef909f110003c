"""What is told while a local cluster starts."""

from __future__ import annotations

from typing import cast

import pytest

from farfill.cli import local_ready
from farfill.cli.local_cluster import LocalCluster


class _Starting:
    """A cluster whose roles come up one after another."""

    url = "http://127.0.0.1:1"
    children = ()

    def check(self) -> None:
        """All alive."""


async def test_a_step_says_what_it_still_waits_for(monkeypatch: pytest.MonkeyPatch):
    states = iter([set(), {"gateway"}, {"gateway", "decode-near"}, {"gateway", "decode-near", "prefill-far"}])

    async def next_state(_: object) -> set[str]:
        return cast("set[str]", next(states))

    monkeypatch.setattr(local_ready, "_ready_roles", next_state)
    monkeypatch.setattr(local_ready, "POLL_S", 0.0)
    told: list[str] = []
    await local_ready.until_ready(cast("LocalCluster", _Starting()), told.append)
    assert told[1:] == [
        "gateway ready; waiting for decode-near, prefill-far",
        "decode-near ready; waiting for prefill-far",
        "prefill-far ready",
    ]
