"""Who holds which prefix, in tokens, as the gateway knows it. Owned by the event loop.

Instances that announce their blocks (`gateway.blocks`) are known exactly; of all others the gateway believes that they
hold what was sent there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from farfill.core.cluster import Instance
from farfill.policy.prefix import BlockIndex, PrefixHits

MAX_BLOCKS = 1_000_000

Source = Literal["exact", "history"]


class PrefixView:
    """The index of all instances, decode and prefill. Where nobody keeps prefixes it knows nothing."""

    def __init__(self, chunk_tokens: int, *, enabled: bool, max_blocks: int = MAX_BLOCKS) -> None:
        self.chunk_tokens = chunk_tokens
        self._index = BlockIndex(max_blocks) if enabled else None
        self._announced: dict[str, tuple[str, bool]] = {}
        self._exact: set[str] = set()

    @property
    def enabled(self) -> bool:
        """Whether anybody keeps prefixes."""
        return self._index is not None

    @property
    def blocks(self) -> int:
        """Blocks known of; those of two generations count twice, so that asking is cheap."""
        return 0 if self._index is None else self._index.size

    @property
    def forgotten(self) -> int:
        """Blocks that the index's bound has cost so far."""
        return 0 if self._index is None else self._index.forgotten

    @property
    def exact(self) -> int:
        """Instances that announce their blocks now."""
        return len(self._exact)

    def follow(self, instances: tuple[Instance, ...]) -> None:
        """Who is alive now. A restarted instance starts empty."""
        if self._index is None:
            return
        live = {i.name: i.generation for i in instances}
        self._index.retain(live)
        for name, (generation, _) in tuple(self._announced.items()):
            if live.get(name) != generation:
                del self._announced[name]
                self._exact.discard(name)
        for instance in instances:
            # Whoever announced once is the index's to keep as it was.
            if instance.name not in self._announced:
                self._index.join(instance.name, instance.site, instance.generation)

    def announces(self, instance: Instance, *, sparse: bool) -> None:
        """`instance` tells from now on what it holds, beginning with nothing."""
        if self._index is None:
            return
        self._index.leave(instance.name)
        self._index.join(instance.name, instance.site, instance.generation, exact=True, sparse=sparse)
        self._announced[instance.name] = instance.generation, sparse
        self._exact.add(instance.name)

    def changed(self, name: str, kind: str, keys: Sequence[bytes]) -> None:
        """It announced a change: "stored", "removed" or "cleared". Names that do not announce are ignored."""
        if self._index is None or name not in self._exact:
            return
        if kind == "stored":
            self._index.stored(name, keys)
        elif kind == "removed":
            self._index.removed(name, keys)
        else:
            self._index.cleared(name)

    def silent(self, name: str) -> None:
        """It announces nothing any more: what was known last is where belief begins."""
        if self._index is not None and name in self._exact:
            self._exact.discard(name)
            self._index.believed(name)

    def source(self, name: str) -> Source:
        """How what is known of `name` is known."""
        return "exact" if name in self._exact else "history"

    def hits(self, keys: Sequence[bytes]) -> PrefixHits:
        """In blocks; see `tokens`."""
        return PrefixHits({}, {}) if self._index is None else self._index.hits(keys)

    def tokens(self, blocks: int, prompt_tokens: int) -> int:
        """Tokens of a hit of `blocks`; the last prompt token never is one."""
        return min(blocks * self.chunk_tokens, prompt_tokens - 1)

    def computed(self, name: str, keys: Sequence[bytes], reported_tokens: int | None) -> None:
        """Instance `name` holds the prompt now; it had so many tokens of it before (None: does not say)."""
        if self._index is not None:
            blocks = None if reported_tokens is None else reported_tokens // self.chunk_tokens
            self._index.placed(name, keys, blocks)
