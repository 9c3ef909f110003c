"""Work this gateway has given to instances and not seen finished; the registry's numbers lag behind it."""

from __future__ import annotations

from collections import Counter

from farfill.core.cluster import Instance


class OutstandingWork:
    """Prompt tokens and requests by instance name. Owned by the event loop."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()

    def tokens(self, instance: Instance) -> int:
        """Prompt tokens given to `instance` and not yet computed."""
        return self._tokens[instance.name]

    def requests(self, instance: Instance) -> int:
        """Requests given to `instance` and not yet ended."""
        return self._requests[instance.name]

    def begin(self, instance: Instance, tokens: int) -> Claim:
        """Count a request with `tokens` to compute. End the claim exactly when the work ended."""
        return Claim(self, instance.name, tokens)

    def add(self, name: str, tokens: int, requests: int) -> None:
        """Change the counts; zero entries vanish."""
        for counter, change in ((self._tokens, tokens), (self._requests, requests)):
            counter[name] += change
            if counter[name] <= 0:
                del counter[name]


class Claim:
    """One request's share of the outstanding work. Both methods are idempotent."""

    def __init__(self, work: OutstandingWork, name: str, tokens: int) -> None:
        self._work = work
        self._name = name
        self._tokens = tokens
        self._ended = False
        work.add(name, tokens, 1)

    def computed(self) -> None:
        """The prompt is prefilled; the request still runs."""
        self._work.add(self._name, -self._tokens, 0)
        self._tokens = 0

    def end(self) -> None:
        """The request ended."""
        if not self._ended:
            self._ended = True
            self.computed()
            self._work.add(self._name, 0, -1)
