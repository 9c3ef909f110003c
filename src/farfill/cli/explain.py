"""`farfill explain`: the whole life of a recent request, whichever gateway served it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from farfill.cli.stores import DEFAULT, Config, author, console, when, with_store
from farfill.core.errors import InvalidRequestError
from farfill.registry.asks import ask_for_request
from farfill.registry.remote import RemoteStore

MAX_CANDIDATES = 8


class _Record(msgspec.Struct, kw_only=True):
    """What is read of a request's record."""

    request_id: str
    model: str
    accepted_unix_s: float
    outcome: str
    placed: str
    placement: str
    reason: str
    fallback: str
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    expected_hit_tokens: int
    uncached_tokens: int
    threshold_tokens: int
    transfer_id: str
    decisions: list[dict[str, Any]]


class _Life(msgspec.Struct, kw_only=True):
    gateway: str
    state: str
    steps: list[dict[str, Any]]
    rankings: list[dict[str, Any]]
    record: _Record


def explain(
    request_id: Annotated[str, typer.Argument(help="X-Request-Id of the answer.")],
    config: Config = DEFAULT,
    json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object, with all inputs.")] = False,
) -> None:
    """Show every step of a recent request with its time, the scores, the decision, retries and errors."""
    found = _found(config, request_id)
    if json:
        typer.echo(found.decode())
        return
    show(msgspec.json.decode(found, type=_Life), console())


def _found(config: Path, request_id: str) -> bytes:
    async def ask(store: RemoteStore) -> bytes | None:
        return await ask_for_request(store, author(), request_id)

    found = with_store(config, ask)
    if found is None:
        raise InvalidRequestError(
            f"no gateway has a request {request_id!r} among its last ones, or none that has it answers",
            reason="not_found",
        )
    return found


def show(life: _Life, out: Console) -> None:
    """For people."""
    record = life.record
    out.print(
        f"request {record.request_id}: {life.state}, model {record.model}, tenant {record.tenant or '-'}, accepted"
        f" {when(record.accepted_unix_s)} by {life.gateway}"
    )
    went = record.placement or "not started"
    out.print(
        f"placed {record.placed or '-'} ({record.reason or '-'}), went {went}, fallback {record.fallback};"
        f" prompt {record.prompt_tokens} tokens, {record.cached_tokens} cached (counted on"
        f" {record.expected_hit_tokens}), {record.uncached_tokens} to compute against a threshold of"
        f" {record.threshold_tokens}; {record.completion_tokens} generated"
        + (f"; transfer {record.transfer_id}" if record.transfer_id else "")
    )
    steps = Table(box=None, pad_edge=False)
    for name, justify in (("at", "right"), ("took", "right"), ("step", "left"), ("clock", "left"), ("", "left")):
        steps.add_column(name, justify=justify, no_wrap=name != "")  # pyright: ignore[reportArgumentType]
    for step in life.steps:
        steps.add_row(_ms(step["at_s"]), _ms(step["took_s"]), step["name"], step["clock"], step["detail"])
    out.print(steps)
    for ranking in life.rankings:
        out.print(_scores(ranking))
    others = [d for d in record.decisions if d["policy"] != "placement"]
    for decision in others:
        out.print(f"{decision['policy']}: {msgspec.json.encode(decision['output']).decode()}", soft_wrap=True)


def _scores(ranking: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, title=f"{ranking['role']} scores", title_justify="left")
    candidates = ranking["candidates"]
    names = list(next((c["scores"] for c in candidates if c["scores"]), {}))
    table.add_column("instance", no_wrap=True)
    for name in ("total", *names):
        table.add_column(name, justify="right")
    for one in candidates[:MAX_CANDIDATES]:
        if one["rejected"]:
            table.add_row(one["instance"], f"kept out by {one['rejected']}")
            continue
        mark = "* " if one["picked"] else "  "
        table.add_row(mark + one["instance"], f"{one['total']:.3f}", *(f"{one['scores'][n]:.3f}" for n in names))
    if len(candidates) > MAX_CANDIDATES:
        table.add_row(f"  and {len(candidates) - MAX_CANDIDATES} more (--json)")
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.{max(0, 1 - math.floor(math.log10(max(seconds * 1000, 0.01))))}f} ms"
