"""Reading metrics, and what counts as idle."""

from __future__ import annotations

import pytest

from farfill.core.errors import UnavailableError
from farfill.engine.protocol import EngineLoad
from farfill.telemetry.metrics import WorkerMetrics, exposition
from farfill.verify.scrape import Samples, is_idle, parse_samples, wait_until

IDLE = {
    "queued_tokens": 0,
    "running_sequences": 0,
    "waiting_sequences": 0,
    "kv_used_bytes": 0,
    "prefix_cache_bytes": 64,
}


def _samples(held: int = 0, **load: int) -> Samples:
    metrics = WorkerMetrics(site="near", role="decode", model="tiny")
    metrics.set_load(EngineLoad(**{**IDLE, **load}))
    metrics.set_held_transfers(held)
    metrics.request_finished("ok")
    metrics.fallback("link_lost")
    return parse_samples(exposition(metrics.registry)[0].decode())


def test_total_sums_the_samples_with_the_labels_asked_for() -> None:
    samples = _samples()
    assert samples.total("farfill_worker_fallbacks_total", reason="link_lost") == 1
    assert samples.total("farfill_worker_fallbacks_total", reason="checksum") == 0
    assert samples.total("farfill_worker_fallbacks_total") == 1
    assert samples.has("farfill_worker_requests_total")
    assert not samples.has("farfill_no_such_total")


def test_is_idle_with_only_the_prefix_cache_held() -> None:
    assert is_idle(_samples())


@pytest.mark.parametrize(
    "busy",
    [{"held": 1}, {"queued_tokens": 5}, {"running_sequences": 1}, {"waiting_sequences": 1}, {"kv_used_bytes": 1}],
)
def test_is_idle_is_false_while_anything_is_held(busy: dict[str, int]) -> None:
    assert not is_idle(_samples(**busy))


async def test_wait_until_polls_until_true_and_names_what_never_came() -> None:
    answers = iter([False, False, True])
    await wait_until(lambda: next(answers), "the third answer", 5.0)
    with pytest.raises(UnavailableError, match="what never comes"):
        await wait_until(lambda: False, "what never comes", 0.0)
