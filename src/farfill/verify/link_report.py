"""A measured link for people: tables, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farfill.core.errors import ConfigError
from farfill.verify.link import LinkReport
from farfill.verify.link_baseline import Change

_SMOOTHED = 5


def print_report(console: Console, report: LinkReport) -> None:
    """What was measured; fits 80 columns."""
    best = report.best
    console.print(_steps(report))
    console.print(_codecs(report))
    summary = (
        f"{report.source} → {report.target}: {best.bits_per_s / 1e6:.0f} Mbit/s with {best.connections}"
        f" connection{'s' if best.connections > 1 else ''}, round trip {report.rtt_ms:.1f} ms,"
        f" jitter {report.jitter_ms:.1f} ms, {report.encryption}"
    )
    console.print(Text(summary, style="bold"))


def print_changes(console: Console, changes: Sequence[Change]) -> None:
    """The link against its baseline, and the verdict."""
    table = _table("Against the baseline", "figure", "baseline", "now", "tolerance", "")
    for change in changes:
        unit = change.tolerance.unit
        table.add_row(
            change.tolerance.title,
            f"{change.before:.2f} {unit}",
            f"{change.now:.2f} {unit}",
            f"± {change.allowed:.2f} {unit}",
            Text("changed", style="bold red") if change.is_change else Text("same", style="green"),
        )
    console.print(table)
    changed = [change.tolerance.title for change in changes if change.is_change]
    if changed:
        console.print(Text(f"The link changed: {', '.join(changed)}.", style="bold red"))
    else:
        console.print(Text("The link is as it was.", style="green"))


def draw(report: LinkReport, path: Path) -> None:
    """Goodput over time and by number of connections, as an image. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'farfill[plot]'") from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    over_time, by_number = figure.subplots(1, 2, width_ratios=(2, 1), sharey=True)
    times = [time_s for time_s, _ in report.samples]
    rates = [rate / 1e6 for _, rate in report.samples]
    over_time.plot(times, rates, color="0.8", linewidth=0.8, label="every 0.1 s")
    over_time.plot(times, _smooth(rates), color="tab:blue", label="mean of 0.5 s")
    over_time.set(
        xlabel="seconds", ylabel="Mbit/s", title="sent, one step after the other", ylim=(0, 1.2 * max([1.0, *rates]))
    )
    over_time.legend(loc="upper center", ncols=2, frameon=False)
    names = [str(step.connections) for step in report.steps]
    colors = ["tab:green" if step.connections == report.best_connections else "tab:blue" for step in report.steps]
    bars = by_number.bar(names, [step.bits_per_s / 1e6 for step in report.steps], color=colors)
    by_number.bar_label(bars, fmt="%.0f", fontsize=8)
    by_number.set(xlabel="connections (green: best)", title="goodput")
    for axes in (over_time, by_number):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report.source} → {report.target}, round trip {report.rtt_ms:.1f} ms")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be drawn: {error}") from error


def _steps(report: LinkReport) -> Table:
    table = _table("Goodput by number of connections", "connections", "Mbit/s", "resent", "round trip", "")
    for step in report.steps:
        table.add_row(
            str(step.connections),
            f"{step.bits_per_s / 1e6:.1f}",
            f"{step.resent_share:.2%}",
            "unknown" if step.rtt_ms is None else f"{step.rtt_ms:.1f} ms",
            "best" if step.connections == report.best_connections else "",
            style="bold" if step.connections == report.best_connections else None,
        )
    return table


def _codecs(report: LinkReport) -> Table:
    table = _table("Codecs on one core, GB/s", "codec", "ratio", "encode there", "decode here")
    table.columns[2].header = f"encode at {report.source}"
    table.columns[3].header = f"decode at {report.target}"
    for name, rates in report.codecs_source.items():
        decode = report.codecs_target.get(name)
        table.add_row(
            name,
            f"{rates.ratio:.2f}",
            f"{rates.encode_bytes_per_s / 1e9:.2f}",
            "unknown" if decode is None else f"{decode.decode_bytes_per_s / 1e9:.2f}",
        )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _smooth(values: Sequence[float]) -> list[float]:
    half = _SMOOTHED // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
