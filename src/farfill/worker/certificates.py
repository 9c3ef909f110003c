"""Follows certificate, key and CA on disk, so that KV connections to come use the new ones; standing ones live on.

To change a CA without a gap: let every worker trust both, then give out new certificates, then drop the old CA.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import structlog

from farfill.config.secrets import TlsMaterial
from farfill.core.errors import ConfigError
from farfill.transport.tls import client_context, server_context

PERIOD_S = 5.0

UseContexts = Callable[[ssl.SSLContext, ssl.SSLContext], None]

log = structlog.get_logger()


class CertificateWatch:
    """`read` gives what is on disk now, `use` hears of new contexts (server, client)."""

    def __init__(self, current: TlsMaterial, read: Callable[[], TlsMaterial], use: UseContexts) -> None:
        self._current = current
        self._read = read
        self._use = use
        self._complained = ""

    def check(self) -> bool:
        """Whether new material was taken into use. What cannot be used is logged once, and the old stays in use."""
        try:
            found = self._read()
            if found == self._current:
                return False
            pems = (found.cert_pem, found.key_pem, found.ca_pem)
            self._use(server_context(*pems), client_context(*pems))
        except ConfigError as error:
            # Files are written one after the other: certificate and key may not fit for a moment.
            if str(error) != self._complained:
                self._complained = str(error)
                log.warning("certificates_unusable", error=str(error))
            return False
        self._current, self._complained = found, ""
        log.info("certificates_replaced")
        return True

    async def run(self) -> None:
        """Check now and then, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await asyncio.to_thread(self.check)
