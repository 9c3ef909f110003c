"""The prefix cache of one simulated instance: blocks by key, the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """Holds at most `blocks` keys; 0: there is no cache."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()

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
        for key in reversed(keys):
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = None
        while len(held) > self._blocks:
            held.popitem(last=False)

    def clear(self) -> None:
        """The instance restarted."""
        self._held.clear()
