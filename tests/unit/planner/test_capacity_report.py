"""What a plan prints: columns that can be compared, and rates that say whether they are of KV or of the wire."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from farfill.planner.answer import Answer
from farfill.planner.capacity_report import print_answer
from unit.planner.test_verdict import answer


def told(found: Answer) -> str:
    text = io.StringIO()
    print_answer(Console(file=text, width=200), found)
    return text.getvalue()


@pytest.mark.parametrize(
    "given",
    [
        {"gbit": 30},  # all far is over 70 % of the link, but not over all of it
        {"gbit": 5},  # and here over all of it
        {"gbit": 30, "ttft": ", ttft_s: 5"},
        {"demand": "arrival_scv: 2"},
        {"price": 50},
    ],
)
def test_all_columns_go_by_the_same_rules(tmp_path: Path, given: dict[str, object]) -> None:
    found = answer(tmp_path, **given)
    for option in [found.plan, *found.alternatives]:
        overloaded = option.rate_per_s > option.capacity_per_s * (1 + 1e-6)
        assert (option.tpot_s is None) == overloaded, option.name
        assert (option.price_per_million_tokens is None) == overloaded
        assert option.goodput_per_s <= min(option.rate_per_s, option.capacity_per_s) * (1 + 1e-6)
        if overloaded:
            assert option.ttft_queued.mean_s is option.ttft_queued.p99_s is None
            assert option.goodput_per_s == 0


def test_an_overloaded_column_says_so_in_every_row_under_load(tmp_path: Path) -> None:
    found = answer(tmp_path, gbit=30)
    names = [option.name for option in [found.plan, *found.alternatives]]
    far = next(option for option in found.alternatives if option.name == "all prefill far")
    assert found.rate_per_s > far.capacity_per_s
    assert far.far[0].utilisation > 0.7
    titles = ("TTFT mean", "TTFT P90", "TPOT", "price per M tokens", "price per M output")
    rows = [line for line in told(found).splitlines() if line.strip().startswith(titles)]
    assert len(rows) == len(titles)
    column = names.index("all prefill far") + 1
    assert [re.split(r"\s{2,}", row.strip())[column] for row in rows] == ["overloaded"] * len(titles)
    assert "in which links count up to 70%" in told(found)


def test_one_site_meets_the_same_limit_of_ttft(tmp_path: Path) -> None:
    found = answer(tmp_path, ttft=", ttft_s: 2.05, quantile: 0.99")
    alone = next(option for option in found.alternatives if option.name == "one site")
    assert found.plan.goodput_per_s >= 0.99 * 10 * 0.999
    assert alone.goodput_per_s >= 0.99 * 10 * 0.999
    unhurried = next(option for option in answer(tmp_path).alternatives if option.name == "one site")
    assert alone.price_per_hour > unhurried.price_per_hour


def test_compressed_links_are_told_on_the_wire_and_of_kv(tmp_path: Path) -> None:
    found = answer(tmp_path, gbit=40)
    assert found.link is not None
    assert found.link.wire_share == pytest.approx(0.5)
    assert next(case for case in found.link.cases if case.factor == 1).gbit_per_s == pytest.approx(80)
    part = found.plan.far[0]
    assert part.wire_gbit_per_s == pytest.approx(part.gbit_per_s / 2)
    text = told(found)
    assert "on the wire Gbit/s" in text
    assert "wire Gbit/s" in text
    assert f"{found.link.knee_gbit_per_s / 2:.2f} Gbit/s on the wire ({found.link.knee_gbit_per_s:.2f} of KV)" in text
    assert "   40.00" in text


def test_demand_on_a_link_is_not_called_its_use(tmp_path: Path) -> None:
    text = told(answer(tmp_path, gbit=5))
    assert "demand on busiest link" in text
    assert "KV demand Gbit/s" in text


def test_all_that_can_be_served_without_headroom_has_queues_without_end(tmp_path: Path) -> None:
    found = answer(tmp_path, demand="arrival_scv: 1\nplanning: {headroom: 0}")
    assert found.rate_per_s == pytest.approx(found.plan.capacity_per_s)
    assert found.plan.goodput_per_s == pytest.approx(found.rate_per_s)
    text = told(found)
    assert "unbounded" in text
    assert "plan with headroom" in text


def test_the_arrivals_that_times_are_predicted_for_are_told(tmp_path: Path) -> None:
    assert "squared coefficient of variation of 2.5 (1: Poisson" in told(
        answer(tmp_path, demand="requests_per_s: 10\n  arrival_scv: 2.5")
    )
