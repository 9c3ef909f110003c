"""The registry's store, for commands: asked with the gateway's certificate."""

from __future__ import annotations

import asyncio
import getpass
import socket
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from farfill.cli.run_role import registry_url
from farfill.config.load import LoadedConfig, load_config
from farfill.config.secrets import read_tls
from farfill.registry.identity import registry_context
from farfill.registry.remote import RemoteStore
from farfill.registry.share_checks import check_reason

Config = Annotated[Path, typer.Option(help="Cluster file. The registry is asked with the gateway's certificate.")]
Reason = Annotated[str, typer.Option(help="Why, for the audit log.", callback=check_reason)]
DEFAULT = Path("cluster.yaml")
PIPED_COLUMNS = 180

Result = TypeVar("Result")


def with_store(config: Path, work: Callable[[RemoteStore], Awaitable[Result]]) -> Result:
    """What `work` returns. Raises ConfigError, StoreError."""
    return with_loaded_store(load_config(config), work)


def with_loaded_store(loaded: LoadedConfig, work: Callable[[RemoteStore], Awaitable[Result]]) -> Result:
    """The same, of a cluster file that was read."""
    tls = read_tls(loaded, "gateway")
    context = registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, loaded.config.cluster)

    async def run() -> Result:
        async with RemoteStore(registry_url(loaded), context) as store:
            return await work(store)

    return asyncio.run(run())


def console() -> Console:
    """Where tables go: as wide as the terminal, wide enough for all columns where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_COLUMNS)


def author() -> str:
    """Who runs this command, for the audit log."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        name = "unknown"
    return f"{name}@{socket.gethostname()}"


def when(unix_s: float) -> str:
    """For people. Also of a time that no calendar has: one such record must not hide all others."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"Unix time {unix_s:g}"
