"""Metrics of access and limits. Implements `farfill.gateway.access_observe.AccessObserver` by shape."""

from __future__ import annotations

from farfill.telemetry.metrics.families import MetricSet

CREDENTIALS = ("key", "token", "none")
OUTCOMES = (
    "ok",
    "missing",
    "malformed",
    "unknown_key",
    "wrong_key",
    "expired",
    "scope",
    "source",
    "key_source",
    "keys_unavailable",
    "jwks_unavailable",
    "jwt_malformed",
    "jwt_issuer",
    "jwt_unknown_key",
    "jwt_signature",
    "jwt_claims",
    "jwt_expired",
    "jwt_tenant",
)
LIMITS = ("key_requests", "key_tokens")
ADMIN_OUTCOMES = ("ok", "unauthorised", "forbidden", "failed")


class AccessMetrics:
    """Declared on the gateway's own set."""

    def __init__(self, metrics: MetricSet) -> None:
        self._access = metrics.counter(
            "farfill_access",
            "Requests by the credential they brought and what came of it.",
            credential=CREDENTIALS,
            outcome=OUTCOMES,
        )
        self._limited = metrics.counter(
            "farfill_key_limited", "Requests refused because their API key had used its rate.", reason=LIMITS
        )
        self._admin = metrics.counter(
            "farfill_admin_calls",
            "Calls of the admin API.",
            action=("read", "write"),
            outcome=ADMIN_OUTCOMES,
        )
        self._keys = metrics.gauge("farfill_api_keys", "API keys this gateway knows.")
        self._gateways = metrics.gauge("farfill_gateways", "Live gateways that share rate limits, as seen here.")
        self._keys().set(0)
        self._gateways().set(1)

    def access(self, credential: str, outcome: str) -> None:
        """A request came in."""
        self._access(credential=credential, outcome=outcome).inc()

    def keys_known(self, count: int) -> None:
        """Keys were read."""
        self._keys().set(count)

    def key_limited(self, reason: str) -> None:
        """A key has used its rate."""
        self._limited(reason=reason).inc()

    def gateways_alive(self, count: int) -> None:
        """Gateways came or went."""
        self._gateways().set(count)

    def admin_called(self, action: str, outcome: str) -> None:
        """A call of the admin API."""
        self._admin(action=action, outcome=outcome).inc()
