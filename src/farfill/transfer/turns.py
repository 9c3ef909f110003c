"""Whose turn it is on a shared link: equal bytes to each, by start-time fair queueing (Goyal, Vin, Cheng, 1996).

Turns by chunk would favour transfers with large chunks. A transfer that had nothing to send for a while does not
collect claims: it goes on from where the others are. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)


class Turns(Generic[_T]):
    """Not locked: the owner serialises calls."""

    def __init__(self) -> None:
        self._served: dict[_T, float] = {}
        self._now = 0.0

    def order(self, waiting: Iterable[_T]) -> list[_T]:
        """Who is served first; equals keep their order."""
        return sorted(waiting, key=self._start)

    def charge(self, who: _T, nbytes: int) -> None:
        """It was given a turn of so many bytes; a negative number corrects an earlier charge."""
        start = self._start(who)
        if nbytes > 0:
            self._now = start
        self._served[who] = start + nbytes

    def forget(self, who: _T) -> None:
        """It is over."""
        self._served.pop(who, None)

    def _start(self, who: _T) -> float:
        return max(self._served.get(who, 0.0), self._now)
