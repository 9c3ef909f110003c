"""A capacity plan for people: tables, and plots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farfill.planner.answer import Answer, Latency, LinkStudy, Option
from farfill.planner.kv_report import seconds_text
from farfill.planner.plot import figure, save

_NEVER = "overloaded"


def print_answer(console: Console, answer: Answer) -> None:
    """The plan, the alternatives beside it, the link, and the verdict."""
    console.print(Text(f"{answer.model}: {answer.workload}", style="bold"))
    console.print(
        Text(
            f"{answer.mean_uncached_tokens:,.0f} tokens to prefill and {answer.mean_output_tokens:,.0f} to make per"
            f" request, on average; planned for {answer.rate_per_s:.2f} requests/s"
            + ("" if answer.demand_per_s else f", all the sites can with {answer.headroom:.0%} headroom")
        )
    )
    console.print(_options(answer))
    if answer.link is not None:
        console.print(_link(answer.link))
    for name, source in answer.sources.items():
        console.print(Text(f"{name}: {source}", style="dim"))
    for warning in answer.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    console.print(Text(answer.verdict, style="bold green" if answer.pays else "bold yellow"))


def _options(answer: Answer) -> Table:
    options = [answer.plan, *answer.alternatives]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for option in options:
        table.add_column(option.name, justify="right")
    rows: list[tuple[str, Callable[[Option], str]]] = [
        ("near prefill + decode", lambda o: f"{o.near_prefill} + {o.near_decode}"),
        ("far prefill", lambda o: ", ".join(f"{p.instances} {p.site}" for p in o.far) or "–"),
        ("threshold", lambda o: "–" if o.threshold_tokens is None else f"{o.threshold_tokens:,}"),
        ("goes far", lambda o: f"{o.far_share:.1%}"),
        ("far, near prefill req/s", lambda o: f"{o.far_per_s:.2f}, {o.near_prefill_per_s:.2f}"),
        ("decode req/s", lambda o: f"{o.decode_per_s:.2f}"),
        ("capacity req/s", lambda o: f"{o.capacity_per_s:.2f}"),
        ("bound by", lambda o: o.bound),
        ("KV Gbit/s", lambda o: f"{sum(p.gbit_per_s for p in o.far):.2f}"),
        ("busiest link", lambda o: f"{max((p.utilisation for p in o.far), default=0.0):.0%}"),
        ("TTFT idle mean, P90", lambda o: _pair(o.ttft_unloaded.mean_s, o.ttft_unloaded.p90_s)),
        ("TTFT mean, P50", lambda o: _pair(o.ttft_queued.mean_s, o.ttft_queued.p50_s)),
        ("TTFT P90, P99", lambda o: _pair(o.ttft_queued.p90_s, o.ttft_queued.p99_s)),
        ("TPOT", lambda o: _time(o.tpot_s)),
        ("goodput req/s", lambda o: f"{o.goodput_per_s:.2f}"),
        ("most goodput req/s", lambda o: f"{o.most_goodput_per_s:.2f}"),
        ("price per hour", lambda o: f"{o.price_per_hour:.2f}"),
        ("price per M tokens", lambda o: _price(o.price_per_million_tokens)),
        ("price per M output", lambda o: _price(o.price_per_million_output_tokens)),
    ]
    for title, cell in rows:
        table.add_row(title, *(cell(option) for option in options))
    return table


def _link(study: LinkStudy) -> Table:
    even = study.break_even_gbit_per_s
    title = f"Links: all is served from {study.knee_gbit_per_s:.2f} Gbit/s on" + (
        "" if even is None else f"; below {even:.2f} Gbit/s one site serves more for the money"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("links", "Gbit/s", "req/s", "threshold", "near", "bound by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in study.cases:
        table.add_row(
            f"× {case.factor:g}",
            f"{case.gbit_per_s:.2f}",
            f"{case.capacity_per_s:.2f}",
            f"{case.threshold_tokens:,}",
            f"{case.near_prefill} + {case.near_decode}",
            case.bound,
            style="bold" if case.factor == 1 else None,
        )
    return table


def draw_answer(answer: Answer, path: Path) -> None:
    """Capacity by link, and times to first token. Raises ConfigError without matplotlib."""
    drawing = figure(2)
    rates, times = drawing.axes
    if answer.link is not None:
        cases = sorted(answer.link.cases, key=lambda case: case.gbit_per_s)
        rates.plot([c.gbit_per_s for c in cases], [c.capacity_per_s for c in cases], "o-", label="plan's instances")
        rates.axvline(answer.link.knee_gbit_per_s, linestyle=":", color="gray", label="knee")
    for option in answer.alternatives:
        if not option.far:
            rates.axhline(option.capacity_per_s, linestyle="--", alpha=0.5, color="tab:orange")
            rates.annotate(
                option.name, (0.98, option.capacity_per_s), xycoords=("axes fraction", "data"), ha="right", va="bottom"
            )
    rates.set(xscale="log", xlabel="all links together, Gbit/s", ylabel="requests/s", title="What the sites serve")
    rates.set_ylim(bottom=0)
    options = [answer.plan, *answer.alternatives]
    for offset, (name, pick) in enumerate((("unloaded", _unloaded), ("queued", _queued))):
        values = [pick(option).p90_s or 0.0 for option in options]
        spots = [i + (offset - 0.5) * 0.38 for i in range(len(options))]
        bars = times.bar(spots, values, 0.36, label=f"P90 {name}")
        times.bar_label(bars, [seconds_text(value) if value else _NEVER for value in values], fontsize=8)
    times.set_xticks(range(len(options)), [option.name for option in options], fontsize=8)
    times.set(ylabel="seconds", title=f"Time to first token at {answer.rate_per_s:.2f} requests/s")
    save(drawing, path)


def _unloaded(option: Option) -> Latency:
    return option.ttft_unloaded


def _queued(option: Option) -> Latency:
    return option.ttft_queued


def _time(seconds: float | None) -> str:
    return _NEVER if seconds is None else seconds_text(seconds)


def _pair(first: float | None, second: float | None) -> str:
    return _NEVER if first is None else f"{_time(first)}, {_time(second)}"


def _price(value: float | None) -> str:
    return _NEVER if value is None else f"{value:.3f}"
