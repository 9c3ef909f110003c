"""What people read of calls without an answer."""

from __future__ import annotations

import socket
import ssl
from typing import Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from farfill.transport.call_errors import call_error_text

KEY: Any = ConnectionKey("h", 1, True, ssl.create_default_context(), None, None, None)
TRUST = "name its CA"


def verified(code: int, message: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, f"[SSL: CERTIFICATE_VERIFY_FAILED] {message} (_ssl.c:1006)")
    error.verify_code, error.verify_message = code, message
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "no answer within 2.5 s"),
        (aiohttp.ServerTimeoutError(), "no answer within 2.5 s"),
        (aiohttp.ClientConnectorError(KEY, ConnectionRefusedError(111, "x")), "cannot be reached: Connection refused"),
        (aiohttp.ClientConnectorError(KEY, socket.gaierror(-2, "unknown name")), "cannot be reached: unknown name"),
        (aiohttp.ClientConnectorError(KEY, OSError("all of them")), "cannot be reached: all of them"),
        (
            aiohttp.ClientConnectorCertificateError(KEY, verified(20, "unknown issuer")),
            "its certificate is not accepted: unknown issuer; name its CA",
        ),
        (
            aiohttp.ClientConnectorCertificateError(KEY, verified(62, "other host")),
            "its certificate is not accepted: other host",
        ),
        (
            aiohttp.ClientConnectorCertificateError(KEY, ssl.SSLCertVerificationError("another identity")),
            "its certificate is not accepted: another identity; name its CA",
        ),
        (aiohttp.ServerDisconnectedError(), "Server disconnected"),
        (ConnectionResetError(), "ConnectionResetError"),
    ],
)
def test_line_says_what_happened_and_nothing_of_the_client(error: Exception, text: str) -> None:
    assert call_error_text(error, 2.5, TRUST) == text


def test_tls_that_fails_is_told_in_short() -> None:
    error = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")
    error.reason = "WRONG_VERSION_NUMBER"
    told = call_error_text(aiohttp.ClientConnectorSSLError(KEY, error), 1.0)
    assert told == "cannot be reached: TLS failed (wrong version number)"
