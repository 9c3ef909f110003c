"""`farfill top`: the live cluster in the terminal, from the registry and from what every gateway sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from farfill.cli.stores import DEFAULT, Config, author, console, when, with_store
from farfill.core.errors import FarfillError, ProtocolError
from farfill.registry.asks import ask_for_status
from farfill.registry.members import instance_of
from farfill.registry.records import INSTANCES, ROLLOUT
from farfill.registry.remote import RemoteStore
from farfill.registry.rollouts import share_of


class _Snapshot(msgspec.Struct, kw_only=True):
    """What `--json` prints. `gateways` are `gateway.status.GatewayStatus`, `instances` as the registry has them."""

    unix_s: float
    instances: list[dict[str, Any]]
    gateways: list[dict[str, Any]]
    rollout: list[dict[str, Any]]


def top(
    config: Config = DEFAULT,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print once, as one JSON object.")] = False,
    interval: Annotated[float, typer.Option(min=0.5, max=60.0, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show instances, load, queues, KV use, links, rollout shares, breakers, rates and TTFT. Ctrl-C ends it."""
    if json:
        typer.echo(msgspec.json.encode(with_store(config, snapshot)).decode())
        return
    out = console()
    if once:
        out.print(drawn(with_store(config, snapshot)))
        return

    async def follow(store: RemoteStore) -> None:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    live.update(drawn(await snapshot(store)), refresh=True)
                except FarfillError as error:
                    live.update(f"the registry does not answer: {error}", refresh=True)
                await asyncio.sleep(interval)

    with_store(config, follow)


async def snapshot(store: RemoteStore) -> _Snapshot:
    """The cluster now. Raises StoreError, ProtocolError."""
    answers = await ask_for_status(store, author())
    instances: list[dict[str, Any]] = []
    for entry in (await store.scan(INSTANCES)).entries:
        try:
            instances.append(msgspec.to_builtins(instance_of(entry)))
        except ProtocolError:  # of a newer version
            instances.append({"name": entry.key.removeprefix(INSTANCES), "state": "unreadable"})
    shares = [share_of(entry) for entry in (await store.scan(ROLLOUT)).entries]
    return _Snapshot(
        unix_s=time.time(),
        instances=instances,
        gateways=sorted((msgspec.json.decode(answer) for answer in answers), key=lambda g: g["gateway"]),
        rollout=[{"model": m, "tenant": t, **msgspec.to_builtins(record)} for (m, t), record in shares],
    )


def drawn(seen: _Snapshot) -> RenderableType:
    """For people."""
    parts: list[RenderableType] = [
        f"{when(seen.unix_s)}  {len(seen.instances)} instances, {len(seen.gateways)} gateways", ""
    ]  # fmt: skip
    parts += [_instances(seen), "", _gateways(seen.gateways), ""]
    links = [(gateway, link) for gateway in seen.gateways for link in gateway["links"]]
    if links:
        parts += [_links(links), ""]
    parts.append(_rollout(seen.rollout))
    for gateway in seen.gateways:
        if gateway["needs_restart"]:
            parts.append(f"{gateway['gateway']} needs a restart for: {', '.join(gateway['needs_restart'])}")
        if gateway["registry_away_s"] > 0:
            parts.append(f"{gateway['gateway']}: the registry has been away for {gateway['registry_away_s']:.0f} s")
    return Group(*parts)


def _instances(seen: _Snapshot) -> Table:
    table = _table("instance", "role", "site", "version", "state", *_right("running", "queued", "KV", "breaker"))
    for one in seen.instances:
        if one["state"] == "unreadable":
            table.add_row(one["name"], "", "", "", one["state"])
            continue
        breakers = {gateway["breakers"][one["name"]] for gateway in seen.gateways if one["name"] in gateway["breakers"]}
        waiting = max([one["queued_tokens"], *(g["outstanding_tokens"].get(one["name"], 0) for g in seen.gateways)])
        table.add_row(
            one["name"], one["role"], one["site"], one.get("version", ""), one["state"], str(one["running_requests"]),
            f"{waiting:,}", _part(one["kv_used_bytes"], one["kv_total_bytes"]),
            "/".join(sorted(breakers)) or ("closed" if one["role"] != "decode" else "-"),
        )  # fmt: skip
    return table


def _gateways(gateways: Iterable[dict[str, Any]]) -> Table:
    columns = ("now", "req/s", "fail/s", "429/s", "fallback/s", "tok/s in", "tok/s out", "far", "TTFT p50", "p95",
               "threshold")  # fmt: skip
    table = _table("gateway", "site", *_right(*columns))
    for one in gateways:
        traffic = one["traffic"]
        table.add_row(
            one["gateway"], one["site"], str(one["requests_in_progress"]), f"{traffic['requests_per_s']:.2f}",
            f"{traffic['failed_per_s']:.2f}", f"{traffic['rejected_per_s']:.2f}", f"{traffic['fallbacks_per_s']:.2f}",
            f"{traffic['prompt_tokens_per_s']:,.0f}", f"{traffic['output_tokens_per_s']:,.0f}",
            _percent(traffic["far_ratio"]), _seconds(traffic["ttft_p50_s"]), _seconds(traffic["ttft_p95_s"]),
            f"{one['threshold_tokens']:,}",
        )  # fmt: skip
    return table


def _links(links: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
    table = _table("link", "seen by", *_right("rate", "RTT", "used", "bandwidth", "breaker"))
    for gateway, link in links:
        rate = "-" if link["bytes_per_s"] is None else f"{link['bytes_per_s'] * 8 / 1e6:,.0f} Mbit/s"
        table.add_row(
            f"{link['site']} → {gateway['site']}", gateway["gateway"], rate, _seconds(link["rtt_s"]),
            _percent(link["utilisation"]), link["bandwidth"], link["breaker"],
        )  # fmt: skip
    return table


def _rollout(shares: Iterable[dict[str, Any]]) -> RenderableType:
    table = _table("rollout", "of", *_right("share", "how", "version", "by"))
    for share in shares:
        how = "automatic" if share["automatic"] else "by hand"
        table.add_row(
            share["model"], share["tenant"], f"{share['percent']:g} %", how, str(share["version"]), share["author"]
        )
    return table if table.row_count else "no rollout: everything may prefill far"


def _table(*columns: str | tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        if isinstance(column, str):
            table.add_column(column, no_wrap=True)
        else:
            table.add_column(column[0], justify="right", no_wrap=True)
    return table


def _right(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "right") for name in names)


def _part(used: int, total: int) -> str:
    return f"{used / total:.0%}" if total else "-"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.1f} ms"
