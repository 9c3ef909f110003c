"""Chooses where a prompt decodes and where it is prefilled, from the policies and what is known now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from farfill.config.model import ClusterConfig
from farfill.core.cluster import Instance, Placement, PlacementReason
from farfill.core.errors import InvalidRequestError, UnavailableError
from farfill.gateway.health import PrefillHealth
from farfill.gateway.loads import OutstandingWork
from farfill.kv.index import PrefixIndex
from farfill.policy.offload import BLOCKED_REASONS, REMOTE_REASONS, Forced, OffloadInputs, decide, uncached_tokens
from farfill.policy.pick import (
    DecodeCandidate,
    PrefillCandidate,
    pick_decode,
    pick_prefill,
    ready_decode,
    ready_prefill,
    usable_prefill,
)

FORCE_HEADER = "x-farfill-force-placement"
MAX_KEYS_PER_INSTANCE = 65_536

_OBSTACLES = {
    PlacementReason.NO_PREFILL_INSTANCE: "no prefill instance is ready",
    PlacementReason.FINGERPRINT_MISMATCH: "no ready prefill instance has the decode instance's fingerprint",
    PlacementReason.BREAKER_OPEN: "the circuit breakers of all prefill instances are open",
}


class Membership(Protocol):
    """Who is alive, as the registry told last."""

    def instances(self) -> tuple[Instance, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementQuery:
    """`keys` are the prompt's prefix keys; `total_tokens` its length and that of the output to come."""

    keys: Sequence[bytes]
    prompt_tokens: int
    total_tokens: int
    forced: Forced | None


class Placer:
    """Applies the policies. Owns the prefix index; reads health and outstanding work."""

    def __init__(
        self, config: ClusterConfig, membership: Membership, health: PrefillHealth, work: OutstandingWork
    ) -> None:
        self._model = config.model.name
        self._threshold_tokens = config.routing.remote_prefill_threshold_tokens
        self._local_instead = config.routing.fallback_to_local_prefill
        self._chunk_tokens = config.prefill.chunked_prefill_tokens
        self._membership = membership
        self._health = health
        self._work = work
        self._index = PrefixIndex(MAX_KEYS_PER_INSTANCE if config.engine.prefix_cache_mb else 0)

    def decode_ready(self, lost: Callable[[Instance], bool]) -> bool:
        """Whether any decode instance that is not `lost` can take a request."""
        return any(not lost(i) for i in ready_decode(self._membership.instances(), self._model))

    def context_tokens(self, model_limit: int) -> int:
        """The longest context that can be served now: the model's, or less when all workers offer less."""
        offered = [i.max_context_tokens for i in ready_decode(self._membership.instances(), self._model)]
        return min(model_limit, max(offered, default=model_limit))

    def place(self, query: PlacementQuery, exclude: Collection[str] = ()) -> tuple[Placement, int]:
        """The placement and the prefix hit (tokens) it counts on.

        Raises UnavailableError without decode, or when the prompt should go far, cannot, and may not stay.
        """
        instances = self._membership.instances()
        self._forget_gone(instances)
        candidates = [
            DecodeCandidate(
                instance=i,
                outstanding_tokens=self._work.tokens(i),
                outstanding_requests=self._work.requests(i),
                hit_tokens=self._hit_tokens(i, query),
            )
            for i in ready_decode(instances, self._model)
            if i.name not in exclude and i.max_context_tokens >= query.total_tokens
        ]
        chosen = pick_decode(candidates, query.prompt_tokens)
        if chosen is None:
            raise UnavailableError(
                f"no decode instance of {self._model} is ready", reason="no_decode_instance", side="decode"
            )
        return self._prefill_for(query, chosen, instances), chosen.hit_tokens

    def another_prefill(
        self, decode: Instance, failed: Collection[tuple[str, str]], avoid_site: str | None
    ) -> Instance | None:
        """A prefill instance that may take over, if there is one.

        `failed` are (name, generation) of instances that were tried: a restarted one may try again. One of another site
        than `avoid_site` goes first.
        """
        ready = ready_prefill(self._membership.instances(), self._model, decode)
        others = [i for i in ready if (i.name, i.generation) not in failed]
        usable, _ = usable_prefill(others, decode, self._health.allows)
        elsewhere = [i for i in usable if i.site != avoid_site]
        picked = pick_prefill(self._prefill_candidates(elsewhere or usable))
        return None if picked is None else picked.instance

    def started(self, placement: Placement, keys: Sequence[bytes], reported_hit_tokens: int | None) -> None:
        """Decode holds the prompt now; None: its report says nothing about the hit counted on."""
        blocks = None if reported_hit_tokens is None else reported_hit_tokens // self._chunk_tokens
        self._index.record(placement.decode.name, placement.decode.generation, keys, blocks)

    def _prefill_for(self, query: PlacementQuery, chosen: DecodeCandidate, instances: Sequence[Instance]) -> Placement:
        decode = chosen.instance
        usable, availability = usable_prefill(
            ready_prefill(instances, self._model, decode), decode, self._health.allows
        )
        reason = decide(
            OffloadInputs(
                prompt_tokens=query.prompt_tokens,
                hit_tokens=chosen.hit_tokens,
                threshold_tokens=self._threshold_tokens,
                availability=availability,
                forced=query.forced,
            )
        )
        if reason in BLOCKED_REASONS and not self._local_instead:
            raise UnavailableError(
                f"{_OBSTACLES[reason]}, and fallback_to_local_prefill is off", reason=str(reason), side="prefill"
            )
        prefill = None
        if reason in REMOTE_REASONS:
            prefill = pick_prefill(self._prefill_candidates(usable))
        return Placement(
            decode=decode,
            prefill=prefill.instance if prefill is not None else None,
            reason=reason,
            uncached_tokens=uncached_tokens(query.prompt_tokens, chosen.hit_tokens),
            threshold_tokens=self._threshold_tokens,
        )

    def _prefill_candidates(self, instances: Iterable[Instance]) -> list[PrefillCandidate]:
        return [
            PrefillCandidate(
                instance=i, outstanding_tokens=self._work.tokens(i), outstanding_requests=self._work.requests(i)
            )
            for i in instances
        ]

    def _hit_tokens(self, instance: Instance, query: PlacementQuery) -> int:
        blocks = self._index.hit_blocks(instance.name, instance.generation, query.keys)
        return min(blocks * self._chunk_tokens, query.prompt_tokens - 1)

    def _forget_gone(self, instances: Sequence[Instance]) -> None:
        self._index.retain([(i.name, i.generation) for i in instances])
        self._health.retain(instances)


def forced_placement(header: str | None, *, allowed: bool) -> Forced | None:
    """What the placement header demands. Raises InvalidRequestError where it is not allowed or not known."""
    if header is None:
        return None
    if not allowed:
        raise InvalidRequestError(
            f"{FORCE_HEADER} is not allowed here (routing.allow_placement_override)",
            param=FORCE_HEADER,
            reason="placement_override_not_allowed",
        )
    try:
        return Forced(header)
    except ValueError:
        raise InvalidRequestError(
            f"{FORCE_HEADER} must be local or remote, got {header!r}", param=FORCE_HEADER
        ) from None
