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
    # Those that OpenSSL did not raise, such as for another identity, have neither a message of it nor a code.
    own = error.args[0] if len(error.args) == 1 else error
    text = f"its certificate is not accepted: {getattr(error, 'verify_message', '') or own}"
    if not trust or getattr(error, "verify_code", 0) in _OTHER_NAME:
        return text
    return f"{text}; {trust}"


def _os_text(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason.replace('_', ' ').lower()})" if error.reason else "TLS failed"
    if error.errno is not None and error.errno > 0:  # negative ones are those of name resolution
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__
