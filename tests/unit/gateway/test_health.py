from __future__ import annotations

from dataclasses import replace

import pytest

from farfill.clock import VirtualClock
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.gateway.health import DecodeReach

DECODE = Instance(
    name="d", role=Role.DECODE, site="near", url="https://h:1", transfer_address="h:2", model="m", fingerprint="f",
    generation="1", state=InstanceState.READY, max_context_tokens=100,
)  # fmt: skip


def test_decode_is_lost_until_it_is_reached_or_restarted() -> None:
    reach = DecodeReach(10.0, VirtualClock())
    assert not reach.lost(DECODE)
    reach.tried(DECODE, reached=False)
    assert reach.lost(DECODE)
    assert not reach.lost(replace(DECODE, generation="2"))
    reach.tried(DECODE, reached=True)
    assert not reach.lost(DECODE)


@pytest.mark.parametrize(("later_s", "lost"), [(9.0, True), (10.0, False)])
def test_decode_is_lost_for_one_lease(later_s: float, lost: bool) -> None:
    clock = VirtualClock()
    reach = DecodeReach(10.0, clock)
    reach.tried(DECODE, reached=False)
    clock.advance(later_s)
    assert reach.lost(DECODE) is lost
