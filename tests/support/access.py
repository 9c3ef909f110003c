"""Access for gateways in tests: keys in a dictionary, time that stands still unless moved."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from farfill.clock import WallClock
from farfill.config.access import AccessConfig
from farfill.gateway.access import Access
from farfill.gateway.access_tokens import TokenVerifier
from farfill.registry.api_keys import KeyDigests, new_key
from farfill.registry.records import KeyRecord

PEPPER = b"a pepper of sufficient length"


@dataclass
class BookOfKeys:
    """A `KeyBook` that a test fills."""

    known: bool = True
    stale_s: float = 0.0
    found: dict[str, KeyRecord] = field(default_factory=dict)

    def get(self, key_id: str) -> KeyRecord | None:
        return self.found.get(key_id)

    def records(self) -> tuple[KeyRecord, ...]:
        return tuple(self.found.values())

    def reload(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def add(self, **fields: Any) -> str:
        """A new key with these fields; returns it."""
        key_id, key = new_key()
        self.found[key_id] = KeyRecord(id=key_id, digest=KeyDigests(PEPPER).digest(key), **fields)
        return key


@dataclass
class Seen:
    """What an `Access` told its observer."""

    outcomes: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, credential: str, outcome: str) -> None:
        self.outcomes.append((credential, outcome))


def make_access(
    book: BookOfKeys | None,
    seen: Seen,
    *,
    clock: Any = None,
    readers: dict[str, Callable[[], Awaitable[bytes]]] | None = None,
    **config: Any,
) -> Access:
    """As the section of a cluster file would have it."""
    settings = AccessConfig.model_validate(config)
    clock = clock or WallClock()
    return Access(
        settings,
        book=book,
        tokens=TokenVerifier(settings.jwt, readers, clock) if readers else None,
        digests=KeyDigests(PEPPER),
        clock=clock,
        observe=seen,
    )
