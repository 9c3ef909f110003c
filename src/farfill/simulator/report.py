"""A simulation for people: tables, and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farfill.core.errors import ConfigError
from farfill.planner.kv_report import seconds_text
from farfill.planner.plot import figure, save
from farfill.simulator.replay import Replayed
from farfill.simulator.run import LinkUse, Result, Spread
from farfill.simulator.scenario import NEVER


def print_result(console: Console, result: Result) -> None:
    """Latencies, rates, and everything that did not go as placed."""
    console.print(
        Text(
            f"{result.scenario}: {result.requests:,} requests over {seconds_text(result.simulated_s)} of virtual time,"
            f" seed {result.seed}; arrivals: {result.arrivals}",
            style="bold",
        )
    )
    console.print(_latencies(result))
    console.print(_rates(result))
    if result.replayed is not None:
        console.print(_replayed(result.replayed))
    for title, counts in (
        ("placed", result.placements),
        ("fell back", result.fallbacks),
        ("refused", result.refused),
        ("failed", result.failed),
    ):
        if counts:
            told = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda c: -c[1]))
            console.print(Text(f"{title}: {told}"))
    for change in result.scaling:
        console.print(
            Text(f"{seconds_text(change.at_s)}: {change.group} {change.before} → {change.after}, {change.reason}")
        )
    for at_s, percent, reason in result.rollout:
        console.print(Text(f"{seconds_text(at_s)}: {percent:g} % may go far, {reason}"))


def draw_result(result: Result, folder: Path) -> list[Path]:
    """Four plots into `folder`, which is made. Raises ConfigError when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot: {folder} cannot be made: {error.strerror}") from error
    drawn = [
        (folder / "ttft.png", _ttft(result)),
        (folder / "queues.png", _over_time(result, "queue: ", "requests waiting")),
        (folder / "instances.png", _over_time(result, "instances: ", "ready instances", steps=True)),
    ]
    if result.links:
        drawn.append((folder / "links.png", _over_time(result, "link: ", "share of the link used", top=1.0)))
    for path, drawing in drawn:
        save(drawing, path)
    return [path for path, _ in drawn]


def _latencies(result: Result) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "mean", "P50", "P90", "P99"):
        table.add_column(name, justify="left" if not name else "right")
    rows: list[tuple[str, Spread]] = [
        ("time to first token", result.ttft),
        ("wait before prefill", result.queue),
        ("time per output token", result.tpot),
    ]
    for name, spread in rows:
        table.add_row(name, *(seconds_text(s) for s in (spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s)))
    return table


def _rates(result: Result) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("finished", f"{result.finished:,}")
    table.add_row("throughput", f"{result.throughput_per_s:.3g} requests/s, {result.output_tokens_per_s:,.0f} tokens/s")
    table.add_row("goodput within the SLO", f"{result.goodput_per_s:.3g} requests/s")
    table.add_row("prefilled far", f"{result.offload_share:.1%}")
    cached = result.cached_tokens / result.prompt_tokens if result.prompt_tokens else 0.0
    table.add_row("prompt tokens cached", f"{cached:.1%}")
    table.add_row("threshold at the end", _threshold(result))
    for link in result.links:
        table.add_row(
            f"link from {link.site}",
            f"{link.gbit_per_s:.3g} Gbit/s of KV{_wire(link)}, {link.utilisation:.1%} of it, {link.most:.0%} at most",
        )
    return table


def _threshold(result: Result) -> str:
    if result.threshold_tokens >= NEVER:
        return "none: nothing goes far"
    searched = f", {result.first_threshold_tokens:,} at first, searched {result.threshold_searches} times"
    return f"{result.threshold_tokens:,} tokens{searched if result.threshold_searches else ''}"


def _wire(link: LinkUse) -> str:
    same = link.wire_gbit_per_s > link.gbit_per_s * (1 - 1e-9)
    return "" if same else f" ({link.wire_gbit_per_s:.3g} on the wire)"


def _replayed(replayed: Replayed) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (f"{replayed.requests:,} requests", "measured", "simulated", "off"):
        table.add_column(name, justify="right" if name in ("measured", "simulated", "off") else "left")
    pairs = (
        (replayed.measured_ttft_s, replayed.simulated_ttft_s),
        (
            replayed.measured_ttft_p90_s,
            replayed.simulated_ttft_p90_s,
        ),
    )
    for name, (then, now), off in zip(("mean TTFT", "P90 TTFT"), pairs, (replayed.ttft_off, None), strict=True):
        table.add_row(name, seconds_text(then), seconds_text(now), "" if off is None else f"{off:+.1%}")
    table.add_row(
        "requests/s",
        f"{replayed.measured_requests_per_s:.3f}",
        f"{replayed.simulated_requests_per_s:.3f}",
        f"{replayed.throughput_off:+.1%}",
    )
    table.add_row("tokens/s", f"{replayed.measured_tokens_per_s:.1f}", f"{replayed.simulated_tokens_per_s:.1f}", "")
    verdict = "within" if replayed.within else "over"
    table.caption = f"{verdict} {replayed.bound:.0%}; {replayed.same_placement:.0%} placed as they were"
    return table


def _ttft(result: Result) -> Any:
    drawing = figure(1)
    axes = drawing.axes[0]
    count = len(result.ttft_s)
    shares = [i / (count - 1) for i in range(count)] if count > 1 else []
    axes.plot(result.ttft_s, shares)
    axes.set(xlabel="seconds to first token", ylabel="share of requests", ylim=(0, 1.02), title=result.scenario)
    if result.ttft_s and result.ttft_s[0] > 0:
        axes.set_xscale("log")
        for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            axis(lambda seconds, _: f"{seconds:g}")
    return drawing


def _over_time(result: Result, prefix: str, label: str, *, steps: bool = False, top: float | None = None) -> Any:
    drawing = figure(1)
    axes = drawing.axes[0]
    minutes = [at / 60 for at in result.at_s]
    for name, values in result.series.items():
        if name.startswith(prefix):
            axes.plot(minutes, values, label=name.removeprefix(prefix), drawstyle="steps-post" if steps else "default")
    axes.set(xlabel="minutes", ylabel=label, title=result.scenario)
    axes.set_ylim(bottom=0, top=top)
    return drawing
