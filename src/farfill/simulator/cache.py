"""The prefix cache of one simulated instance: blocks by key, the least recently used go first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice


class BlockCache:
    """Holds at most `blocks` keys; 0: there is no cache."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: dict[bytes, None] = {}  # in the order of use

    def __len__(self) -> int:
        return len(self._held)

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first blocks it has."""
        held = self._held
        for index, key in enumerate(keys):
            if key not in held:
                return index
        return len(keys)

    def add(self, keys: Sequence[bytes]) -> None:
        """Keep these, the first of them longest: who loses the beginning of a prefix has lost it all."""
        if self._blocks == 0:
            return
        held = self._held
        for key in keys:
            held.pop(key, None)
        held.update(dict.fromkeys(reversed(keys)))
        over = len(held) - self._blocks
        if over > 0:
            for key in list(islice(held, over)):
                del held[key]

    def clear(self) -> None:
        """The instance restarted."""
        self._held.clear()
