"""Structured logs to stderr, one line an event, with the process's role, site and name on each.

Tickets, keys and credentials never reach a line: values under telling names are replaced, and API keys, bearer tokens,
JWTs and PEM private keys are cut out of any text.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

REDACTED = "[redacted]"

_SECRET_NAMES = frozenset(
    {
        "ticket",
        "authorization",
        "proxy_authorization",
        "cookie",
        "set_cookie",
        "api_key",
        "x_api_key",
        "key_pem",
        "private_key",
        "signing_key",
        "password",
        "secret",
    }
)
_SECRET_TEXT = re.compile(
    r"(?i:\bbearer\s+)[A-Za-z0-9._~+/=-]+"
    r"|ff_[0-9A-Za-z]{12}_[0-9A-Za-z]{8,}"  # the secret of an API key: `registry.api_keys`
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"  # a JWT
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)


_PLAIN = frozenset({int, float, bool, type(None)})
_NESTED = frozenset({dict, list, tuple})
_LEAST_CHARS = len("bearer x")


def setup_logging(
    level: Literal["debug", "info", "warning", "error"],
    fmt: Literal["json", "text"],
    *,
    stream: TextIO | None = None,
    **bound: str,
) -> None:
    """Send structlog and stdlib logging to `stream` (stderr) in one format; `bound` fields go on every line."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _add(bound),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _spelled_out,
        redact,
    ]
    out = stream if stream is not None else sys.stderr
    renderer: Processor = (
        structlog.processors.JSONRenderer(serializer=_json)
        if fmt == "json"
        else structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)
    )
    structlog.configure(
        # Our own lines are written as they are: by way of stdlib logging they would cost twice as much.
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Lenient(out))),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


_RARE = ("positional_args", "stack_info", "exc_info")
_formatted = structlog.stdlib.PositionalArgumentsFormatter()
_with_stack = structlog.processors.StackInfoRenderer()


def _spelled_out(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Positional arguments, stack and exception as text; few lines have any."""
    for name in _RARE:
        if name in event:
            event = _with_stack(logger, method, _formatted(logger, method, event))
            return structlog.processors.format_exc_info(logger, method, event)
    return event


class _Lenient:
    """A stream whose reader may go away: then lines are lost, and whoever logs goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # broken pipe, full disk; closed
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace secrets in `event`, at any depth."""
    texts: list[str] = []
    for value in event.values():
        kind = type(value)
        if kind is str:
            texts.append(value)
        elif kind not in _PLAIN and (kind not in _NESTED or value):
            break
    else:  # as nearly always: a flat event, looked through in one go
        if not _names_secret(tuple(event)) and not _suspect("\n".join(texts)):
            return event
    return {key: _redacted(key, value) for key, value in event.items()}


@lru_cache(1024)
def _names_secret(keys: tuple[str, ...]) -> bool:
    return any(_secret_name(key) for key in keys)


@lru_cache(1024)
def _secret_name(key: str) -> bool:
    return key.lower().replace("-", "_") in _SECRET_NAMES


def _redacted(key: object, value: Any) -> Any:
    if isinstance(key, str) and _secret_name(key):
        return REDACTED
    if isinstance(value, str):
        return _SECRET_TEXT.sub(REDACTED, value) if _suspect(value) else value
    if isinstance(value, dict):
        return {inner: _redacted(inner, item) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(None, item) for item in value]
    return value


def _suspect(text: str) -> bool:
    """Whether `_SECRET_TEXT` may find anything: each of its alternatives has a word that is cheap to look for."""
    if len(text) < _LEAST_CHARS:
        return False
    return "ff_" in text or "eyJ" in text or "PRIVATE KEY" in text or "bearer" in text.lower()


def _json(event: EventDict, **_: Any) -> str:
    return _encode(event).decode()


_encode = msgspec.json.Encoder(enc_hook=repr).encode


def _add(bound: dict[str, str]) -> Callable[[WrappedLogger, str, EventDict], EventDict]:
    """Bound fields, unless the event itself says otherwise."""

    def add(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {**bound, **event}

    return add
