"""What the gateway believes each decode instance still holds of earlier prompts. Pure, bounded, LRU.

The belief comes from routing history and is corrected by what decode reports: an instance that repeatedly
holds less than believed (its model cannot resume from prefixes, its cache is small) is no longer believed
until its reports agree again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_TRUST_MIN = -2
_TRUST_MAX = 4


class _Held:
    """The keys of one instance generation, least recently used first."""

    __slots__ = ("generation", "keys", "trust")

    def __init__(self, generation: str) -> None:
        self.generation = generation
        self.keys: OrderedDict[bytes, None] = OrderedDict()
        self.trust = 0

    def leading(self, keys: Sequence[bytes]) -> int:
        count = 0
        for key in keys:
            if key not in self.keys:
                break
            count += 1
        return count


class PrefixIndex:
    """Chained block keys per decode instance. A new generation starts empty."""

    def __init__(self, max_keys_per_instance: int) -> None:
        self._max_keys = max_keys_per_instance
        self._held: dict[str, _Held] = {}

    def hit_blocks(self, instance: str, generation: str, keys: Sequence[bytes]) -> int:
        """How many leading blocks of `keys` the instance is believed to hold."""
        held = self._held.get(instance)
        if held is None or held.generation != generation or held.trust < 0:
            return 0
        return held.leading(keys)

    def record(self, instance: str, generation: str, keys: Sequence[bytes], reported_blocks: int | None) -> None:
        """A prompt with `keys` is held at the instance now, which had reported a hit of `reported_blocks`.

        None: the report says nothing about the belief (the prompt came from elsewhere).
        """
        held = self._held.get(instance)
        if held is None or held.generation != generation:
            held = self._held[instance] = _Held(generation)
        believed = held.leading(keys)
        if believed and reported_blocks is not None:
            step = 1 if reported_blocks >= believed else -1
            held.trust = max(_TRUST_MIN, min(_TRUST_MAX, held.trust + step))
        # Later blocks first, so that a shared prefix is the last thing eviction takes.
        for key in reversed(keys[: self._max_keys]):
            held.keys[key] = None
            held.keys.move_to_end(key)
        while len(held.keys) > self._max_keys:
            held.keys.popitem(last=False)

    def retain(self, live: Sequence[tuple[str, str]]) -> None:
        """Forget every instance that is not among the `live` (name, generation) pairs."""
        alive = dict(live)
        for name in [n for n, held in self._held.items() if alive.get(n) != held.generation]:
            del self._held[name]

    def __len__(self) -> int:
        return sum(len(held.keys) for held in self._held.values())
