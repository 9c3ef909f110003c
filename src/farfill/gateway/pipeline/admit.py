"""Whether there is room for another request. Comes before tokenizing: a full gateway spends nothing more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from farfill.gateway.errors import OverloadedError


class Admission:
    """At most `limit` requests in progress; a slot is held until the last byte is out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_progress = 0

    @property
    def in_progress(self) -> int:
        return self._in_progress

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Raises OverloadedError (429) when all slots are taken."""
        if self._in_progress >= self._limit:
            raise OverloadedError(f"{self._limit} requests are in progress (gateway.max_concurrent_requests)")
        self._in_progress += 1
        try:
            yield
        finally:
            self._in_progress -= 1
