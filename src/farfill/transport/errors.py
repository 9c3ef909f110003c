"""How a connection can fail. `reason` is stable: it labels metrics and logs on both sides."""

from __future__ import annotations

from farfill.core.errors import Side, TransferError


class TransportError(TransferError):
    """No bytes can pass on this connection; another may work."""

    reason = "connection_lost"
    retryable = True
    side: Side = "link"


class TransportTimeoutError(TransportError):
    """The other side did not answer in time."""

    reason = "connection_timeout"


class TransportInterruptedError(TransportError):
    """This side closed it."""

    reason = "closed_here"


class IdentityError(TransportError):
    """The other side could not prove who it is, or did not accept our proof. Trying again does not help."""

    reason = "identity_refused"
    retryable = False
