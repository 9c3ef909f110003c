"""Follows certificates, keys and CAs on disk, so that connections to come use the new ones; standing ones live on.

To change a CA without a gap: let every role trust both (one file may hold several), then give out new certificates,
then drop the old CA.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import structlog

from farfill.core.errors import ConfigError
from farfill.transport.own_certificate import CertificateRefusedError

PERIOD_S = 5.0

Material = TypeVar("Material")

log = structlog.get_logger()


class CertificateWatch(Generic[Material]):
    """`read` gives what is on disk now; `use` takes it into use, or raises ConfigError and changes nothing.

    `changed` hears "replaced", "refused" (peers would not accept it) or "unusable", as often as it is logged.
    """

    def __init__(
        self,
        current: Material,
        read: Callable[[], Material],
        use: Callable[[Material], None],
        changed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._current = current
        self._read = read
        self._use = use
        self._changed = changed
        self._complained = ""
        self._refused: Material | None = None

    def check(self) -> bool:
        """Whether new material was taken into use. What cannot be used is logged once, and the old stays in use."""
        try:
            found = self._read()
            if found == self._current:
                return False
            self._take(found)
        except CertificateRefusedError:
            return False
        except ConfigError as error:
            # Files are written one after the other: certificate and key may not fit for a moment.
            if str(error) != self._complained:
                self._complained = str(error)
                log.warning("certificates_unusable", error=str(error))
                self._changed("unusable")
            return False
        self._current, self._complained, self._refused = found, "", None
        log.info("certificates_replaced")
        self._changed("replaced")
        return True

    def _take(self, found: Material) -> None:
        """Tried each time, as one that is not valid yet becomes so; a refusal is logged once for the same content."""
        try:
            self._use(found)
        except CertificateRefusedError as error:
            if found != self._refused:
                self._refused = found
                log.warning("certificates_refused", detail=str(error))
                self._changed("refused")
            raise

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check now and then while the context is open."""
        task = asyncio.create_task(self._run(), name="farfill-certificates")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await asyncio.to_thread(self.check)


class ServerContext:
    """What a server of asyncio is given once, though it changes: each handshake begins with the latest context.

    Certificate, key, trusted CAs and the demand for a client certificate are the latest one's. Safe from any thread.
    """

    def __init__(self, first: ssl.SSLContext) -> None:
        """`first` is for this object alone from now on."""
        self._latest = first
        self.context = first
        # Called in every handshake, also when the client names no server.
        first.sni_callback = self._choose

    def replace(self, latest: ssl.SSLContext) -> None:
        """For handshakes to come. It must verify clients as the first one does."""
        self._latest = latest

    def _choose(self, tls: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        if self._latest is not context:
            tls.context = self._latest
