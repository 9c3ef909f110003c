"""`farfill keys`: API keys, in the registry or the file of keys, or over a gateway's admin API."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from farfill.cli.admin_client import AdminClient
from farfill.cli.stores import DEFAULT, Reason, author, when, with_loaded_store
from farfill.config.load import LoadedConfig, load_config
from farfill.core.errors import ConfigError, InvalidRequestError
from farfill.gateway.access_open import key_digests
from farfill.registry.api_keys import SCOPES, new_key, rotated, told
from farfill.registry.key_file import KeyFile
from farfill.registry.key_store import FileKeyStore, KeyStore, RegistryKeyStore
from farfill.registry.records import AuditRecord, KeyRecord

app = typer.Typer(no_args_is_help=True, help="API keys: make, list, revoke and rotate them.")

Config = Annotated[Path, typer.Option(help="Cluster file; the registry is asked with the gateway's certificate.")]
Admin = Annotated[str, typer.Option(help="https://HOST:PORT of a gateway's admin API, instead of a cluster file.")]
AdminKey = Annotated[str, typer.Option(help="Where the admin key is: file:PATH or env:NAME.")]
AdminCa = Annotated[
    str, typer.Option(help="Who signed that gateway's certificate (file:PATH); unset: the system's CAs.")
]
Result = TypeVar("Result")

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@app.command("create")
def create(  # noqa: PLR0917 (every parameter is an option of the command)
    tenant: Annotated[str, typer.Option(help="Whose requests they are.")] = "default",
    model: Annotated[list[str] | None, typer.Option(help="A model it may use (* as a wildcard); repeat it.")] = None,
    name: Annotated[str, typer.Option(help="What people call it.")] = "",
    scope: Annotated[str, typer.Option(help="api; or of the admin API: admin, or monitor (may only look).")] = "api",
    requests_per_s: Annotated[float, typer.Option(help="Requests a second over all gateways; 0: not limited.")] = 0.0,
    tokens_per_s: Annotated[float, typer.Option(help="Tokens a second over all gateways; 0: not limited.")] = 0.0,
    burst_s: Annotated[float, typer.Option(help="Seconds of both rates that may come at once.")] = 10.0,
    priority: Annotated[int, typer.Option(help="Best priority its requests may have; lower goes first.")] = -100,
    salt: Annotated[str, typer.Option(help="Keeps its cached prefixes apart from the tenant's other keys'.")] = "",
    allow_from: Annotated[list[str] | None, typer.Option(help="A network it may be used from; repeat it.")] = None,
    expires: Annotated[str, typer.Option(help="Until when, from now: 90d, 12h, 30m; unset: for good.")] = "",
    config: Config = DEFAULT,
    admin: Admin = "",
    admin_key: AdminKey = "",
    admin_ca: AdminCa = "",
    reason: Reason = "",
) -> None:
    """Make a key and print it, once: nobody can read it again."""
    if scope not in SCOPES:
        raise InvalidRequestError(f"--scope is one of {', '.join(SCOPES)}, not {scope!r}")
    fields: dict[str, Any] = {
        "name": name,
        "scope": scope,
        "tenant": tenant,
        "models": model or ["*"],
        "requests_per_s": requests_per_s,
        "tokens_per_s": tokens_per_s,
        "burst_s": burst_s,
        "priority": priority,
        "salt": salt,
        "allow_from": allow_from or [],
        "expires_unix_s": _expires(expires),
    }
    if admin:
        answer = AdminClient(admin, admin_key, admin_ca).call("POST", "/admin/keys", {**fields, "reason": reason})
        _show_new(answer["key"], answer["id"], answer["told"])
        return
    loaded = load_config(config)
    wanted, key = new_key()
    record = KeyRecord(
        **fields, id=wanted, digest=key_digests(loaded).digest(key), created_unix_s=time.time(), author=author()
    )
    _with_keys(loaded, lambda keys: keys.create(record, reason))
    _show_new(key, wanted, told(record))


@app.command("list")
def list_keys(
    config: Config = DEFAULT,
    admin: Admin = "",
    admin_key: AdminKey = "",
    admin_ca: AdminCa = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, one key a line.")] = False,
) -> None:
    """Print all keys by id, with what they may do."""
    if admin:
        found: list[Mapping[str, Any]] = AdminClient(admin, admin_key, admin_ca).call("GET", "/admin/keys")["keys"]
    else:
        records = _with_keys(load_config(config), lambda keys: keys.list())
        found = [{**msgspec.structs.asdict(record), "told": told(record)} for record in records]
    for key in found:
        if as_json:
            typer.echo(json.dumps({k: v for k, v in key.items() if "digest" not in k and k != "schema"}))
        else:
            typer.echo(_line(key))
    if not found and not as_json:
        typer.echo("no keys")


@app.command("revoke")
def revoke(  # noqa: PLR0917 (every parameter is an option of the command)
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Its id: what follows ff_.")],
    config: Config = DEFAULT,
    admin: Admin = "",
    admin_key: AdminKey = "",
    admin_ca: AdminCa = "",
    reason: Reason = "",
) -> None:
    """Remove a key; gateways refuse it within a second."""
    if admin:
        AdminClient(admin, admin_key, admin_ca).call("DELETE", f"/admin/keys/{_id(key_id)}", {"reason": reason})
    else:
        audit = AuditRecord(unix_s=time.time(), who=author(), what=f"key {key_id} revoked", why=reason)
        _with_keys(load_config(config), lambda keys: keys.change(_id(key_id), lambda _: None, audit))
    typer.echo(f"{key_id}: revoked")


@app.command("rotate")
def rotate(  # noqa: PLR0917 (every parameter is an option of the command)
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Its id: what follows ff_.")],
    overlap: Annotated[
        str, typer.Option(help="For how long the present key counts on: 24h, 7d; 0s: no longer.")
    ] = "0s",
    config: Config = DEFAULT,
    admin: Admin = "",
    admin_key: AdminKey = "",
    admin_ca: AdminCa = "",
    reason: Reason = "",
) -> None:
    """Give a key another secret, and print it, once. Id and rights stay."""
    overlap_s = _seconds(overlap, "--overlap")
    if admin:
        body = {"overlap_s": overlap_s, "reason": reason}
        answer = AdminClient(admin, admin_key, admin_ca).call("POST", f"/admin/keys/{_id(key_id)}/rotate", body)
        _show_new(answer["key"], answer["id"], answer["told"])
        return
    loaded, now_unix_s = load_config(config), time.time()
    _, key = new_key(_id(key_id))
    digest = key_digests(loaded).digest(key)
    what = f"key {key_id} rotated, the former one counts for {overlap_s:g} s"
    audit = AuditRecord(unix_s=now_unix_s, who=author(), what=what, why=reason)
    after = _with_keys(
        loaded,
        lambda keys: keys.change(key_id, lambda record: rotated(record, digest, overlap_s, now_unix_s), audit),
    )
    assert after is not None, "it was changed, not removed"
    _show_new(key, key_id, told(after))


def _with_keys(loaded: LoadedConfig, work: Callable[[KeyStore], Awaitable[Result]]) -> Result:
    access = loaded.config.access
    if access is None or access.keys == "none":
        raise ConfigError(f"{loaded.path}: there are no keys here; add access: {{keys: registry}}")
    if access.keys == "file":

        async def run() -> Result:
            return await work(FileKeyStore(KeyFile(loaded.base_dir / access.keys_file)))

        return asyncio.run(run())
    return with_loaded_store(loaded, lambda store: work(RegistryKeyStore(store)))


def _show_new(key: str, key_id: str, rights: str) -> None:
    """The key alone on stdout, so that it can be piped; the rest for people."""
    typer.echo(f"{key_id}: {rights}. Keep the key; it is shown only now.", err=True)
    typer.echo(key)


def _line(key: Mapping[str, Any]) -> str:
    parts = [f"{key['id']}  {key['told']}"]
    parts += [f"name {key['name']}"] if key["name"] else []
    parts += [f"from {' '.join(key['allow_from'])}"] if key["allow_from"] else []
    parts += [f"until {when(key['expires_unix_s'])}"] if key["expires_unix_s"] else []
    if key["former_until_unix_s"] > time.time():
        parts.append(f"former secret until {when(key['former_until_unix_s'])}")
    return ", ".join(parts) + f"; {key['author']}, {when(key['created_unix_s'])}"


def _id(text: str) -> str:
    if not re.fullmatch(r"[0-9A-Za-z]{12}", text):
        raise InvalidRequestError(f"{text!r} is no id of a key: the 12 characters after ff_")
    return text


def _expires(text: str) -> float:
    if not text:
        return 0.0
    left_s = _seconds(text, "--expires")
    if left_s <= 0:
        raise InvalidRequestError(f"--expires: {text} makes a key that has expired already; leave it out for good")
    return time.time() + left_s


def _seconds(text: str, option: str) -> float:
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise InvalidRequestError(f"{option}: {text!r} is no time; write 90d, 12h, 30m or 10s")
    return float(found[1]) * _UNITS[found[2]]
