"""Parity results for people (a table and each first divergence) and for programs (one JSON object)."""

from __future__ import annotations

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farfill.verify.client import TokenLogprob
from farfill.verify.parity import Divergence, ParityResult, ParityRow, Verdict

_STYLE = {
    Verdict.EQUAL: "green",
    Verdict.DIFFERS: "bold red",
    Verdict.INVALID: "bold red",
    Verdict.SKIPPED: "yellow",
}


def to_json(result: ParityResult) -> str:
    """One JSON object: `ok` and the rows."""
    return msgspec.json.encode({"ok": result.ok, "rows": result.rows}).decode()


def print_report(console: Console, result: ParityResult) -> None:
    """The table, then what stands behind each row that is not equal, then one line of summary."""
    console.print(_table(result))
    for row in result.rows:
        if row.divergence is not None:
            _print_divergence(console, row, row.divergence)
        elif row.detail:
            console.print(Text(f"{_name(row)}: {row.verdict}: {row.detail}", style=_STYLE[row.verdict]))
    console.print(Text(_summary(result), style="green" if result.ok else "bold red"))


def describe(row: ParityRow) -> str:
    """One line, printed when a row is done."""
    counted = f", {row.equal_tokens} of {row.output_tokens} output tokens" if row.output_tokens else ""
    return f"{_name(row)}: {row.verdict}{counted}"


def _table(result: ParityResult) -> Table:
    """Fits 80 columns."""
    table = Table(
        title="Far prefill against local prefill, token id by token id",
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
        pad_edge=False,
    )
    table.add_column("prompt", overflow="fold")
    for heading in ("tokens", "mode", "equal", "max\n|Δlogprob|", "KV MiB\nraw/wire", "TTFT s\nremote/local"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in result.rows:
        ran = row.output_tokens > 0
        table.add_row(
            row.source,
            str(row.prompt_tokens),
            row.mode,
            f"{row.equal_tokens}/{row.output_tokens}" if ran else "-",
            f"{row.max_logprob_delta:.2g}" if ran else "-",
            f"{_mib(row.kv_raw_bytes)}/{_mib(row.kv_wire_bytes)}" if ran else "-",
            f"{_seconds(row.remote_ttft_s)}/{_seconds(row.local_ttft_s)}" if ran else "-",
            Text(row.verdict, style=_STYLE[row.verdict]),
        )
    return table


def _print_divergence(console: Console, row: ParityRow, divergence: Divergence) -> None:
    console.print(
        Text(
            f"{_name(row)}: first divergence at output token {divergence.position}: "
            f"remote chose {divergence.remote_token}, local {divergence.local_token}",
            style=_STYLE[row.verdict],
        )
    )
    table = Table("rank", "remote token", "logprob", "local token", "logprob")
    for rank in range(max(len(divergence.remote_top), len(divergence.local_top))):
        table.add_row(str(rank + 1), *_entry(divergence.remote_top, rank), *_entry(divergence.local_top, rank))
    console.print(table)


def _summary(result: ParityResult) -> str:
    counts = {verdict: sum(row.verdict is verdict for row in result.rows) for verdict in Verdict}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    if not counts[Verdict.EQUAL] and result.rows:
        told += "; nothing was shown to be equal"
    return f"parity {'holds' if result.ok else 'FAILED'}: {told or 'nothing was compared'}"


def _name(row: ParityRow) -> str:
    return f"{row.source}, {row.prompt_tokens} tokens, {row.mode}"


def _entry(top: tuple[TokenLogprob, ...], rank: int) -> tuple[str | Text, str]:
    if rank >= len(top):
        return "-", "-"
    token, logprob = top[rank]
    return Text(repr(token)), f"{logprob:.6f}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
