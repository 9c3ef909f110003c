"""Who holds which prefix, in tokens, as the gateway believes it from where prompts went. Owned by the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from farfill.core.cluster import Instance
from farfill.policy.prefix import BlockIndex, PrefixHits

MAX_BLOCKS = 1_000_000


class PrefixView:
    """The index of all instances, decode and prefill. Where nobody keeps prefixes it knows nothing."""

    def __init__(self, chunk_tokens: int, *, enabled: bool, max_blocks: int = MAX_BLOCKS) -> None:
        self._chunk_tokens = chunk_tokens
        self._index = BlockIndex(max_blocks) if enabled else None

    def follow(self, instances: tuple[Instance, ...]) -> None:
        """Who is alive now. A restarted instance starts empty."""
        if self._index is None:
            return
        self._index.retain([i.name for i in instances])
        for instance in instances:
            self._index.join(instance.name, instance.site, instance.generation)

    def hits(self, keys: Sequence[bytes]) -> PrefixHits:
        """In blocks; see `tokens`."""
        return PrefixHits({}, {}) if self._index is None else self._index.hits(keys)

    def tokens(self, blocks: int, prompt_tokens: int) -> int:
        """Tokens of a hit of `blocks`; the last prompt token never is one."""
        return min(blocks * self._chunk_tokens, prompt_tokens - 1)

    def computed(self, name: str, keys: Sequence[bytes], reported_tokens: int | None) -> None:
        """Instance `name` holds the prompt now; it had so many tokens of it before (None: does not say)."""
        if self._index is not None:
            blocks = None if reported_tokens is None else reported_tokens // self._chunk_tokens
            self._index.placed(name, keys, blocks)
