"""Which prefix snapshots go first: the order is GreedyDual-Size (Cao and Irani, 1997) over cost of recomputing.

A part is worth its recompute cost per byte on top of a floor that rises to the worth of whatever was dropped last:
what is not used sinks below what is, and among equals the least recently used goes first. Pure: time comes in.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# At this depth attending to what lies before costs about as much as everything else a token costs.
_DEPTH_TOKENS = 8192
# Orders for chains; beyond this the oldest are forgotten.
_MAX_ORDERS = 1024
# Pinned snapshots must leave room for others.
_PINNED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Keep:
    """How a prefix is to be kept until `until_s`: `weight` multiplies its worth; `pinned` keeps it whatever that is."""

    weight: float = 1.0
    pinned: bool = False
    until_s: float = math.inf

    @property
    def is_plain(self) -> bool:
        """As without any order."""
        return self.weight == 1.0 and not self.pinned


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """What somebody wants for a chain. Windows and states are of use only at its end."""

    keys: tuple[bytes, ...]
    how: Keep

    def pins(self, part: Part) -> bool:
        return self.how.pinned and (not part.is_states or part.key == self.keys[-1])


class Part:
    """The rows, or the windows and states, of one chunk."""

    __slots__ = ("cost", "is_states", "key", "nbytes", "pinned", "used", "used_s", "worth")

    def __init__(self, key: bytes, nbytes: int, cost: float, *, is_states: bool) -> None:
        self.key = key
        self.nbytes = nbytes
        self.cost = cost
        self.is_states = is_states
        self.pinned = False
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
        # By the chain's last key, and all that concern a chunk.
        self._orders: OrderedDict[bytes, _Order] = OrderedDict()
        self._concerned: defaultdict[bytes, list[_Order]] = defaultdict(list)
        self._order_ends_s = math.inf
        self._floor = 0.0
        self._uses = 0
        self._look_s = 0.0
        self.evicted_for_room = 0
        self.evicted_by_age = 0
        self.pins_refused = 0

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the parts that are pinned."""
        return self._pinned_bytes

    def add(self, key: bytes, nbytes: int, cost: float, *, is_states: bool = False) -> Part:
        """A new part of the chunk `key`; touch it next. Beyond half the limit, pins only weigh."""
        part = Part(key, nbytes, cost, is_states=is_states)
        self._parts[id(part)] = part
        self._settle(part)
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
        weight = max((order.how.weight for order in self._concerned.get(part.key, ())), default=1.0)
        part.worth = self._floor + weight * part.cost / max(1, part.nbytes)

    def keep(self, keys: Sequence[bytes], how: Keep) -> None:
        """An order for a chain, there or to come; it takes the place of an earlier one for the same chain.

        Weights count from the next touch on. Of several orders for a chunk the strongest counts.
        """
        self._withdraw(keys[-1])
        if how.is_plain:
            return
        order = self._orders[keys[-1]] = _Order(tuple(keys), how)
        for key in keys:
            self._concerned[key].append(order)
        self._order_ends_s = min(self._order_ends_s, how.until_s)
        while len(self._orders) > _MAX_ORDERS:
            self._withdraw(next(iter(self._orders)))
        self._settle_all(order)

    def end_orders(self, now_s: float) -> None:
        """Forget orders whose time is over. Looks only when there may be some."""
        if now_s < self._order_ends_s:
            return
        for last, order in list(self._orders.items()):
            if order.how.until_s <= now_s:
                self._withdraw(last)
        self._order_ends_s = min((order.how.until_s for order in self._orders.values()), default=math.inf)

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
        """Seconds until some part may be too old, or an order ends; None when there is neither."""
        next_s = min(self._order_ends_s, self._look_s if self._ttl_s and self._parts else math.inf)
        return None if next_s == math.inf else max(0.0, next_s - now_s)

    def _withdraw(self, last: bytes) -> None:
        order = self._orders.pop(last, None)
        if order is None:
            return
        for key in order.keys:
            self._concerned[key].remove(order)
            if not self._concerned[key]:
                del self._concerned[key]
        self._settle_all(order)

    def _settle_all(self, order: _Order) -> None:
        keys = frozenset(order.keys)
        for part in self._parts.values():
            if part.key in keys:
                self._settle(part)

    def _settle(self, part: Part) -> None:
        """Pin a part, or let it go, as orders want it now."""
        wanted = any(order.pins(part) for order in self._concerned.get(part.key, ()))
        if wanted == part.pinned:
            return
        if wanted and self._pinned_bytes + part.nbytes > self._pin_limit_bytes:
            self.pins_refused += 1
            return
        part.pinned = wanted
        self._pinned_bytes += part.nbytes if wanted else -part.nbytes


def chunk_cost(chunk_tokens: int, chunk: int) -> float:
    """What computing chunk number `chunk` costs, in tokens at the beginning of a prompt."""
    return chunk_tokens * (1.0 + (chunk + 0.5) * chunk_tokens / _DEPTH_TOKENS)
