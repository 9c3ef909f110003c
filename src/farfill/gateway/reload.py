"""A changed cluster file, applied while the gateway runs, as far as that is safe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from farfill.config.model import ClusterConfig
from farfill.core.errors import ConfigError
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
    """Owned by the event loop. `config` is what is in force, restarts aside; `started` what the process began with.

    `restart`: keys of `config` that the process does not follow until it is started anew. `version` is that of the
    registry's configuration, 0: the file's.
    """

    config: ClusterConfig
    placer: Placer
    admission: Admission
    threshold: Threshold
    links: LinkView
    models: Callable[[ClusterConfig], None] = lambda _: None
    restart: tuple[str, ...] = ()
    version: int = 0
    started: ClusterConfig = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.config

    def apply(self, found: ClusterConfig, version: int = 0) -> Reloaded:
        """Take over what can be. Requests that were placed or wait keep what was decided of them.

        Raises ConfigError for this gateway's own file (version 0) while the registry's configuration is in force.
        """
        if not version and self.version:
            raise ConfigError(
                f"version {self.version} of the registry's configuration is in force on all gateways; "
                "put the file in force with: farfill config apply FILE"
            )
        self.version = version
        applied = tuple(key for key in changed_keys(self.config, found) if applies(key))
        # Of all changes since the start, not of the latest alone: they stay unfollowed however often this is asked.
        self.restart = tuple(key for key in changed_keys(self.started, found) if not applies(key))
        if applied:
            self.links.configure(found.routing)
            self.threshold.configure(found.routing)
            self.placer.configure(found)
            self.models(found)
            self.admission.configure(found.gateway, found.admission)
        self.config = found
        log.info("config_reloaded", applied=list(applied), needs_restart=list(self.restart), version=self.version)
        return Reloaded(applied, self.restart)


def applies(key: str) -> bool:
    """Whether a change of `key` is taken over while requests run."""
    return key.startswith(APPLIED) and key not in NOT_APPLIED


def changed_keys(old: ClusterConfig, new: ClusterConfig) -> list[str]:
    """Keys with other values, dotted, in order."""
    return sorted(_changed(old.model_dump(mode="json"), new.model_dump(mode="json")))


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        before, after, name = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _changed(before, after, f"{name}.")
        elif before != after:
            yield name
