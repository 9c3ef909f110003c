"""`farfill rollout`: which share of requests may prefill far, changed on all gateways at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from farfill.cli import rollout_worker
from farfill.cli.shares import percent_of, told
from farfill.cli.stores import DEFAULT, Config, Reason, author, when, with_loaded_store, with_store
from farfill.config.load import load_config
from farfill.config.models import models_of
from farfill.core.errors import InvalidRequestError
from farfill.policy.rollout import STEPS
from farfill.registry.audit import audit_log
from farfill.registry.records import ROLLOUT, RolloutRecord
from farfill.registry.remote import RemoteStore
from farfill.registry.rollouts import ANY, ShareChange, change_share, revert_all, share_of
from farfill.registry.share_checks import check_share

app = typer.Typer(no_args_is_help=True, help="Say which share of requests may prefill far.")
app.add_typer(rollout_worker.app, name="worker")

Model = Annotated[str, typer.Option(help="Only this model; * for all.")]
Tenant = Annotated[str, typer.Option(help="Only this tenant; * for all.")]
SHOWN_CHANGES = 10


@app.command("show")
def show(config: Config = DEFAULT) -> None:
    """Print all shares and the latest changes."""

    async def read(store: RemoteStore) -> None:
        shares = [share_of(entry) for entry in (await store.scan(ROLLOUT)).entries]
        if not shares:
            typer.echo("no rollout: everything may prefill far")
        for (model, tenant), record in shares:
            typer.echo(told((model, tenant), record))
        for audit in (await audit_log(store))[-SHOWN_CHANGES:]:
            why = f" ({audit.why})" if audit.why else ""
            typer.echo(f"{when(audit.unix_s)}  {audit.who}: {audit.what}{why}")

    with_store(config, read)


@app.command("set")
def set_share(  # noqa: PLR0917 (every parameter is an option of the command)
    share: Annotated[str, typer.Argument(help="Such as 10%.")],
    config: Config = DEFAULT,
    model: Model = ANY,
    tenant: Tenant = ANY,
    sticky: Annotated[str, typer.Option(help="What goes far as one: session or request.")] = "session",
    reason: Reason = "",
) -> None:
    """Let a share of requests prefill far. It stays until it is changed."""
    percent = percent_of(share)
    if sticky not in ("session", "request"):
        raise InvalidRequestError(f"--sticky is session or request, not {sticky!r}")
    _change(config, model, tenant, lambda _: ShareChange(percent, False, author(), reason, time.time(), sticky))


@app.command("auto")
def auto(config: Config = DEFAULT, model: Model = ANY, tenant: Tenant = ANY, reason: Reason = "") -> None:
    """Go on by steps of 1, 10, 50 and 100 %, with the guards of routing.rollout, from the present share on."""

    def step(found: RolloutRecord | None) -> ShareChange:
        percent = STEPS[0] if found is None or found.percent <= 0 else found.percent
        return ShareChange(percent, True, author(), reason, time.time())

    _change(config, model, tenant, step)


@app.command("revert")
def revert(config: Config = DEFAULT, reason: Reason = "") -> None:
    """Prefill everything near, on all gateways, at once."""

    async def write(store: RemoteStore) -> None:
        for model, tenant in await revert_all(store, author(), reason or "revert", time.time()):
            typer.echo(f"model {model}, tenant {tenant}: 0 %")

    with_store(config, write)


def _change(config: Path, model: str, tenant: str, make: Callable[[RolloutRecord | None], ShareChange]) -> None:
    loaded = load_config(config)
    models = {served.name for served in models_of(loaded.config).values()}

    async def write(store: RemoteStore) -> None:
        await check_share(store, (model, tenant), models)
        record = await change_share(store, (model, tenant), make)
        assert record is not None, "make always says something"
        typer.echo(told((model, tenant), record))

    with_loaded_store(loaded, write)
