"""Who hears what access and limits do; `telemetry.metrics.access` implements it by shape."""

from __future__ import annotations

from typing import Protocol


class AccessObserver(Protocol):
    """Called on the event loop; must be cheap and must not raise."""

    def access(self, credential: str, outcome: str) -> None:
        """A request came with a "key", a "token" or "none": "ok", or why it was refused."""
        ...

    def keys_known(self, count: int) -> None:
        """So many API keys count from now on."""
        ...

    def key_limited(self, reason: str) -> None:
        """A key has used its "key_requests" or "key_tokens" for now."""
        ...

    def gateways_alive(self, count: int) -> None:
        """Gateways that share limits, this one included."""
        ...

    def admin_called(self, action: str, outcome: str) -> None:
        """A call of the admin API: "read" or "write"; "ok", "failed", or why it was refused."""
        ...


class SilentAccessObserver:
    """Tells nobody."""

    def access(self, credential: str, outcome: str) -> None: ...

    def keys_known(self, count: int) -> None: ...

    def key_limited(self, reason: str) -> None: ...

    def gateways_alive(self, count: int) -> None: ...

    def admin_called(self, action: str, outcome: str) -> None: ...
