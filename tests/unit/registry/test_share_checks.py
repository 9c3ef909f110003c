"""Shares and reverts that name what is not there."""

from __future__ import annotations

import pytest

from farfill.clock import WallClock
from farfill.core.cluster import Role
from farfill.core.errors import InvalidRequestError
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.rollouts import ANY, ShareChange, ShareKey, change_share, version_share
from farfill.registry.share_checks import check_reason, check_revert, check_share
from support.memory_disk import MemoryDisk

CHANGE = ShareChange(10.0, False, "me", "", 1.0)


@pytest.mark.parametrize("key", [("m", ANY), (ANY, ANY), (ANY, "team-a"), ("gone", ANY)])
async def test_share_of_what_is_there_may_be_changed(key: ShareKey) -> None:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as store:
        await change_share(store, ("gone", ANY), lambda _: CHANGE)  # of a model served earlier: it can go to 0 %
        await check_share(store, key, {"m"})


@pytest.mark.parametrize(("key", "param"), [(("nope", ANY), "model"), (("M", ANY), "model"), (("m", "a/b"), "tenant")])
async def test_share_of_nothing_is_refused_with_what_there_is(key: ShareKey, param: str) -> None:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as store:
        with pytest.raises(InvalidRequestError, match=r"there are: m, or|is no tenant") as caught:
            await check_share(store, key, {"m"})
        assert caught.value.param == param


async def test_only_a_version_that_runs_or_has_a_share_goes_back() -> None:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as store:
        with pytest.raises(InvalidRequestError, match="no version 'v2'; there are: none"):
            await check_revert(store, "v2")
        await change_share(store, version_share(Role.DECODE, "v2"), lambda _: CHANGE)
        await check_revert(store, "v2")
        with pytest.raises(InvalidRequestError, match="no version 'nope'; there are: v2"):
            await check_revert(store, "nope")


@pytest.mark.parametrize("text", ["x" * 501, "a\nb", "\x1b[2J", "\u2028", "\ud800"])
def test_reason_is_one_printable_line(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="up to 500 printable"):
        check_reason(text)
    assert check_reason("x" * 500) == "x" * 500
    assert check_reason("früh, wegen 東京") == "früh, wegen 東京"
