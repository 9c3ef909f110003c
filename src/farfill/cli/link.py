"""`farfill link`: what the path between two sites carries, through the transfer plane, and whether it changed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
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
from farfill.telemetry.logs import setup_logging
from farfill.transport.own_certificate import OwnCertificate
from farfill.transport.tls import PeerIdentity
from farfill.verify.link import Ends, LinkMeasurement, LinkReport
from farfill.verify.link_baseline import check_writable, compare, read_baseline, too_short, write_baseline
from farfill.verify.link_codecs import measure_here
from farfill.verify.link_report import check_drawable, draw, print_changes, print_report
from farfill.verify.link_reverse import FarSide, dial_far_side, let_in_near_side
from farfill.verify.link_serve import LinkServer

app = typer.Typer(no_args_is_help=True, help="Measure the path between two sites through the transfer plane.")

Config = Annotated[Path, typer.Option(help="Cluster file.")]
# A monitor must be able to tell it from a link that could not be measured.
CHANGED = 3


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
    far: Annotated[
        str | None, typer.Option(help="Prefill worker to dial where kv_transfer.dial is receiver, if several fit.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where measure listens then; unset: its advertise."),
    ] = None,
) -> None:
    """At the near site: receive what `measure` sends, until stopped. Takes the addresses of the worker."""
    loaded = load_config(config)
    name = pick_worker(loaded, Role.DECODE, name)
    start_logging(loaded, role="link", site=loaded.config.workers[name].site, name=name)
    _check_certificate(loaded, name)
    if _near_dials(loaded):
        far_side = _far_side(loaded, far, at)
        run_until_stopped(lambda stop: _serve_dialling(loaded, name, far_side, stop))
    else:
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
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where kv_transfer.dial is receiver: instead of its own listen."),
    ] = None,
    transfer_listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Likewise, instead of its own transfer_listen.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="For each number of connections.")] = 3.0,
    baseline: Annotated[Path | None, typer.Option(help="Write what was measured there.")] = None,
    against: Annotated[
        Path | None, typer.Option("--compare", help="A baseline; exit code 3 if the link changed.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a PNG there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """At the far site: measure the link to a site where `serve` runs."""
    loaded = load_config(config)
    earlier = None if against is None else read_baseline(against)
    if baseline is not None:
        check_writable(baseline)
    if plot is not None:
        check_drawable(plot)
    ends = _ends(loaded, name, to, at)
    setup_logging("warning", loaded.config.logging.format, role="link", site=_site(loaded, ends), name=ends.source)
    _check_certificate(loaded, ends.source)
    with progress() as report:
        result = asyncio.run(_measure(loaded, ends, seconds, report, listen=listen, transfer_listen=transfer_listen))
    changes = [] if earlier is None else compare(earlier, result)
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    else:
        print_report(Console(), result)
    if baseline is not None:
        write_baseline(baseline, result)
    if plot is not None:
        draw(result, plot)
    if earlier is not None:
        print_changes(Console(stderr=as_json), changes, too_short(earlier, result))
    if any(change.is_change for change in changes):
        sys.exit(CHANGED)


async def _serve(
    loaded: LoadedConfig, name: str, listen: str | None, transfer_listen: str | None, stop: asyncio.Event
) -> None:
    config, worker, tls = loaded.config, loaded.config.workers[name], read_tls(loaded, name)
    transfer_address = transfer_listen or worker.transfer_listen
    assert transfer_address is not None, "checked with the file"
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


async def _serve_dialling(loaded: LoadedConfig, name: str, far: FarSide, stop: asyncio.Event) -> None:
    config, tls = loaded.config, read_tls(loaded, name)
    pems = (tls.cert_pem, tls.key_pem, tls.ca_pem)
    server = LinkServer(
        cluster=config.cluster,
        name=name,
        listen=None,
        pems=pems,
        config=config.kv_transfer,
        codecs=await asyncio.to_thread(measure_here),
    )
    await server.start("")
    dialling = asyncio.create_task(dial_far_side(server, far, pems), name="farfill-link-dial")
    stopping = asyncio.create_task(stop.wait(), name="farfill-link-stop")
    try:
        log.info("link_ready")
        await asyncio.wait((dialling, stopping), return_when=asyncio.FIRST_COMPLETED)
        if dialling.done():
            dialling.result()
    finally:
        dialling.cancel()
        stopping.cancel()
        await asyncio.wait((dialling, stopping))
        await server.close()


async def _measure(
    loaded: LoadedConfig,
    ends: Ends,
    seconds: float,
    report: Callable[[str], None],
    *,
    listen: str | None,
    transfer_listen: str | None,
) -> LinkReport:
    config, worker = loaded.config.kv_transfer, loaded.config.workers[ends.source]
    if not _near_dials(loaded):
        return await LinkMeasurement(ends, config, seconds=seconds, report=report).run()
    transfer_address = transfer_listen or worker.transfer_listen
    assert transfer_address is not None, "checked with the file"
    near = let_in_near_side(ends, listen or worker.listen, report)
    measurement = LinkMeasurement(
        ends, config, seconds=seconds, report=report, near=near, transfer_listen=transfer_address
    )  # fmt: skip
    return await measurement.run()


def _check_certificate(loaded: LoadedConfig, name: str) -> None:
    """Raises CertificateRefusedError: the other side would only break the handshake off."""
    config, worker, tls = loaded.config, loaded.config.workers[name], read_tls(loaded, name)
    own = OwnCertificate(
        identity=PeerIdentity(config.cluster, worker.site, str(worker.role), name),
        cert=config.tls.cert.format(name=name),
        ca=config.tls.ca,
    )
    own.check(tls.cert_pem, tls.key_pem, tls.ca_pem)


def _site(loaded: LoadedConfig, ends: Ends) -> str:
    return loaded.config.workers[ends.source].site


def _near_dials(loaded: LoadedConfig) -> bool:
    return loaded.config.kv_transfer.dial == "receiver"


def _far_side(loaded: LoadedConfig, far: str | None, at: str | None) -> FarSide:
    name = pick_worker(loaded, Role.PREFILL, far)
    worker = loaded.config.workers[name]
    transfer = worker.transfer_advertise or worker.transfer_listen
    assert transfer is not None, "checked with the file"
    return FarSide(
        cluster=loaded.config.cluster, name=name, control=at or worker.advertise or worker.listen, transfer=transfer
    )


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
