"""`farfill autoscale`: instance counts that follow the load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
import typer

from farfill.cli.stoppable import run_stoppable
from farfill.clock import WallClock
from farfill.core.errors import ConfigError
from farfill.policy.scaling import Group, GroupLoad, ScalingChange
from farfill.scaling.file import AutoscaleFile, read_autoscale, scaler_of
from farfill.scaling.loads import PrometheusLoads
from farfill.scaling.loop import look_once, run_loop
from farfill.scaling.serve import serving
from farfill.scaling.sinks import KubernetesSink, Sink, WebhookSink, described
from farfill.telemetry.metrics.autoscale import AutoscaleMetrics
from farfill.telemetry.metrics.families import exposition

_CALL_S = 10.0


def autoscale(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Autoscale file: docs/simulator.md.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report what would change; tell nobody.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Decide once, then end.")] = False,
) -> None:
    """Size each site's groups by their load, and tell a webhook or Kubernetes. One JSON line a decision on stdout."""
    found = read_autoscale(file)
    if not dry_run and found.webhook is None and found.kubernetes is None:
        raise ConfigError(f"{file}: neither webhook nor kubernetes, so nobody to tell; add one, or say --dry-run")
    if not run_stoppable(_run(found, dry_run=dry_run, once=once)):
        raise typer.Exit(1)


async def _run(file: AutoscaleFile, *, dry_run: bool, once: bool) -> bool:
    clock, scaler, metrics = WallClock(), scaler_of(file), AutoscaleMetrics()
    async with (
        serving(file.listen, lambda: exposition(metrics.registry)),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_S)) as session,
    ):
        loads = PrometheusLoads(file, session)
        sinks: list[Sink] = []
        if not dry_run and file.webhook is not None:
            sinks.append(WebhookSink(file.webhook, session))
        if not dry_run and file.kubernetes is not None:
            sinks.append(KubernetesSink(file, session))
        if once:
            now_s, unix_s = clock.now_s(), clock.unix_s()
            return await look_once(loads, scaler, sinks, _report, now_s=now_s, unix_s=unix_s, observer=metrics)
        await run_loop(
            loads,
            scaler,
            sinks,
            _report,
            period_s=file.period_s,
            clock=clock,
            sleep=asyncio.sleep,
            observer=metrics,
        )
    return True


def _report(loads: dict[Group, GroupLoad], changes: tuple[ScalingChange, ...]) -> None:
    seen = {
        str(group): {
            "ready": load.ready,
            "starting": load.starting,
            "busy": round(load.busy, 3),
            "waiting_s": round(load.waiting_s, 3),
        }
        for group, load in loads.items()
    }
    typer.echo(msgspec.json.encode({"seen": seen, "changes": [described(c) for c in changes]}).decode())
