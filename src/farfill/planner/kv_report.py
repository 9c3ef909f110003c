"""KV sizes for people: a table, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farfill.planner.kv_size import KVReport
from farfill.planner.plot import figure, save

_KINDS = {
    "full": "full attention",
    "latent": "latent attention",
    "window": "window",
    "state": "recurrent state",
    "conv": "short convolution",
    "both": "attention and state",
    "none": "no cache",
}


def print_kv(console: Console, report: KVReport) -> None:
    """Fits 80 columns."""
    layers = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in report.layers_by_kind.items())
    console.print(Text(f"{report.model} ({report.model_type})", style="bold"))
    console.print(Text(f"layers: {layers}"))
    console.print(Text(f"types: {', '.join(report.dtypes)}"))
    console.print(
        Text(
            f"{report.bytes_per_token:,} bytes per token, and {size_text(report.fixed_bytes)} that do not grow;"
            f" all keys and values of these layers would be {report.dense_bytes_per_token:,} per token"
        )
    )
    # With prefill times, the throughput says more than transfer times do, and 80 columns are all there is.
    links = (10,) if report.prefill_source else (1, 10, 100)
    headings = ["tokens", "KV", "smaller", *(f"{rate} Gbit/s" for rate in links)]
    headings += [f"of {report.tensor_parallel} ranks"] if report.tensor_parallel > 1 else []
    headings += ["prefill", "KV made"] if report.prefill_source else []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        cells = [tokens_text(row.tokens), size_text(row.kv_bytes), f"{row.smaller_by:.1f}×"]
        cells += [seconds_text(row.kv_bytes * 8 / (rate * 1e9)) for rate in links]
        if report.tensor_parallel > 1:
            cells.append(size_text(row.rank_bytes))
        if row.prefill_s is not None and row.gbit_per_s is not None:
            cells += [seconds_text(row.prefill_s), f"{row.gbit_per_s:.2f} Gbit/s"]
        table.add_row(*cells)
    console.print(table)
    if report.prefill_source:
        console.print(Text(f"prefill times: {report.prefill_source}", style="dim"))


def draw_kv(reports: Sequence[KVReport], path: Path) -> None:
    """Size by length, and with prefill times KV throughput beside it. Raises ConfigError without matplotlib."""
    throughput = [report for report in reports if report.prefill_source]
    drawing = figure(2 if throughput else 1)
    sizes = drawing.axes[0]
    for report in reports:
        tokens = [row.tokens for row in report.rows]
        (line,) = sizes.plot(tokens, [row.kv_bytes / 1e6 for row in report.rows], label=report.model)
        dense = [row.dense_bytes / 1e6 for row in report.rows]
        sizes.plot(tokens, dense, "--", color=line.get_color(), alpha=0.4)
    sizes.plot([], [], "--", color="gray", alpha=0.6, label="if all keys and values were kept")
    sizes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="KV, MB", title="Size of one prompt's KV")
    if throughput:
        rates = drawing.axes[1]
        for report in throughput:
            rates.plot([r.tokens for r in report.rows], [r.gbit_per_s for r in report.rows], label=report.model)
        rates.set(xscale="log", xlabel="prompt tokens", ylabel="Gbit/s", title="KV one busy instance makes")
        rates.set_ylim(bottom=0)
    save(drawing, path)


def tokens_text(tokens: int) -> str:
    """Such as 32K."""
    if tokens >= 1 << 20 and tokens % (1 << 20) == 0:
        return f"{tokens >> 20}M"
    return f"{tokens >> 10}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def size_text(nbytes: float) -> str:
    """Such as 12.3 MB (decimal)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """Such as 1.2 s or 34 ms."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
