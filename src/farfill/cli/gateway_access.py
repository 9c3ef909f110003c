"""Options of commands that measure or compare through a gateway that asks for keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from farfill.cli.admin_client import AdminClient, trusting
from farfill.config.secrets import resolve_secret
from farfill.core.errors import ConfigError
from farfill.verify.client import Door, GatewayAccess

ApiKey = Annotated[str, typer.Option(help="Where the gateway's API key is, if it wants one: file:PATH or env:NAME.")]
GatewayCa = Annotated[str, typer.Option("--ca", help="Who signed the gateway's certificate (file:PATH).")]
RecordsAt = Annotated[
    str, typer.Option("--admin", help="https://HOST:PORT of its admin API: records of requests are there, if it is on.")
]


def gateway_access(
    url: str,
    *,
    model: str = "",
    api_key: str = "",
    ca: str = "",
    admin: str = "",
    admin_key: str = "",
    admin_ca: str = "",
) -> GatewayAccess:
    """How to get in. Raises ConfigError for an option that does not fit."""
    if (admin_key or admin_ca) and not admin:
        raise ConfigError("--admin-key and --admin-ca are for --admin https://HOST:PORT")
    key = resolve_secret(api_key, Path(), private=True).decode("utf-8", "replace").strip() if api_key else ""
    operator = AdminClient(admin, admin_key, admin_ca) if admin else None
    return GatewayAccess(
        Door(url, key, trusting("--ca", ca) if ca else None),
        None if operator is None else Door(operator.url, operator.key, operator.tls),
        model,
    )
