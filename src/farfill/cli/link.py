"""`farfill link`: what the path between two sites carries, through the transfer plane, and whether it changed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from farfill.cli.progress import progress
from farfill.cli.run_role import (
    http_server,
    log,
    pick_worker,
    plain_runner,
    run_until_stopped,
    server_tls,
    start_logging,
)
from farfill.config.checks import split_address
from farfill.config.load import LoadedConfig, load_config
from farfill.config.secrets import read_tls
from farfill.core.cluster import Role
from farfill.core.errors import ConfigError
from farfill.verify.link import Ends, LinkMeasurement
from farfill.verify.link_baseline import compare, read_baseline, write_baseline
from farfill.verify.link_codecs import measure_here
from farfill.verify.link_report import draw, print_changes, print_report
from farfill.verify.link_serve import LinkServer

app = typer.Typer(no_args_is_help=True, help="Measure the path between two sites through the transfer plane.")

Config = Annotated[Path, typer.Option(help="Cluster file.")]


@app.command("serve")
def serve(
    *,
    config: Config = Path("cluster.yaml"),
    name: Annotated[str | None, typer.Option(help="Decode worker whose certificate it shows.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Instead of the worker's listen, as while it runs.")
    ] = None,
    transfer_listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Instead of the worker's transfer_listen.")
    ] = None,
) -> None:
    """At the near site: receive what `measure` sends, until stopped. Takes the addresses of the worker."""
    loaded = load_config(config)
    name = pick_worker(loaded, Role.DECODE, name)
    start_logging(loaded, role="link", site=loaded.config.workers[name].site, name=name)
    run_until_stopped(lambda stop: _serve(loaded, name, listen, transfer_listen, stop))


@app.command("measure")
def measure(
    *,
    config: Config = Path("cluster.yaml"),
    name: Annotated[str | None, typer.Option(help="Prefill worker whose certificate it shows.")] = None,
    to: Annotated[str | None, typer.Option(help="Decode worker to reach, if several are named in the file.")] = None,
    at: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where serve listens; unset: the worker's advertise.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="For each number of connections.")] = 3.0,
    baseline: Annotated[Path | None, typer.Option(help="Write what was measured there.")] = None,
    against: Annotated[
        Path | None, typer.Option("--compare", help="A baseline; exit code 1 if the link changed.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a PNG there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """At the far site: measure the link to a site where `serve` runs."""
    loaded = load_config(config)
    earlier = None if against is None else read_baseline(against)
    with progress() as report:
        measurement = LinkMeasurement(
            _ends(loaded, name, to, at), loaded.config.kv_transfer, seconds=seconds, report=report
        )  # fmt: skip
        result = asyncio.run(measurement.run())
    changes = [] if earlier is None else compare(earlier, result)
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    else:
        print_report(Console(), result)
    if baseline is not None:
        write_baseline(baseline, result)
    if plot is not None:
        draw(result, plot)
    if changes:
        print_changes(Console(stderr=as_json), changes)
    if any(change.is_change for change in changes):
        sys.exit(1)


async def _serve(
    loaded: LoadedConfig, name: str, listen: str | None, transfer_listen: str | None, stop: asyncio.Event
) -> None:
    config, worker, tls = loaded.config, loaded.config.workers[name], read_tls(loaded, name)
    transfer_address = transfer_listen or worker.transfer_listen
    if transfer_address is None:
        raise ConfigError(f"{loaded.path}: {name} dials itself; the far side dials to measure: say --transfer-listen")
    server = LinkServer(
        cluster=config.cluster,
        name=name,
        listen=transfer_address,
        pems=(tls.cert_pem, tls.key_pem, tls.ca_pem),
        config=config.kv_transfer,
        codecs=await asyncio.to_thread(measure_here),
    )
    await server.start(_host(transfer_address, worker.transfer_advertise or worker.advertise or worker.listen))
    try:
        async with http_server(plain_runner(server.app()), listen or worker.listen, server_tls(tls)):
            log.info("link_ready")
            await stop.wait()
    finally:
        await server.close()


def _host(listen: str, advertised: str) -> str:
    """The host others reach: the one that is listened at, unless it is a wildcard."""
    host = split_address(listen)[0]
    if host in ("0.0.0.0", "::"):  # noqa: S104 (compared, not bound)
        host = split_address(advertised)[0]
    return f"[{host}]" if ":" in host else host


def _ends(loaded: LoadedConfig, name: str | None, to: str | None, at: str | None) -> Ends:
    source, target = pick_worker(loaded, Role.PREFILL, name), pick_worker(loaded, Role.DECODE, to)
    if source == target:
        raise ConfigError(f"{loaded.path}: {source} cannot measure the way to itself; say --name and --to")
    worker, tls = loaded.config.workers[target], read_tls(loaded, source)
    return Ends(
        cluster=loaded.config.cluster,
        source=source,
        target=target,
        control=at or worker.advertise or worker.listen,
        pems=(tls.cert_pem, tls.key_pem, tls.ca_pem),
    )
