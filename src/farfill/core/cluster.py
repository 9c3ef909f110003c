"""Who is alive and where: roles, instances and the placement of a request on them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What an instance does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class InstanceState(StrEnum):
    """Where an instance is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One running, addressable worker, as the registry knows it.

    `url` is its control address (https://host:port); `transfer_address` is where it accepts KV connections
    ("host:port", empty when it dials them). `generation` changes at every start, so a restarted worker is never
    mistaken for its former self. `version` is what a rollout of a new worker version knows it by, `protocol` the
    version of the control and transfer protocols it speaks. `takes_text`: it takes short prompts as text.
    """

    name: str
    role: Role
    site: str
    url: str
    transfer_address: str
    model: str
    fingerprint: str
    generation: str
    state: InstanceState
    max_context_tokens: int
    queued_tokens: int = 0
    running_requests: int = 0
    kv_used_bytes: int = 0
    kv_total_bytes: int = 0
    version: str = ""
    protocol: int = 1
    takes_text: bool = False


class PlacementReason(StrEnum):
    """Why a prompt is prefilled where it is. Stable: response header, metric label, log field."""

    BELOW_THRESHOLD = "below_threshold"
    ABOVE_THRESHOLD = "above_threshold"
    FORCED_LOCAL = "forced_local"
    FORCED_REMOTE = "forced_remote"
    NO_PREFILL_INSTANCE = "no_prefill_instance"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    BREAKER_OPEN = "breaker_open"
    TOO_SHORT = "too_short"
    ROLLOUT = "rollout"  # not of the share that may go far yet
    LINK_BUSY = "link_busy"  # every link to it is full
    FAR_CACHE = "far_cache"  # a far cache has what would take it over the threshold
    PREFILL_OVERLOADED = "prefill_overloaded"  # all that could take it asked to be left alone for a moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The decision for one request: where it decodes, where it prefills (None: locally), and why."""

    decode: Instance
    prefill: Instance | None
    reason: PlacementReason
    uncached_tokens: int
    threshold_tokens: int

    @property
    def remote(self) -> bool:
        """Whether the prompt is prefilled at another instance than the one that decodes."""
        return self.prefill is not None


class FallbackReason(StrEnum):
    """Why decode prefilled a prompt that was placed far away. Stable: response header, metric, log."""

    NONE = "none"
    PREFILL_UNREACHABLE = "prefill_unreachable"
    PREFILL_REFUSED = "prefill_refused"
    PREFILL_FAILED = "prefill_failed"
    PREFILL_LOST = "prefill_lost"
    TRANSFER_TIMEOUT = "transfer_timeout"
    LINK_LOST = "link_lost"
    CHECKSUM = "checksum"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    TICKET_INVALID = "ticket_invalid"
    PROTOCOL = "protocol"
    KV_MEMORY = "kv_memory"
    KV_NOT_LOADED = "kv_not_loaded"
    WITHDRAWN = "withdrawn"  # the client left: the transfer ends, nothing falls back
