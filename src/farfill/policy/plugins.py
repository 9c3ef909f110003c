"""Placement plugins by name: filters say who may, scorers say who should (0..1, more is better), a picker takes one.

Each has a page in docs/policies. A plugin is a pure function; to add one, write it and decorate it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from farfill.core.cluster import InstanceState, Role
from farfill.core.errors import ConfigError
from farfill.policy.candidates import Candidate, PlacementRequest

Filter = Callable[[PlacementRequest, Sequence[Candidate]], list[bool]]
Scorer = Callable[[PlacementRequest, Sequence[Candidate]], list[float]]
Picker = Callable[[PlacementRequest, Sequence[Candidate], Sequence[float]], int]
Plugin = TypeVar("Plugin")

FILTERS: dict[str, Filter] = {}
SCORERS: dict[str, Scorer] = {}
PICKERS: dict[str, Picker] = {}

CLOSE_SCORES = 0.02
QUEUE_SCALE = 8.0
TOKENS_SCALE = 8192.0


def _named(table: dict[str, Plugin], name: str) -> Callable[[Plugin], Plugin]:
    def add(plugin: Plugin) -> Plugin:
        assert name not in table, f"two plugins are named {name}"
        table[name] = plugin
        return plugin

    return add


def plugin(table: dict[str, Plugin], name: str, kind: str) -> Plugin:
    """The plugin called `name`. Raises ConfigError with what there is."""
    if name not in table:
        near = get_close_matches(name, table, n=1)
        fix = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(table))}"
        raise ConfigError(f"placement: no {kind} is named {name!r}; {fix}")
    return table[name]


@_named(FILTERS, "health")
def health(_: PlacementRequest, candidates: Sequence[Candidate]) -> list[bool]:
    """Ready, reachable, and not shut out by its breaker."""
    ready = InstanceState.READY
    return [c.allowed and c.reachable and c.instance.state is ready for c in candidates]


@_named(FILTERS, "role")
def role(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[bool]:
    """Does what is asked for; mixed instances do both."""
    wanted, mixed = request.role, Role.MIXED
    return [(has := c.instance.role) is wanted or has is mixed for c in candidates]


@_named(FILTERS, "model")
def model(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[bool]:
    """Serves the model, under its name or an alias."""
    wanted = request.model
    return [c.instance.model == wanted or wanted in c.models for c in candidates]


@_named(FILTERS, "capability")
def capability(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[bool]:
    """Can do all the request needs."""
    needed = request.capabilities
    return [all(n in c.capabilities for n in needed) for c in candidates] if needed else [True] * len(candidates)


@_named(FILTERS, "capacity")
def capacity(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[bool]:
    """Could ever hold the request: its context is long enough, and its KV memory (where known) large enough."""
    tokens, kv = request.total_tokens, request.kv_bytes
    return [
        tokens <= (i := c.instance).max_context_tokens and (kv <= i.kv_total_bytes or i.kv_total_bytes == 0)
        for c in candidates
    ]


@_named(FILTERS, "fingerprint")
def fingerprint(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[bool]:
    """Computes the very same KV as the other side."""
    wanted = request.fingerprint
    return [not wanted or c.instance.fingerprint == wanted for c in candidates]


@_named(FILTERS, "protocol")
def protocol(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[bool]:
    """Speaks a version of the protocols that the other side speaks, too."""
    spoken = request.protocols
    return [c.instance.protocol in spoken for c in candidates] if spoken else [True] * len(candidates)


@_named(FILTERS, "version")
def version(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[bool]:
    """Is of the version the rollout gives this request; where nobody is, all pass: better another one than nobody."""
    wanted, avoided = request.version, request.avoid_versions
    if not wanted and not avoided:
        return [True] * len(candidates)
    if wanted:
        fits = [c.instance.version == wanted for c in candidates]
    else:
        fits = [c.instance.version not in avoided for c in candidates]
    return fits if any(fits) else [True] * len(candidates)


@_named(FILTERS, "exclude")
def exclude(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[bool]:
    """Did not fail this very request before."""
    failed = request.exclude
    return [c.instance.name not in failed for c in candidates] if failed else [True] * len(candidates)


@_named(FILTERS, "tenant_share")
def within_tenant_share(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[bool]:
    """The tenant fills no more than its share of the instance; one it has nothing on is always open to it.

    The share is of what waits there, this prompt included, or of the longest context if that is more.
    """
    share, prompt = request.tenant_share, request.prompt_tokens
    if share >= 1.0:
        return [True] * len(candidates)
    return [
        (own := c.tenant_tokens) == 0
        or own + prompt <= share * c.instance.max_context_tokens
        or own + prompt <= share * (c.waiting_tokens + prompt)
        for c in candidates
    ]


@_named(SCORERS, "prefix_affinity")
def prefix_affinity(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[float]:
    """The part of the prompt it has already."""
    prompt = max(1, request.prompt_tokens)
    return [hit / prompt if (hit := c.hit_tokens) < prompt else 1.0 for c in candidates]


@_named(SCORERS, "session_affinity")
def session_affinity(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[float]:
    """1 for the session's own instance, 0 for others. Highest random weight: few sessions move when instances do."""
    if not request.session or not candidates:
        return [0.0] * len(candidates)
    weights = rendezvous(request.session, [c.instance.name for c in candidates])
    best = max(weights)
    return [1.0 if weight == best else 0.0 for weight in weights]


@_named(SCORERS, "least_work")
def least_work(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[float]:
    """1 where the prompt's first token would come soonest: fewest tokens to compute before it, its own included.

    Falls evenly to 0 at the most work, or at 8192 tokens more than the least: small differences stay small.
    """
    prompt = request.prompt_tokens
    work = [c.waiting_tokens + prompt - c.hit_tokens for c in candidates]
    least, most = min(work), max(work)
    span = max(most - least, TOKENS_SCALE)
    return [1.0 - (w - least) / span for w in work]


@_named(SCORERS, "queue_depth")
def queue_depth(_: PlacementRequest, candidates: Sequence[Candidate]) -> list[float]:
    """Falls with the requests on it; half at 8."""
    return [QUEUE_SCALE / (QUEUE_SCALE + c.running) for c in candidates]


@_named(SCORERS, "outstanding_tokens")
def outstanding_tokens(_: PlacementRequest, candidates: Sequence[Candidate]) -> list[float]:
    """Falls with the prompt tokens waiting there; half at 8192."""
    return [TOKENS_SCALE / (TOKENS_SCALE + c.waiting_tokens) for c in candidates]


@_named(SCORERS, "kv_bytes")
def kv_bytes(request: PlacementRequest, candidates: Sequence[Candidate]) -> list[float]:
    """The part of its KV memory that stays free; 1 where the size is not known."""
    need = request.kv_bytes
    return [
        max(0.0, 1.0 - (c.instance.kv_used_bytes + need) / total) if (total := c.instance.kv_total_bytes) else 1.0
        for c in candidates
    ]


@_named(SCORERS, "tenant_share")
def tenant_share(_: PlacementRequest, candidates: Sequence[Candidate]) -> list[float]:
    """Falls with the tenant's own part of what waits there: one tenant spreads instead of filling one instance."""
    return [
        1.0 - own / (w if (w := c.waiting_tokens) > own else own) if (own := c.tenant_tokens) else 1.0
        for c in candidates
    ]


@_named(PICKERS, "best")
def best(_: PlacementRequest, candidates: Sequence[Candidate], totals: Sequence[float]) -> int:
    """The highest score; of equal ones the least loaded, then by name."""
    top = max(totals)
    equal = [i for i, total in enumerate(totals) if total == top]
    return equal[0] if len(equal) == 1 else min(equal, key=lambda i: _tie(candidates[i]))


@_named(PICKERS, "spread")
def spread(request: PlacementRequest, candidates: Sequence[Candidate], totals: Sequence[float]) -> int:
    """Any of those within 2 % of the highest score, by the request's own hash: gateways do not all pick the same."""
    top = max(totals)
    floor = top - CLOSE_SCORES * abs(top)
    close = [i for i, total in enumerate(totals) if total >= floor]
    names = [candidates[i].instance.name for i in close]
    weights = rendezvous(request.spread, names)
    return close[max(range(len(close)), key=lambda k: (weights[k], names[k]))]


def rendezvous(key: str, names: Sequence[str]) -> list[int]:
    """A weight for each name that `key` alone decides; the highest wins (rendezvous hashing)."""
    seed = xxh3_64_intdigest(key.encode())
    return [xxh3_64_intdigest(name.encode(), seed) for name in names]


def _tie(c: Candidate) -> tuple[int, str]:
    return c.running, c.instance.name
