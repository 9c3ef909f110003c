"""A changed cluster file, applied while the gateway runs, as far as that is safe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from farfill.config.model import ClusterConfig
from farfill.gateway.adapt import Threshold
from farfill.gateway.links import LinkView
from farfill.gateway.pipeline.admit import Admission
from farfill.gateway.pipeline.place import Placer

log = structlog.get_logger("farfill.gateway")

APPLIED = (
    "admission.",
    "gateway.max_concurrent_requests",
    "routing.cache_scope",
    "routing.link_",
    "routing.placement.",
    "routing.remote_prefill_threshold_tokens",
    "routing.threshold",
)
"""What these begin with is taken over while requests run; admission.tenant_header is not."""
NOT_APPLIED = ("admission.tenant_header",)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Keys that changed, and which of them need a restart."""

    applied: tuple[str, ...]
    restart: tuple[str, ...]


@dataclass(slots=True)
class Reloader:
    """Owned by the event loop. `config` is what is in force, restarts aside."""

    config: ClusterConfig
    placer: Placer
    admission: Admission
    threshold: Threshold
    links: LinkView

    def apply(self, found: ClusterConfig) -> Reloaded:
        """Take over what can be. Requests that were placed or wait keep what was decided of them."""
        changed = sorted(_changed(self.config.model_dump(mode="json"), found.model_dump(mode="json")))
        applied = tuple(k for k in changed if k.startswith(APPLIED) and k not in NOT_APPLIED)
        restart = tuple(k for k in changed if k not in applied)
        if applied:
            self.links.configure(found.routing)
            self.threshold.configure(found.routing)
            self.placer.configure(found)
            self.admission.configure(found.gateway, found.admission)
        self.config = found
        log.info("config_reloaded", applied=list(applied), needs_restart=list(restart))
        return Reloaded(applied, restart)


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        before, after, name = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _changed(before, after, f"{name}.")
        elif before != after:
            yield name
