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

_OVERLOADED, _UNBOUNDED = "overloaded", "unbounded"
Row = tuple[str, Callable[[Option], str]]


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
    for note in _notes(answer):
        console.print(Text(note, style="dim"))
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
    for title, cell in [*_fleet_rows(answer), *_load_rows(answer)]:
        table.add_row(title, *(cell(option) for option in options))
    return table


def _fleet_rows(answer: Answer) -> list[Row]:
    """What runs, and what it could serve."""
    rows: list[Row] = [
        ("near prefill + decode", lambda o: f"{o.near_prefill} + {o.near_decode}"),
        ("far prefill", lambda o: ", ".join(f"{p.instances} {p.site}" for p in o.far) or "–"),
        ("threshold", lambda o: "–" if o.threshold_tokens is None else f"{o.threshold_tokens:,}"),
        ("goes far", lambda o: f"{o.far_share:.1%}"),
        ("far, near prefill req/s", lambda o: f"{o.far_per_s:.2f}, {o.near_prefill_per_s:.2f}"),
        ("decode req/s", lambda o: f"{o.decode_per_s:.2f}"),
        ("capacity req/s", lambda o: f"{o.capacity_per_s:.2f}"),
        ("bound by", lambda o: o.bound),
    ]
    if answer.ttft_limit_s is not None:
        in_time = f"most req/s with {answer.quantile:.0%} in time"
        rows.append((in_time, lambda o: f"{o.most_goodput_per_s:.2f}"))
    return [*rows, ("price per hour", lambda o: f"{o.price_per_hour:.2f}")]


def _load_rows(answer: Answer) -> list[Row]:
    """What the planned rate asks of it, and what users see then."""
    rows: list[Row] = [("KV demand Gbit/s", lambda o: f"{sum(p.gbit_per_s for p in o.far):.2f}")]
    if _compressed(answer.link):
        rows.append(("on the wire Gbit/s", lambda o: f"{sum(p.wire_gbit_per_s or p.gbit_per_s for p in o.far):.2f}"))
    return [
        *rows,
        ("demand on busiest link", lambda o: f"{max((p.utilisation for p in o.far), default=0.0):.0%}"),
        ("lone request mean, P90", lambda o: _pair(o, o.ttft_unloaded.mean_s, o.ttft_unloaded.p90_s)),
        ("TTFT mean, P50", lambda o: _pair(o, o.ttft_queued.mean_s, o.ttft_queued.p50_s)),
        ("TTFT P90, P99", lambda o: _pair(o, o.ttft_queued.p90_s, o.ttft_queued.p99_s)),
        ("TPOT", lambda o: _OVERLOADED if o.tpot_s is None else seconds_text(o.tpot_s)),
        ("goodput req/s", lambda o: f"{o.goodput_per_s:.2f}"),
        ("price per M tokens", lambda o: _price(o.price_per_million_tokens)),
        ("price per M output", lambda o: _price(o.price_per_million_output_tokens)),
    ]


def _notes(answer: Answer) -> list[str]:
    """What words and figures of the table mean, where they occur."""
    options = [answer.plan, *answer.alternatives]
    notes = [
        f"TTFT at {answer.rate_per_s:.2f} requests/s, gaps between them with a squared coefficient of variation of"
        f" {answer.arrival_scv:.2g} (1: Poisson, more: bursts). Lone request: its first token when there is no other."
    ]
    if any(option.tpot_s is None for option in options):
        notes.append(
            "overloaded: the planned rate is more than the column's capacity, in which links count up to"
            f" {answer.link_utilisation_limit:.0%}."
        )
    if any(_unbounded(option) for option in options):
        notes.append("unbounded: just all that can be served, so queues have no end; plan with headroom.")
    return notes


def _link(study: LinkStudy) -> Table:
    table = Table(title=_link_title(study), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    rates = ("wire Gbit/s", "of KV") if _compressed(study) else ("Gbit/s",)
    for heading in ("links", *rates, "req/s", "threshold", "near", "bound by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in study.cases:
        wire = (f"{case.gbit_per_s * study.wire_share:.2f}",) if _compressed(study) else ()
        table.add_row(
            f"× {case.factor:g}",
            *wire,
            f"{case.gbit_per_s:.2f}",
            f"{case.capacity_per_s:.2f}",
            f"{case.threshold_tokens:,}",
            f"{case.near_prefill} + {case.near_decode}",
            case.bound,
            style="bold" if case.factor == 1 else None,
        )
    return table


def _link_title(study: LinkStudy) -> str:
    def rate(gbit: float) -> str:
        if not _compressed(study):
            return f"{gbit:.2f} Gbit/s"
        return f"{gbit * study.wire_share:.2f} Gbit/s on the wire ({gbit:.2f} of KV)"

    if not study.knee_gbit_per_s:
        return "Links: as much is served without them"
    even = study.break_even_gbit_per_s
    return f"Links: all is served from {rate(study.knee_gbit_per_s)} on" + (
        "" if even is None else f"; below {rate(even)} one site serves more for the money"
    )


def _compressed(study: LinkStudy | None) -> bool:
    return study is not None and study.wire_share < 1 - 1e-9


def draw_answer(answer: Answer, path: Path) -> None:
    """Capacity by link, and times to first token. Raises ConfigError without matplotlib."""
    drawing = figure(2)
    rates, times = drawing.axes
    if answer.link is not None:
        cases = sorted(answer.link.cases, key=lambda case: case.gbit_per_s)
        share = answer.link.wire_share
        wire = [case.gbit_per_s * share for case in cases]
        rates.plot(wire, [case.capacity_per_s for case in cases], "o-", label="plan's instances")
        if answer.link.knee_gbit_per_s:
            rates.axvline(answer.link.knee_gbit_per_s * share, linestyle=":", color="gray", label="knee")
    for option in answer.alternatives:
        if not option.far:
            rates.axhline(option.capacity_per_s, linestyle="--", alpha=0.5, color="tab:orange")
            rates.annotate(
                option.name, (0.98, option.capacity_per_s), xycoords=("axes fraction", "data"), ha="right", va="bottom"
            )
    rates.set(
        xscale="log", xlabel="all links together, Gbit/s on the wire", ylabel="requests/s", title="What the sites serve"
    )
    rates.set_ylim(bottom=0)
    options = [answer.plan, *answer.alternatives]
    for offset, (name, pick) in enumerate((("of a lone request", _unloaded), ("with queues", _queued))):
        values = [pick(option).p90_s or 0.0 for option in options]
        spots = [i + (offset - 0.5) * 0.38 for i in range(len(options))]
        bars = times.bar(spots, values, 0.36, label=f"P90 {name}")
        labels = [seconds_text(v) if v else _never(o) for o, v in zip(options, values, strict=True)]
        times.bar_label(bars, labels, fontsize=8)
    times.set_xticks(range(len(options)), [option.name for option in options], fontsize=8)
    times.set(ylabel="seconds", title=f"Time to first token at {answer.rate_per_s:.2f} requests/s")
    save(drawing, path)


def _unloaded(option: Option) -> Latency:
    return option.ttft_unloaded


def _queued(option: Option) -> Latency:
    return option.ttft_queued


def _pair(option: Option, first: float | None, second: float | None) -> str:
    if first is None or second is None:
        return _never(option)
    return f"{seconds_text(first)}, {seconds_text(second)}"


def _never(option: Option) -> str:
    return _OVERLOADED if option.tpot_s is None else _UNBOUNDED


def _unbounded(option: Option) -> bool:
    return option.tpot_s is not None and option.ttft_queued.mean_s is None


def _price(value: float | None) -> str:
    return _OVERLOADED if value is None else f"{value:.3f}"
