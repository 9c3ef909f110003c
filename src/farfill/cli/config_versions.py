"""`farfill config apply|history|diff|rollback`: versions of the cluster file that all gateways follow."""

from __future__ import annotations

import difflib
import time
from pathlib import Path
from typing import Annotated

import typer

from farfill.cli.stores import DEFAULT, Config, Reason, author, when, with_store
from farfill.config.load import load_config, load_text
from farfill.config.model import ClusterConfig
from farfill.core.errors import InvalidRequestError
from farfill.gateway.reload import applies, changed_keys
from farfill.registry.configs import ConfigChange, config_history, config_version, current_config, put_config
from farfill.registry.records import ConfigRecord
from farfill.registry.remote import RemoteStore
from farfill.registry.store import StoreError


def apply(
    file: Annotated[Path, typer.Argument(help="Cluster file to put in force.")],
    config: Config = DEFAULT,
    reason: Reason = "",
) -> None:
    """Put a cluster file in force on all gateways, as far as is safe while they run; the rest is named."""
    found, own = load_config(file).config, load_config(config).config
    _check_cluster(found, own, str(file))
    text = file.read_text(encoding="utf-8")

    async def write(store: RemoteStore) -> None:
        before = await current_config(store)
        old = own if before is None else _parsed(before)
        await _put(store, text, old, found, reason)

    with_store(config, write)


def history(config: Config = DEFAULT) -> None:
    """Print the versions of the configuration, the latest last."""

    async def read(store: RemoteStore) -> None:
        records = await config_history(store)
        if not records:
            typer.echo("no version yet: every gateway follows its own file (farfill config apply FILE)")
        for record in records:
            why = f" ({record.reason})" if record.reason else ""
            typer.echo(f"{record.version:4}  {when(record.unix_s)}  {record.author}{why}")

    with_store(config, read)


def diff(
    old: Annotated[int, typer.Argument(help="Version; 0: the one before the latest.")] = 0,
    new: Annotated[int, typer.Argument(help="Version; 0: the one in force.")] = 0,
    config: Config = DEFAULT,
    file: Annotated[Path | None, typer.Option(help="Compare the version in force with this cluster file.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Compare line by line.")] = False,
) -> None:
    """Show what changed between two versions, key by key, and what of it needs a restart. Exit code 1: they differ."""

    async def read(store: RemoteStore) -> tuple[ConfigRecord, ConfigRecord]:
        current = await current_config(store)
        if current is None:
            raise InvalidRequestError("there is no configuration version yet (farfill config apply FILE)")
        if file is not None:
            checked = load_config(file)
            return current, ConfigRecord(
                version=0, text=checked.path.read_text(encoding="utf-8"), author=str(file), unix_s=0.0
            )
        after = current if not new else await config_version(store, new)
        wanted = old or after.previous
        if not wanted:
            raise InvalidRequestError(f"version {after.version} is the first one: there is nothing before it")
        return await config_version(store, wanted), after

    try:
        before, after = with_store(config, read)
    except StoreError as error:  # exit code 1 says that they differ
        raise InvalidRequestError(f"nothing could be compared: {error}") from error
    if text:
        names = [f"version {record.version}" if record.version else record.author for record in (before, after)]
        lines = difflib.unified_diff(before.text.splitlines(), after.text.splitlines(), names[0], names[1], lineterm="")
    else:
        lines = iter(differences(_parsed(before), _parsed(after)))
    shown = list(lines)
    for line in shown:
        typer.echo(line)
    if shown:
        raise typer.Exit(1)


def rollback(
    version: Annotated[int, typer.Argument(help="Version to go back to; 0: the one before the latest.")] = 0,
    config: Config = DEFAULT,
    reason: Reason = "",
) -> None:
    """Put an earlier version in force again, on all gateways at once."""
    own = load_config(config).config

    async def write(store: RemoteStore) -> None:
        current = await current_config(store)
        wanted = version or (0 if current is None else current.previous)
        if current is None or not wanted:
            raise InvalidRequestError("there is no earlier version to go back to")
        former = await config_version(store, wanted)
        _check_cluster(_parsed(former), own, f"version {wanted}")
        why = f"rollback to {wanted}" + (f": {reason}" if reason else "")
        await _put(store, former.text, _parsed(current), _parsed(former), why)

    with_store(config, write)


def differences(old: ClusterConfig, new: ClusterConfig) -> list[str]:
    """One line a key: what it was and is, and whether gateways follow it while they run."""
    return [
        f"{key}: {_shown(old, key)} -> {_shown(new, key)}{'' if applies(key) else '  (needs a restart)'}"
        for key in changed_keys(old, new)
    ]


def _check_cluster(new: ClusterConfig, own: ClusterConfig, where: str) -> None:
    """Raises InvalidRequestError when `new` is of another cluster: no certificate of this one would count there."""
    if new.cluster != own.cluster:
        raise InvalidRequestError(
            f"{where}: cluster is {new.cluster!r}, but this cluster is {own.cluster!r}; its name is part of every"
            f" certificate and cannot be changed while it runs: write cluster: {own.cluster}",
            param="cluster",
        )


async def _put(store: RemoteStore, text: str, old: ClusterConfig, new: ClusterConfig, reason: str) -> None:
    shown = differences(old, new)
    what = "; ".join(shown) or "no key changes"
    record = await put_config(store, ConfigChange(text, author(), reason, time.time(), what))
    typer.echo(f"version {record.version} is in force")
    for line in shown:
        typer.echo(f"  {line}")


def _parsed(record: ConfigRecord) -> ClusterConfig:
    name = f"configuration version {record.version}" if record.version else record.author
    return load_text(record.text, Path(name)).config


def _shown(config: ClusterConfig, key: str) -> str:
    found: object = config.model_dump(mode="json")
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return "unset"
        found = found[part]
    return "null" if found is None else str(found)
