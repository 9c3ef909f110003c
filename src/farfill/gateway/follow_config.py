"""Follows the registry's configuration: what a version changes applies at once on every gateway, as far as is safe."""

from __future__ import annotations

from pathlib import Path

import structlog

from farfill.config.load import load_text
from farfill.core.errors import ConfigError, ProtocolError
from farfill.gateway.observe import PolicyObserver
from farfill.gateway.reload import Reloader
from farfill.registry.configs import CURRENT
from farfill.registry.mirror import Mirror
from farfill.registry.records import ConfigRecord, decode_record
from farfill.registry.store import Store

log = structlog.get_logger("farfill.gateway")


class ConfigFollower:
    """Runs between `start` and `close`. A version that this gateway cannot read or use changes nothing here."""

    def __init__(self, store: Store, reloader: Reloader, base_dir: Path, observer: PolicyObserver) -> None:
        self._mirror = Mirror(store, CURRENT, on_change=self._changed)
        self._reloader = reloader
        self._base_dir = base_dir
        self._observer = observer

    async def start(self) -> None:
        """Begin to follow."""
        await self._mirror.__aenter__()

    async def close(self) -> None:
        """Stop."""
        await self._mirror.__aexit__(None, None, None)

    def _changed(self) -> None:
        entry = self._mirror.get(CURRENT)
        if entry is None:
            return
        try:
            record = decode_record(entry.value, ConfigRecord)
            if record.version == self._reloader.version:
                return
            found = load_text(record.text, self._base_dir / f"configuration version {record.version}").config
            done = self._reloader.apply(found, record.version)
        except (ConfigError, ProtocolError) as error:
            log.error("config_version_refused", error=str(error), in_force=self._reloader.version)
            self._observer.config_followed(self._reloader.version, "refused", len(self._reloader.restart))
            return
        log.info("config_version", version=record.version, author=record.author, reason=record.reason)
        self._observer.config_followed(record.version, "applied", len(done.restart))
