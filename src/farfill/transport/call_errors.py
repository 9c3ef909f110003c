"""Why an HTTP call got no answer, for people: without the insides of the HTTP client."""

from __future__ import annotations

import os
import ssl

import aiohttp

# OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH.
_OTHER_NAME = frozenset({62, 64})


def call_error_text(error: Exception, timeout_s: float, trust: str = "") -> str:
    """One line; `trust` says how another CA is named, where the caller can do that."""
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return _certificate_text(error.certificate_error, trust)
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot be reached: {_os_text(error.os_error)}"
    return str(error) or type(error).__name__


def _certificate_text(error: Exception, trust: str) -> str:
    why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error)
    text = f"its certificate is not accepted: {why}"
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _OTHER_NAME:
        return text
    return f"{text}; {trust}" if trust else text


def _os_text(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "TLS failed"
    if error.errno is not None and error.errno > 0:  # negative ones are those of name resolution
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__
