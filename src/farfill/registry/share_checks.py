"""What people may ask of rollouts: shares of what is served, reverts of what there is, reasons of bounded length."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection

from farfill.core.errors import InvalidRequestError, ProtocolError
from farfill.registry.members import instance_of
from farfill.registry.records import INSTANCES, ROLLOUT
from farfill.registry.rollouts import ANY, ShareKey, share_key, share_of, version_share_of
from farfill.registry.store import Store

MAX_REASON_CHARS = 500
MAX_MODEL_CHARS = 256
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_reason(text: str) -> str:
    """`text`, when the audit log can show it on a line. Raises InvalidRequestError."""
    if len(text) > MAX_REASON_CHARS or not text.isprintable():
        raise InvalidRequestError(
            f"reason has up to {MAX_REASON_CHARS} printable characters, without line breaks", param="reason"
        )
    return text


async def check_share(store: Store, key: ShareKey, models: Collection[str]) -> None:
    """Whether a share of (model, tenant) would say anything: of a model in `models`, one that a worker has, or one that
    has a share already. Raises InvalidRequestError, StoreError."""
    model, tenant = key
    if tenant != ANY and not _TENANT.fullmatch(tenant):
        raise InvalidRequestError(
            f"{tenant[:64]!r} is no tenant: letters, digits and ._-, or {ANY} for all", param="tenant"
        )
    if model == ANY or model in models:
        return
    known = sorted({*models, *(found for found, _ in await _running(store))})
    if model not in known and (len(model) > MAX_MODEL_CHARS or await store.get(share_key(*key)) is None):
        raise InvalidRequestError(
            f"no model {model[:64]!r} is served; there are: {', '.join(known)}, or {ANY} for all", param="model"
        )


async def check_revert(store: Store, version: str) -> None:
    """Whether there is that worker version. Raises InvalidRequestError naming those there are, StoreError."""
    known = {found for _, found in await _running(store)}
    for entry in (await store.scan(ROLLOUT)).entries:
        of_version = version_share_of(share_of(entry)[0])
        if of_version is not None:
            known.add(of_version[1])
    if version not in known:
        told = ", ".join(sorted(known)) or "none"
        raise InvalidRequestError(f"there is no version {version[:64]!r}; there are: {told}", param="version")


async def _running(store: Store) -> list[tuple[str, str]]:
    """(model, version) of every worker that the registry has."""
    found: list[tuple[str, str]] = []
    for entry in (await store.scan(INSTANCES)).entries:
        with contextlib.suppress(ProtocolError):  # of a newer version of the program, perhaps
            instance = instance_of(entry)
            found.append((instance.model, instance.version))
    return found
