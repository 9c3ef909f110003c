"""`farfill rollout worker`: requests move to a new worker version, prefill first, then decode."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from farfill.cli.shares import percent_of, told
from farfill.cli.stores import DEFAULT, Config, Reason, author, with_store
from farfill.core.cluster import Role
from farfill.policy.rollout import STEPS
from farfill.registry.records import RolloutRecord
from farfill.registry.remote import RemoteStore
from farfill.registry.rollouts import ShareChange, version_share
from farfill.registry.share_checks import check_revert
from farfill.registry.versions import change_version, revert_version, version_state

app = typer.Typer(no_args_is_help=True, help="Move requests to a new version of workers.")

Version = Annotated[str, typer.Argument(help="As the new workers say it (workers.NAME.version).")]


@app.command("set")
def set_share(  # noqa: PLR0917 (every parameter is an option of the command)
    version: Version,
    share: Annotated[str, typer.Argument(help="Such as 10%.")],
    role: Annotated[Literal["prefill", "decode"], typer.Option(help="Of which role.")],
    config: Config = DEFAULT,
    sticky: Annotated[Literal["session", "request"], typer.Option(help="What moves as one.")] = "session",
    reason: Reason = "",
) -> None:
    """Let a share of requests go to workers of a version. Refused while the pairs this makes could not work."""
    change = ShareChange(percent_of(share), False, author(), reason, time.time(), sticky)
    with_store(config, lambda store: _changed(store, Role(role), version, change))


@app.command("auto")
def auto(version: Version, config: Config = DEFAULT, reason: Reason = "") -> None:
    """Go on by steps of 1, 10, 50 and 100 %, prefill and then decode, with the guards of routing.rollout."""

    async def begin(store: RemoteStore) -> None:
        state = await version_state(store, version)
        step = ShareChange(max(STEPS[0], state.prefill_percent), True, author(), reason, time.time())
        if state.same_fingerprint:
            await _changed(store, Role.PREFILL, version, step)
            return
        # No pair of old and new can work: prefill is there for all of the new decode from the start.
        everything = ShareChange(100.0, False, author(), reason, time.time())
        await _changed(store, Role.PREFILL, version, everything)
        step = ShareChange(max(STEPS[0], state.decode_percent), True, author(), reason, time.time())
        await _changed(store, Role.DECODE, version, step)

    with_store(config, begin)


@app.command("revert")
def revert(version: Version, config: Config = DEFAULT, reason: Reason = "") -> None:
    """Send nothing to workers of a version any more, while there are others; on all gateways, at once."""

    async def write(store: RemoteStore) -> None:
        await check_revert(store, version)
        await revert_version(store, version, author(), reason or "revert", time.time())
        typer.echo(f"version {version}: prefill 0 %, decode 0 %")

    with_store(config, write)


async def _changed(store: RemoteStore, role: Role, version: str, change: ShareChange) -> None:
    record: RolloutRecord = await change_version(store, role, version, change)
    typer.echo(told(version_share(role, version), record))
