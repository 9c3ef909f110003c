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
from farfill.verify.link_baseline import MIN_SECONDS, Change, check_writable
from farfill.verify.link_confirmed import WINDOW_S

_SMOOTHED = 5
_NEEDS_MATPLOTLIB = "--plot needs matplotlib: pip install 'farfill[plot]'"


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


def print_changes(console: Console, changes: Sequence[Change], too_short: str = "") -> None:
    """The link against its baseline, and the verdict. `too_short`: see `link_baseline`."""
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
    for change in changes:
        if change.is_swinging:
            console.print(
                f"The tolerance of {change.tolerance.title} is how much it swung within a measurement:"
                f" {change.spread:.2f} {change.tolerance.unit} (interquartile range of {WINDOW_S:g} s windows)."
            )
    if too_short:
        console.print(
            Text(
                f"Too short for a sound verdict: {too_short}; measure with --seconds {MIN_SECONDS:g} or more.",
                style="yellow",
            )
        )
    changed = [change.tolerance.title for change in changes if change.is_change]
    if changed:
        console.print(Text(f"The link changed: {', '.join(changed)}.", style="bold red"))
    else:
        console.print(Text("The link is as it was.", style="green"))


def check_drawable(path: Path) -> None:
    """Whether `draw` can draw there. Raises ConfigError."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ConfigError(_NEEDS_MATPLOTLIB) from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower()
    if kind and kind not in kinds:
        raise ConfigError(f"{path}: cannot be drawn: no image of a known kind; one of {', '.join(sorted(kinds))}")
    check_writable(path if kind else path.with_name(path.name + ".png"))


def draw(report: LinkReport, path: Path) -> None:
    """Goodput over time and by number of connections, as an image. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(_NEEDS_MATPLOTLIB) from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    over_time, by_number = figure.subplots(1, 2, width_ratios=(2, 1), sharey=True)
    times = [time_s for time_s, _ in report.samples]
    rates = [rate / 1e6 for _, rate in report.samples]
    over_time.plot(times, rates, color="0.8", linewidth=0.8, label="every 0.1 s")
    over_time.plot(times, _smooth(rates), color="tab:blue", label="mean of 0.5 s")
    over_time.set(
        xlabel="seconds",
        ylabel="Mbit/s",
        title="confirmed, step by step",
        ylim=(0, 1.2 * max([1.0, *rates])),
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
