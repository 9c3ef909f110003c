"""What happened to a request, for people: where it was prefilled and why, what moved, what it cost."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from farfill.cli.demo import DemoAnswer
from farfill.gateway.records import RequestRecord


def report(answer: DemoAnswer) -> RenderableType:
    """A panel; the border is green when the prompt was served as placed."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in _rows(answer.record):
        table.add_row(label, value)
    good = answer.as_placed
    title = f"{answer.prompt.title} · {'as placed' if good else 'NOT as placed'}"
    text = Text(answer.text.strip() or "(no text)", style="italic")
    return Panel(Group(table, Text(), text), title=title, border_style="green" if good else "red", title_align="left")


def _rows(record: RequestRecord) -> list[tuple[str, str]]:
    rows = [("prompt", f"{_count(record.prompt_tokens)} tokens, {_count(record.cached_tokens)} of them cached")]
    rows.append(("prefilled", f"{_where(record)}: {_why(record)}"))
    if record.outcome != "ok":
        rows.append(("outcome", record.outcome))
    if record.fallback != "none":
        detail = f" ({record.fallback_detail})" if record.fallback_detail else ""
        rows.append(("fallback", f"{record.fallback}{detail}"))
    if record.prefill is not None:
        rows += _far_rows(record)
    elif record.start is not None:
        computed = _count(record.start.computed_tokens)
        rows.append(("prefill", f"{_seconds(record.start.prefill_s)} for {computed} tokens"))
        rows.append(("KV moved", "none"))
    rows.append(("TTFT", _seconds(record.ttft_s)))
    tpot = "one token only" if record.tpot_s is None else f"{record.tpot_s * 1000:.1f} ms"
    rows.append(("TPOT", f"{tpot}, {_count(record.completion_tokens)} tokens"))
    return rows


def _far_rows(record: RequestRecord) -> list[tuple[str, str]]:
    far = record.prefill
    assert far is not None, "only called with a far prefill"
    hidden_s = max(0.0, far.transfer_s - far.after_prefill_s)
    share = hidden_s / far.transfer_s if far.transfer_s > 0 else 0.0
    ratio = far.raw_bytes / far.wire_bytes if far.wire_bytes else 1.0
    resent = f", {far.resent_chunks} sent again" if far.resent_chunks else ""
    return [
        ("prefill", f"{_seconds(far.prefill_s)} for {_count(far.computed_tokens)} tokens"),
        ("KV raw", _megabytes(far.raw_bytes)),
        ("KV on the wire", f"{_megabytes(far.wire_bytes)} ({far.codec}, {ratio:.2f}x, {far.chunks} chunks{resent})"),
        ("transfer", f"{_seconds(far.transfer_s)}, of these {_seconds(hidden_s)} ({share:.0%}) hidden behind prefill"),
    ]


def _where(record: RequestRecord) -> str:
    if record.placement == "remote":
        return f"at site {record.prefill_site} by {record.prefill_instance}"
    return f"at site {record.decode_site} by {record.decode_instance}"


def _why(record: RequestRecord) -> str:
    # Of a short prompt the gateway knew a bound only (ADR 0024); the worker has counted since.
    uncached = _count(min(record.uncached_tokens, record.prompt_tokens or record.uncached_tokens))
    threshold = _count(record.threshold_tokens)
    comparison = {"above_threshold": "at or above", "below_threshold": "below"}.get(record.reason)
    if comparison is None:
        return record.reason
    return f"{uncached} uncached tokens are {comparison} the threshold of {threshold} ({record.reason})"


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} s"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
