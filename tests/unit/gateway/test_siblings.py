"""Metrics of several processes as one exposition."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from farfill.gateway.siblings import SUPERVISOR, UP, Siblings, merged
from farfill.telemetry.metrics.families import exposition


def told(value: float) -> tuple[bytes, str]:
    registry = CollectorRegistry()
    Counter("farfill_things", "Things.", ["text"], registry=registry).labels(text='a{b} "c" 1').inc(value)
    Gauge("farfill_plain", "Without labels.", registry=registry).set(value)
    Histogram("farfill_seconds", "Times.", buckets=(1.0,), registry=registry).observe(value)
    return exposition(registry)


def samples(text: str) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                key = (sample.name, sample.labels["process"])
                assert key not in found
                found[key] = sample.value
    return found


def test_each_sample_is_labelled_and_each_family_told_once():
    text = merged([("0", told(2)[0].decode()), ("1", told(3)[0].decode())])
    assert text.count("# TYPE farfill_plain gauge") == 1
    found = samples(text)
    assert found["farfill_things_total", "0"] == 2
    assert found["farfill_things_total", "1"] == 3
    assert found["farfill_plain", "1"] == 3
    assert found["farfill_seconds_sum", "0"] == 2
    (label,) = {
        s.labels["text"] for f in text_string_to_metric_families(text) for s in f.samples if f.name == "farfill_things"
    }
    assert label == 'a{b} "c" 1'


async def test_whichever_is_asked_tells_all_and_who_does_not_answer(tmp_path: Path):
    first = Siblings(tmp_path, 0, 3, lambda: told(2))
    second = Siblings(tmp_path, 1, 3, lambda: told(3))
    (tmp_path / SUPERVISOR).write_bytes(told(7)[0])
    async with first.listening(), second.listening():
        for asked in (first, second):
            found = samples((await asked.metrics())[0].decode())
            assert {found["farfill_plain", name] for name in ("0", "1", SUPERVISOR)} == {2, 3, 7}
            assert [found[UP, str(i)] for i in range(3)] == [1, 1, 0]
