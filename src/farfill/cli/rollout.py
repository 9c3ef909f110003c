"""`farfill rollout`: which share of requests may prefill far, changed on all gateways at once."""

from __future__ import annotations

import asyncio
import getpass
import re
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from farfill.cli.run_role import registry_url
from farfill.config.load import load_config
from farfill.config.secrets import read_tls
from farfill.core.errors import InvalidRequestError
from farfill.policy.rollout import STEPS
from farfill.registry.identity import registry_context
from farfill.registry.audit import audit_log
from farfill.registry.records import ROLLOUT, RolloutRecord
from farfill.registry.remote import RemoteStore
from farfill.registry.rollouts import ANY, ShareChange, change_share, revert_all, share_of

app = typer.Typer(no_args_is_help=True, help="Say which share of requests may prefill far.")

Config = Annotated[Path, typer.Option(help="Cluster file. The registry is asked with the gateway's certificate.")]
Model = Annotated[str, typer.Option(help="Only this model; * for all.")]
Tenant = Annotated[str, typer.Option(help="Only this tenant; * for all.")]
Reason = Annotated[str, typer.Option(help="Why, for the audit log.")]
DEFAULT = Path("cluster.yaml")
SHOWN_CHANGES = 10

Result = TypeVar("Result")


@app.command("show")
def show(config: Config = DEFAULT) -> None:
    """Print all shares and the latest changes."""

    async def read(store: RemoteStore) -> None:
        shares = [share_of(entry) for entry in (await store.scan(ROLLOUT)).entries]
        if not shares:
            typer.echo("no rollout: everything may prefill far")
        for (model, tenant), record in shares:
            typer.echo(_told(model, tenant, record))
        for audit in (await audit_log(store))[-SHOWN_CHANGES:]:
            why = f" ({audit.why})" if audit.why else ""
            typer.echo(f"{_when(audit.unix_s)}  {audit.who}: {audit.what}{why}")

    _with_store(config, read)


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
    percent = _percent(share)
    if sticky not in ("session", "request"):
        raise InvalidRequestError(f"--sticky is session or request, not {sticky!r}")
    _change(config, model, tenant, lambda _: ShareChange(percent, False, _author(), reason, time.time(), sticky))


@app.command("auto")
def auto(config: Config = DEFAULT, model: Model = ANY, tenant: Tenant = ANY, reason: Reason = "") -> None:
    """Go on by steps of 1, 10, 50 and 100 %, with the guards of routing.rollout, from the present share on."""

    def step(found: RolloutRecord | None) -> ShareChange:
        percent = STEPS[0] if found is None or found.percent <= 0 else found.percent
        return ShareChange(percent, True, _author(), reason, time.time())

    _change(config, model, tenant, step)


@app.command("revert")
def revert(config: Config = DEFAULT, reason: Reason = "") -> None:
    """Prefill everything near, on all gateways, at once."""

    async def write(store: RemoteStore) -> None:
        for model, tenant in await revert_all(store, _author(), reason or "revert", time.time()):
            typer.echo(f"model {model}, tenant {tenant}: 0 %")

    _with_store(config, write)


def _change(config: Path, model: str, tenant: str, make: Callable[[RolloutRecord | None], ShareChange]) -> None:
    async def write(store: RemoteStore) -> None:
        record = await change_share(store, (model, tenant), make)
        assert record is not None, "make always says something"
        typer.echo(_told(model, tenant, record))

    _with_store(config, write)


def _with_store(config: Path, work: Callable[[RemoteStore], Awaitable[Result]]) -> Result:
    loaded = load_config(config)
    tls = read_tls(loaded, "gateway")
    context = registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, loaded.config.cluster)

    async def run() -> Result:
        async with RemoteStore(registry_url(loaded), context) as store:
            return await work(store)

    return asyncio.run(run())


def _percent(text: str) -> float:
    found = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s*%?", text.strip())
    if found is None or float(found[1]) > 100:
        raise InvalidRequestError(f"{text!r} is no share; write one from 0% to 100%, such as 10%")
    return float(found[1])


def _told(model: str, tenant: str, record: RolloutRecord) -> str:
    how = "automatic" if record.automatic else "by hand"
    why = f" ({record.reason})" if record.reason else ""
    return (
        f"model {model}, tenant {tenant}: {record.percent:g} % by {record.sticky}, {how}; version {record.version},"
        f" {record.author}, {_when(record.unix_s)}{why}"
    )


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _author() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        name = "unknown"
    return f"{name}@{socket.gethostname()}"
