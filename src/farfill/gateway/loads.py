"""Work this gateway has given to instances and not seen finished; the registry's numbers lag behind it."""

from __future__ import annotations

from typing import TypeVar

from farfill.core.cluster import Instance

Key = TypeVar("Key")


class OutstandingWork:
    """Prompt tokens and requests by instance name, tokens also by tenant. Owned by the event loop."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._of_tenants: dict[tuple[str, str], int] = {}

    def tokens(self, instance: Instance) -> int:
        """Prompt tokens given to `instance` and not yet computed."""
        return self._tokens.get(instance.name, 0)

    def requests(self, instance: Instance) -> int:
        """Requests given to `instance` and not yet ended."""
        return self._requests.get(instance.name, 0)

    def of(self, name: str, tenant: str) -> tuple[int, int, int]:
        """(tokens, requests, the tenant's tokens) given to instance `name`."""
        return self._tokens.get(name, 0), self._requests.get(name, 0), self._of_tenants.get((name, tenant), 0)

    def begin(self, instance: Instance, tokens: int, tenant: str = "") -> Claim:
        """Count a request with `tokens` to compute. End the claim exactly when the work ended."""
        return Claim(self, instance.name, tokens, tenant)

    def add(self, name: str, tenant: str, tokens: int, requests: int) -> None:
        """Change the counts; zero entries vanish."""
        if tokens:
            _change(self._tokens, name, tokens)
            _change(self._of_tenants, (name, tenant), tokens)
        if requests:
            _change(self._requests, name, requests)


class Claim:
    """One request's share of the outstanding work. Both methods are idempotent."""

    def __init__(self, work: OutstandingWork, name: str, tokens: int, tenant: str) -> None:
        self._work = work
        self._name = name
        self._tokens = tokens
        self._tenant = tenant
        self._ended = False
        work.add(name, tenant, tokens, 1)

    def computed(self) -> None:
        """The prompt is prefilled; the request still runs."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._work.add(self._name, self._tenant, -tokens, 0)

    def end(self) -> None:
        """The request ended."""
        if not self._ended:
            self._ended = True
            tokens, self._tokens = self._tokens, 0
            self._work.add(self._name, self._tenant, -tokens, -1)


def _change(counts: dict[Key, int], key: Key, change: int) -> None:
    count = counts.get(key, 0) + change
    if count > 0:
        counts[key] = count
    else:
        counts.pop(key, None)
