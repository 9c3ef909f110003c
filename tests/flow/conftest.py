"""Fixtures of several tests of the transfer plane."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog

from support.transfer_harness import Ends, two_ends


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    """One sender and one receiver, not started yet; they must leave nothing."""
    async with two_ends(tmp_path) as ends:
        yield ends


@pytest.fixture
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What is logged meanwhile."""
    with structlog.testing.capture_logs() as entries:
        yield entries
