"""Work this gateway has given to instances and not seen finished; the registry's numbers lag behind it."""

from __future__ import annotations

from collections import Counter

from farfill.core.cluster import Instance


class OutstandingWork:
    """Prompt tokens and requests by instance name, tokens also by tenant. Owned by the event loop."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._of_tenants: Counter[tuple[str, str]] = Counter()

    def tokens(self, instance: Instance) -> int:
        """Prompt tokens given to `instance` and not yet computed."""
        return self._tokens[instance.name]

    def requests(self, instance: Instance) -> int:
        """Requests given to `instance` and not yet ended."""
        return self._requests[instance.name]

    def of(self, name: str, tenant: str) -> tuple[int, int, int]:
        """(tokens, requests, the tenant's tokens) given to instance `name`."""
        return self._tokens[name], self._requests[name], self._of_tenants[name, tenant]

    def begin(self, instance: Instance, tokens: int, tenant: str = "") -> Claim:
        """Count a request with `tokens` to compute. End the claim exactly when the work ended."""
        return Claim(self, instance.name, tokens, tenant)

    def add(self, name: str, tenant: str, tokens: int, requests: int) -> None:
        """Change the counts; zero entries vanish."""
        _change(self._tokens, name, tokens)
        _change(self._requests, name, requests)
        _change(self._of_tenants, (name, tenant), tokens)


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
        self._work.add(self._name, self._tenant, -self._tokens, 0)
        self._tokens = 0

    def end(self) -> None:
        """The request ended."""
        if not self._ended:
            self._ended = True
            self.computed()
            self._work.add(self._name, self._tenant, 0, -1)


def _change(counter: Counter, key: object, change: int) -> None:
    if change:
        counter[key] += change
        if counter[key] <= 0:
            del counter[key]
