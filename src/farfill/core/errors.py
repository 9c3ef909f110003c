"""The exception tree.

Every error carries a stable `reason` (a metric label, never free text), whether trying again elsewhere may
help, and the side at fault. HTTP status is mapped once, in the gateway.
"""

from __future__ import annotations

from typing import Literal

Side = Literal["client", "gateway", "decode", "prefill", "link", "registry", "config"]


class FarfillError(Exception):
    """Root of all errors Farfill raises on purpose."""

    reason: str = "internal"
    retryable: bool = False
    side: Side = "gateway"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        retryable: bool | None = None,
        side: Side | None = None,
    ) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason
        if retryable is not None:
            self.retryable = retryable
        if side is not None:
            self.side = side


class ConfigError(FarfillError):
    """The cluster file cannot be used; the message names file, line, key and the fix."""

    reason = "config_invalid"
    side: Side = "config"


class InvalidRequestError(FarfillError):
    """The client asked for something that cannot be done; `param` names the field."""

    reason = "invalid_request"
    side: Side = "client"

    def __init__(self, message: str, *, param: str | None = None, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.param = param


class CapacityError(FarfillError):
    """No room now: queue, KV memory or budget. Retry after `retry_after_s`."""

    reason = "capacity"
    retryable = True
    side: Side = "decode"

    def __init__(self, message: str, *, reason: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class CancelledWorkError(FarfillError):
    """The caller went away or withdrew the work."""

    reason = "cancelled"
    side: Side = "client"


class EngineError(FarfillError):
    """The model executor failed."""

    reason = "engine_error"
    side: Side = "decode"


class ModelUnsupportedError(EngineError):
    """The model keeps state this engine cannot move or resume exactly."""

    reason = "model_unsupported"


class TransferError(FarfillError):
    """One request's KV did not arrive complete."""

    reason = "transfer_failed"
    retryable = True
    side: Side = "link"


class ProtocolError(TransferError):
    """The peer sent bytes that break the wire format."""

    reason = "protocol_violation"
    retryable = False


class TicketError(TransferError):
    """The ticket is missing, expired, used, forged or not for this peer."""

    reason = "ticket_invalid"
    retryable = False


class IncompatiblePeerError(TransferError):
    """Another protocol version, fingerprint or layout; no byte of KV may pass."""

    reason = "incompatible_peer"
    retryable = False


class UnavailableError(FarfillError):
    """No instance can serve this now."""

    reason = "unavailable"
    retryable = True

    def __init__(
        self, message: str, *, reason: str | None = None, retry_after_s: float = 1.0, side: Side | None = None
    ) -> None:
        super().__init__(message, reason=reason, side=side)
        self.retry_after_s = retry_after_s
