"""Rollouts of a new worker version: checked against what runs, then changed as any other share."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from farfill.core.cluster import Instance, Role
from farfill.core.errors import InvalidRequestError, ProtocolError
from farfill.policy.rollout import VersionInputs, version_refusal
from farfill.registry.members import instance_of
from farfill.registry.records import INSTANCES, ROLLOUT, RolloutRecord
from farfill.registry.rollouts import ShareChange, change_share, share_of, version_share
from farfill.registry.store import Store
from farfill.wire.control import PROTOCOL_VERSION

SPOKEN = (PROTOCOL_VERSION,)

REFUSALS = {
    "protocol_version": "it speaks another protocol version than this gateway's; upgrade the gateways first",
    "prefill_first": "prefill goes first; bring prefill workers to 100 % of it before decode",
    "no_prefill_of_fingerprint": "its fingerprint is another one, so its decode workers need prefill workers of the"
    " same; give prefill a share of it first",
}


@dataclass(frozen=True, slots=True)
class VersionState:
    """What runs: instances of the version and of others, and the shares of both roles in percent."""

    new: tuple[Instance, ...]
    old: tuple[Instance, ...]
    prefill_percent: float
    decode_percent: float

    @property
    def same_fingerprint(self) -> bool:
        """Whether old and new exchange KV."""
        return {i.fingerprint for i in self.new} == {i.fingerprint for i in self.old}


async def version_state(store: Store, version: str) -> VersionState:
    """As the registry has it. Raises StoreError."""
    instances: list[Instance] = []
    for entry in (await store.scan(INSTANCES)).entries:
        with contextlib.suppress(ProtocolError):
            instances.append(instance_of(entry))
    percents = {
        key: record.percent for key, record in (share_of(entry) for entry in (await store.scan(ROLLOUT)).entries)
    }
    return VersionState(
        new=tuple(i for i in instances if i.version == version),
        old=tuple(i for i in instances if i.version != version),
        prefill_percent=percents.get(version_share(Role.PREFILL, version), 0.0),
        decode_percent=percents.get(version_share(Role.DECODE, version), 0.0),
    )


def check_version(state: VersionState, role: Role, version: str, percent: float) -> None:
    """Raises InvalidRequestError when `role` may not have so much of `version` now; 0 % always may be."""
    if percent <= 0:
        return
    known = sorted({i.version for i in state.old})
    of_role = [i for i in state.new if i.role in (role, Role.MIXED)]
    if not of_role:
        raise InvalidRequestError(
            f"no {role} worker of version {version!r} runs; there are: {', '.join(known) or 'none'}", param="version"
        )
    decode = percent if role is Role.DECODE else state.decode_percent
    prefill = percent if role is Role.PREFILL else state.prefill_percent
    for new in of_role:
        for old in state.old or state.new:
            inputs = VersionInputs(
                old=(old.fingerprint, old.protocol),
                new=(new.fingerprint, new.protocol),
                spoken=SPOKEN,
                prefill_percent=prefill,
                decode_percent=decode,
            )
            refusal = version_refusal(inputs)
            if refusal:
                raise InvalidRequestError(f"{new.name}, version {version}: {REFUSALS[refusal]}", reason=refusal)


async def change_version(store: Store, role: Role, version: str, change: ShareChange) -> RolloutRecord:
    """Set the share of `role` that goes to `version`. Raises InvalidRequestError, StoreError."""
    check_version(await version_state(store, version), role, version, change.percent)
    record = await change_share(store, version_share(role, version), lambda _: change)
    assert record is not None, "the change is always made"
    return record


async def revert_version(store: Store, version: str, author: str, reason: str, unix_s: float) -> None:
    """No request goes to `version` any more: decode first, as it came last. Raises StoreError."""
    for role in (Role.DECODE, Role.PREFILL):
        change = ShareChange(0.0, False, author, reason, unix_s)
        await change_share(store, version_share(role, version), lambda _, change=change: change)
