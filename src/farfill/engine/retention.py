"""Which prefix snapshots go first: the order is GreedyDual-Size (Cao and Irani, 1997) over cost of recomputing.

A part is worth its recompute cost per byte on top of a floor that rises to the worth of whatever was dropped last:
what is not used sinks below what is, and among equals the least recently used goes first. Pure: time comes in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# At this depth attending to what lies before costs about as much as everything else a token costs.
_DEPTH_TOKENS = 8192
# Instructions for chains; beyond this the oldest are forgotten.
_MAX_INSTRUCTIONS = 1 << 16
# Pinned snapshots must leave room for others.
_PINNED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Keep:
    """How a prefix is to be kept: `weight` multiplies its worth; `pinned` keeps it whatever it is worth."""

    weight: float = 1.0
    pinned: bool = False


class Part:
    """The rows, or the windows and states, of one chunk."""

    __slots__ = ("cost", "key", "nbytes", "pinned", "used", "used_s", "worth")

    def __init__(self, key: bytes, nbytes: int, cost: float, *, pinned: bool) -> None:
        self.key = key
        self.nbytes = nbytes
        self.cost = cost
        self.pinned = pinned
        self.worth = 0.0
        self.used = 0
        self.used_s = 0.0


class Retention:
    """The account of all parts. `ttl_s` 0: age alone drops nothing."""

    def __init__(self, limit_bytes: int, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._pin_limit_bytes = int(limit_bytes * _PINNED_SHARE)
        self._pinned_bytes = 0
        self._parts: dict[int, Part] = {}
        self._keep: OrderedDict[bytes, Keep] = OrderedDict()
        self._floor = 0.0
        self._uses = 0
        self._look_s = 0.0
        self.evicted_for_room = 0
        self.evicted_by_age = 0

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, key: bytes, nbytes: int, cost: float) -> Part:
        """A new part of the chunk `key`; touch it next. Beyond half the limit, pins only weigh."""
        pinned = self._wants_pin(key) and self._pinned_bytes + nbytes <= self._pin_limit_bytes
        part = Part(key, nbytes, cost, pinned=pinned)
        self._parts[id(part)] = part
        if pinned:
            self._pinned_bytes += nbytes
        return part

    def remove(self, part: Part) -> None:
        """It is gone. What stays is worth at least as much as what went."""
        del self._parts[id(part)]
        if part.pinned:
            self._pinned_bytes -= part.nbytes

    def touch(self, part: Part, now_s: float) -> None:
        """It was used."""
        self._uses += 1
        part.used, part.used_s = self._uses, now_s
        weight = self._keep[part.key].weight if part.key in self._keep else 1.0
        part.worth = self._floor + weight * part.cost / max(1, part.nbytes)

    def keep(self, keys: Sequence[bytes], how: Keep) -> None:
        """Instructions for chunks, there or to come; they count from the next touch on."""
        for key in keys:
            self._keep[key] = how
            self._keep.move_to_end(key)
        while len(self._keep) > _MAX_INSTRUCTIONS:
            self._keep.popitem(last=False)
        wanted = frozenset(keys)
        for part in self._parts.values():
            if part.key in wanted and part.pinned != how.pinned:
                if how.pinned and self._pinned_bytes + part.nbytes > self._pin_limit_bytes:
                    continue
                part.pinned = how.pinned
                self._pinned_bytes += part.nbytes if how.pinned else -part.nbytes

    def cheapest(self, may_go: Callable[[Part], bool]) -> Part | None:
        """The part worth least of those that may go; the floor rises to it."""
        found = min(
            (part for part in self._parts.values() if not part.pinned and may_go(part)),
            key=lambda part: (part.worth, part.used),
            default=None,
        )
        if found is not None:
            self._floor = max(self._floor, found.worth)
        return found

    def unpinned(self) -> Iterator[Part]:
        """The parts that are not pinned."""
        return (part for part in self._parts.values() if not part.pinned)

    def expired(self, now_s: float) -> list[Part]:
        """Parts unused for too long, what builds on others first. Looks only when some may have become so."""
        if not self._ttl_s or now_s < self._look_s:
            return []
        old = [part for part in self.unpinned() if part.used_s + self._ttl_s <= now_s]
        rest = (part.used_s for part in self.unpinned() if part.used_s + self._ttl_s > now_s)
        self._look_s = min(rest, default=now_s) + self._ttl_s
        # A chain's beginning is always used last.
        return sorted(old, key=lambda part: part.used)

    def next_expiry_s(self, now_s: float) -> float | None:
        """Seconds until some part may be too old; None when there is none."""
        return max(0.0, self._look_s - now_s) if self._ttl_s and self._parts else None

    def _wants_pin(self, key: bytes) -> bool:
        return key in self._keep and self._keep[key].pinned


def chunk_cost(chunk_tokens: int, chunk: int) -> float:
    """What computing chunk number `chunk` costs, in tokens at the beginning of a prompt."""
    return chunk_tokens * (1.0 + (chunk + 0.5) * chunk_tokens / _DEPTH_TOKENS)
