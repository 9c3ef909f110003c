"""Who holds which prefix: one index over all sites and instances. Pure and bounded.

Each block key maps to the set of holders, as bits of one integer, so that a prompt is compared with all instances at
once. It is fed in two ways. Instances that announce block events are *exact*: what they stored is held until they say
it is gone. For all others the history of placements is the *belief*, corrected by what they report: an instance that
repeatedly holds less than believed is not believed until its reports agree again.

Keys carry the tenant's salt (`kv.hashing.prefix_keys`), so one tenant's prompt never meets another's blocks here.

Bounded by two generations: when the young one is full it becomes the old one, and the old one's blocks, those not
seen for a whole generation, are forgotten. What exact holders announced is not said twice, so it moves on, while it
fills at most half of a generation. A holder that left is only taken off the set of the living; its bits go with the
generations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

TRUST_MIN = -2
TRUST_MAX = 4
MAX_RETIRED = 128
"""More holders that left than this make a generation turn early: their bits would make every set long."""


@dataclass(slots=True)
class _Holder:
    name: str
    site: str
    generation: str
    bit: int
    exact: bool
    sparse: bool
    trust: int = 0


class PrefixHits(msgspec.Struct, frozen=True):
    """Leading blocks of one prompt by holder; holders without any are left out."""

    blocks: dict[str, int]
    sites: dict[str, int]

    def at(self, holder: str) -> int:
        """Leading blocks at one holder."""
        return self.blocks.get(holder, 0)

    def at_site(self, site: str) -> int:
        """Leading blocks at the best holder of a site."""
        return self.sites.get(site, 0)

    @property
    def best(self) -> int:
        """Leading blocks at the best holder anywhere."""
        return max(self.sites.values(), default=0)


class BlockIndex:
    """`max_blocks` bounds the keys held; `forgotten` counts those the bound has cost."""

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 2:
            raise ValueError(f"max_blocks must be at least 2, got {max_blocks}")
        self._generation_blocks = max_blocks // 2
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._holders: dict[str, _Holder] = {}
        self._by_bit: dict[int, _Holder] = {}
        self._chained = 0
        self._sparse = 0
        self._joined = 0
        self._exact = 0
        self._retired: list[tuple[int, int]] = []
        self._free: list[int] = []
        self._next_bit = 0
        self._turns = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._young) + sum(1 for key in self._old if key not in self._young)

    @property
    def size(self) -> int:
        """Entries of both generations: at least `len`, and known without looking at each."""
        return len(self._young) + len(self._old)

    def join(self, name: str, site: str, generation: str, *, exact: bool = False, sparse: bool = False) -> None:
        """A holder that may be asked about. Another generation of the same name starts empty.

        `exact`: it announces block events. `sparse`: it can only continue where it says so (models with states):
        a hit is the last announced key, whatever lies before it.
        """
        held = self._holders.get(name)
        if held is not None:
            if (held.generation, held.exact, held.sparse) == (generation, exact, sparse):
                held.site = site
                return
            self.leave(name)
        bit = self._free.pop() if self._free else self._take_bit()
        holder = _Holder(name, site, generation, bit, exact, sparse)
        self._holders[name] = self._by_bit[bit] = holder
        self._joined |= bit
        self._exact |= bit if exact else 0
        self._count_in(holder)

    def leave(self, name: str) -> None:
        """The holder is gone, and its blocks with it."""
        holder = self._holders.pop(name, None)
        if holder is None:
            return
        self._count_out(holder)
        del self._by_bit[holder.bit]
        self._joined ^= holder.bit
        self._exact &= ~holder.bit
        self._retired.append((self._turns, holder.bit))
        if len(self._retired) > MAX_RETIRED:
            self._turn()

    def retain(self, live: Iterable[str]) -> None:
        """Every holder that is not among `live` leaves."""
        for name in set(self._holders) - set(live):
            self.leave(name)

    def stored(self, name: str, keys: Sequence[bytes]) -> None:
        """The exact holder `name` announced that it has these blocks. Unknown holders are ignored."""
        holder = self._holders.get(name)
        if holder is not None and holder.exact:
            self._add(holder.bit, keys)

    def removed(self, name: str, keys: Iterable[bytes]) -> None:
        """The exact holder `name` announced that these blocks are gone."""
        holder = self._holders.get(name)
        if holder is None or not holder.exact:
            return
        for generation in (self._young, self._old):
            for key in keys:
                mask = generation.get(key, 0)
                if mask & holder.bit:
                    mask ^= holder.bit
                    if mask:
                        generation[key] = mask
                    else:
                        del generation[key]

    def cleared(self, name: str) -> None:
        """The holder announced that it has nothing any more; what it announces next counts again."""
        holder = self._holders.get(name)
        if holder is not None:
            self.leave(name)
            self.join(name, holder.site, holder.generation, exact=holder.exact, sparse=holder.sparse)

    def believed(self, name: str) -> None:
        """The exact holder announces nothing any more: what it said last is where belief begins."""
        holder = self._holders.get(name)
        if holder is not None:
            holder.exact = False
            self._exact &= ~holder.bit

    def placed(self, name: str, keys: Sequence[bytes], reported_blocks: int | None) -> int | None:
        """A prompt with `keys` was computed there; it reported a hit of `reported_blocks` (None: says nothing).

        Returns reported less expected blocks, for the metric; None without both. History is the belief about
        holders that announce nothing; exact ones are not written to.
        """
        holder = self._holders.get(name)
        if holder is None:
            return None
        expected = self._depth_of(holder, keys)
        if holder.exact:
            return None if reported_blocks is None else reported_blocks - expected
        if expected and reported_blocks is not None:
            self._trust(holder, 1 if reported_blocks >= expected else -1)
        self._add(holder.bit, keys[: self._generation_blocks])
        return None if reported_blocks is None else reported_blocks - expected

    def hits(self, keys: Sequence[bytes]) -> PrefixHits:
        """How many leading blocks of `keys` each holder has.

        By halving, which takes it that whoever holds a block holds those before it. Holders evict the ends of prefixes
        first; where one did not, the answer may be too high, and its report will say so.
        """
        blocks: dict[str, int] = {}
        sites: dict[str, int] = {}
        if self._chained and keys:
            self._chained_hits(keys, blocks, sites)
        if self._sparse and keys:
            self._sparse_hits(keys, blocks, sites)
        return PrefixHits(blocks, sites)

    def _chained_hits(self, keys: Sequence[bytes], blocks: dict[str, int], sites: dict[str, int]) -> None:
        """Halve each stretch of keys that not the same holders begin and end, down to single steps."""
        young, old = self._young, self._old
        last = len(keys) - 1
        first = self._chained & self._mask(keys[0])
        final = first & self._mask(keys[last])
        self._note(final, last + 1, blocks, sites)
        stretches = [(0, first, last, final)] if first != final else []
        while stretches:
            low, at_low, high, at_high = stretches.pop()
            if high - low == 1:
                self._note(at_low & ~at_high, high, blocks, sites)
                continue
            middle = (low + high) // 2
            key = keys[middle]
            at_middle = at_low & (young.get(key, 0) | old.get(key, 0) | at_high)
            if at_low != at_middle:
                stretches.append((low, at_low, middle, at_middle))
            if at_middle != at_high:
                stretches.append((middle, at_middle, high, at_high))

    def _note(self, mask: int, depth: int, blocks: dict[str, int], sites: dict[str, int]) -> None:
        by_bit = self._by_bit
        while mask:
            bit = mask & -mask
            mask ^= bit
            holder = by_bit[bit]
            blocks[holder.name] = depth
            if depth > sites.get(holder.site, 0):
                sites[holder.site] = depth

    def _sparse_hits(self, keys: Sequence[bytes], blocks: dict[str, int], sites: dict[str, int]) -> None:
        wanted = self._sparse
        for index in range(len(keys) - 1, -1, -1):
            found = self._mask(keys[index]) & wanted
            self._note(found, index + 1, blocks, sites)
            wanted &= ~found
            if not wanted:
                return

    def _depth_of(self, holder: _Holder, keys: Sequence[bytes]) -> int:
        if holder.sparse:
            return next((i + 1 for i in range(len(keys) - 1, -1, -1) if self._mask(keys[i]) & holder.bit), 0)
        young, old, bit = self._young, self._old, holder.bit
        for index, key in enumerate(keys):
            if not (young.get(key, 0) | old.get(key, 0)) & bit:
                return index
        return len(keys)

    def _mask(self, key: bytes) -> int:
        return self._young.get(key, 0) | self._old.get(key, 0)

    def _add(self, bit: int, keys: Sequence[bytes]) -> None:
        young, old = self._young, self._old
        # The end of the prompt first: should a generation turn in between, its beginning is the younger part.
        for key in reversed(keys):
            if key not in young and len(young) >= self._generation_blocks:
                self._turn()
                young, old = self._young, self._old
            young[key] = (young.get(key, 0) | old.get(key, 0)) & self._joined | bit

    def _turn(self) -> None:
        young, exact = self._young, self._exact
        gone = {key: mask for key, mask in self._old.items() if key not in young}
        moves = {key: mask & exact for key, mask in gone.items() if mask & exact} if exact else {}
        if len(moves) > self._generation_blocks // 2:
            moves = {}
        self.forgotten += len(gone) - len(moves)
        self._old, self._young = young, moves
        self._turns += 1
        # What moves between generations drops the bits of the gone: two turns later they are in no key.
        while self._retired and self._turns - self._retired[0][0] >= 2:
            self._free.append(self._retired.pop(0)[1])

    def _take_bit(self) -> int:
        bit = 1 << self._next_bit
        self._next_bit += 1
        return bit

    def _trust(self, holder: _Holder, step: int) -> None:
        self._count_out(holder)
        holder.trust = max(TRUST_MIN, min(TRUST_MAX, holder.trust + step))
        self._count_in(holder)

    def _count_in(self, holder: _Holder) -> None:
        if holder.trust < 0:
            return
        if holder.sparse:
            self._sparse |= holder.bit
        else:
            self._chained |= holder.bit

    def _count_out(self, holder: _Holder) -> None:
        self._chained &= ~holder.bit
        self._sparse &= ~holder.bit
