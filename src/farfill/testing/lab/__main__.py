"""The lab from the command line: once around a command, or up, used and changed from several terminals, and down."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import typer

from farfill.testing.lab import held
from farfill.testing.lab.errors import LabError
from farfill.testing.lab.held import Change, Cut, Down, Enter, Plan, Reply, Setting, Show
from farfill.testing.lab.lab import Lab, missing_requirement
from farfill.testing.lab.namespace import inside
from farfill.testing.lab.units import bits_per_s, seconds, share, size_bytes

_INTERRUPTED = 130
_AFTER_INTERRUPT_S = 5.0

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Rate = Annotated[float | None, typer.Option(parser=bits_per_s, metavar="RATE", help="1gbit, 50mbit, unlimited")]
Rtt = Annotated[float | None, typer.Option(parser=seconds, metavar="TIME", help="Round-trip time: 30ms")]
Jitter = Annotated[float | None, typer.Option(parser=seconds, metavar="TIME", help="The round trip varies by ±")]
Loss = Annotated[float | None, typer.Option(parser=share, metavar="SHARE", help="Each way, of wire packets: 0.1%")]
Queue = Annotated[
    int | None, typer.Option(parser=size_bytes, metavar="BYTES", help="0: one bandwidth-delay product, as without it")
]
Sites = Annotated[str, typer.Option(help="Names, with commas; each two are joined by a link.")]
Seed = Annotated[int, typer.Option(help="Fixes which packets are lost.")]
Congestion = Annotated[
    str | None, typer.Option("--congestion-control", metavar="NAME", help="The only one sites may use: cubic, bbr")
]
Name = Annotated[str, typer.Option(help="Which lab.")]
OneWay = Annotated[bool, typer.Option("--one-way", help="Only from FIRST to SECOND.")]
Command = Annotated[list[str], typer.Argument(help="{near} and so on become the sites' addresses.")]
# What follows the site is the command, its options included.
_COMMAND_FOLLOWS = {"allow_interspersed_args": False}


@app.command("once", context_settings=_COMMAND_FOLLOWS)
def once(
    site: Annotated[str, typer.Argument(help="Where the command runs.")],
    command: Command,
    *,
    rate: Rate = None,
    rtt: Rtt = None,
    jitter: Jitter = None,
    loss: Loss = None,
    queue: Queue = None,
    congestion_control: Congestion = None,
    sites: Sites = "near,far",
    seed: Seed = 0,
    beside: Annotated[
        list[str] | None, typer.Option("--with", metavar="SITE:COMMAND", help="Runs meanwhile, e.g. a server.")
    ] = None,
    wait: Annotated[list[str] | None, typer.Option(metavar="SITE:PORT", help="Until something there listens.")] = None,
) -> None:
    """Bring a lab up, run a command at a site, take the lab down; exit code of the command."""
    _require()
    plan = Plan(
        sites=tuple(sites.split(",")),
        seed=seed,
        congestion_control=congestion_control,
        setting=Setting(rate_bits_per_s=rate, rtt_s=rtt, jitter_s=jitter, loss=loss, queue_bytes=queue),
    )
    with Lab(plan.sites, seed=plan.seed, congestion_control=plan.congestion_control) as lab:
        held.apply_plan(lab, plan)
        addresses = {name: lab.address(name) for name in lab.sites}
        for text in beside or []:
            at, line = _of_site(text, "COMMAND")
            lab.start(at, _filled(shlex.split(line), addresses), stdin=subprocess.DEVNULL, stdout=sys.stderr)
        for text in wait or []:
            at, port = _of_site(text, "PORT")
            if not port.isdecimal():
                raise LabError(f"{port!r} is no port")
            lab.wait_listening(at, int(port))
        process = lab.start(site, _filled(command, addresses))
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the command got it as well
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_AFTER_INTERRUPT_S)
            code = _INTERRUPTED
    raise typer.Exit(code if code >= 0 else 128 - code)


@app.command("up")
def up(
    *,
    name: Name = "lab",
    rate: Rate = None,
    rtt: Rtt = None,
    jitter: Jitter = None,
    loss: Loss = None,
    queue: Queue = None,
    congestion_control: Congestion = None,
    sites: Sites = "near,far",
    seed: Seed = 0,
) -> None:
    """Bring a lab up and leave it up in the background, until `down`."""
    _require()
    _print(
        held.bring_up(
            name,
            Plan(
                sites=tuple(sites.split(",")),
                seed=seed,
                congestion_control=congestion_control,
                setting=Setting(rate_bits_per_s=rate, rtt_s=rtt, jitter_s=jitter, loss=loss, queue_bytes=queue),
            ),
        )
    )


@app.command("run", context_settings=_COMMAND_FOLLOWS)
def run(
    site: Annotated[str, typer.Argument(help="Where the command runs.")],
    command: Command,
    *,
    name: Name = "lab",
) -> None:
    """Run a command, such as a shell, at a site of a lab that is up."""
    reply, namespace_fd = held.ask(name, Enter(site))
    if namespace_fd is None:
        raise LabError(f"the lab named {name} gave no way into {site}")
    argv = _filled(command, reply.addresses)
    with inside(namespace_fd):
        os.execvp(argv[0], argv)  # noqa: S606 -- running what the user says is the purpose


@app.command("set")
def change(
    first: str,
    second: str,
    *,
    name: Name = "lab",
    rate: Rate = None,
    rtt: Rtt = None,
    jitter: Jitter = None,
    loss: Loss = None,
    queue: Queue = None,
    one_way: OneWay = False,
) -> None:
    """Change a link while it is used. With --one-way, that direction's half of --rtt and --jitter."""
    setting = Setting(rate_bits_per_s=rate, rtt_s=rtt, jitter_s=jitter, loss=loss, queue_bytes=queue)
    _print(held.ask(name, Change(first, second, one_way, setting))[0])


@app.command("cut")
def cut(first: str, second: str, *, name: Name = "lab", one_way: OneWay = False) -> None:
    """Cut a link: what is under way and what comes is lost, and neither side is told."""
    _print(held.ask(name, Cut(first, second, one_way, cut=True))[0])


@app.command("heal")
def heal(first: str, second: str, *, name: Name = "lab", one_way: OneWay = False) -> None:
    """Mend a cut link."""
    _print(held.ask(name, Cut(first, second, one_way, cut=False))[0])


@app.command("show")
def show(
    name: Name = "lab", json: Annotated[bool, typer.Option("--json", help="For programs; no rate is null.")] = False
) -> None:
    """Print addresses, links and their counters."""
    reply, _ = held.ask(name, Show())
    if json:
        typer.echo(msgspec.json.encode(reply).decode())
    else:
        _print(reply)


@app.command("down")
def down(name: Name = "lab") -> None:
    """End everything that runs in the lab, and remove it."""
    held.ask(name, Down())


@app.command("hold", hidden=True)
def hold(name: str) -> None:
    """What `up` leaves in the background."""
    held.hold(name)


def _require() -> None:
    if (problem := missing_requirement()) is not None:
        raise LabError(problem)


def _of_site(text: str, what: str) -> tuple[str, str]:
    site, colon, rest = text.partition(":")
    if not colon:
        raise LabError(f"{text!r} is not SITE:{what}")
    return site, rest.strip()


def _filled(command: Sequence[str], addresses: Mapping[str, str]) -> list[str]:
    """The command with addresses for {site}, without the `--` that may stand before it."""
    argv = list(command[1:] if command and command[0] == "--" else command)
    if not argv:
        raise LabError("say which command to run")
    for site, address in addresses.items():
        argv = [word.replace(f"{{{site}}}", address) for word in argv]
    return argv


def _print(reply: Reply) -> None:
    for site, address in reply.addresses.items():
        typer.echo(f"{site}  {address}")
    for way in reply.directions:
        rate = f"{way.rate_bits_per_s / 1e6:g} Mbit/s" if math.isfinite(way.rate_bits_per_s) else "unlimited"
        state = "cut" if way.is_cut else "up"
        typer.echo(
            f"{way.source} -> {way.target}  {state}, {rate}, {way.delay_s * 1e3:g} ± {way.jitter_s * 1e3:g} ms, "
            f"loss {way.loss:.4%}"
        )
        seen = way.counters
        typer.echo(
            f"    {seen.packets} packets, {seen.bytes} bytes; {seen.in_flight_packets} under way; dropped: "
            f"{seen.lost} lost, {seen.overflowed} queue, {seen.severed} cut, {seen.refused} refused"
        )


def main() -> None:
    try:
        app()
    except (LabError, OSError) as error:  # OSError: the command cannot be started
        typer.echo(f"lab: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
