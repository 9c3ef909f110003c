"""Ending a wait for KV from the gateway's side."""

from farfill.core.cluster import FallbackReason
from farfill.worker.pending import MAX_EARLY_FAILURES, PendingTransfers


class RecordingTransfer:
    def __init__(self) -> None:
        self.failures: list[tuple[FallbackReason, str]] = []

    async def wait(self):
        raise AssertionError("not awaited here")

    def fail(self, reason: FallbackReason, detail: str) -> None:
        self.failures.append((reason, detail))


def test_failure_while_waiting_ends_that_wait_alone():
    pending = PendingTransfers()
    one, other = RecordingTransfer(), RecordingTransfer()
    with pending.waiting("one", one), pending.waiting("other", other):
        assert pending.fail("one", FallbackReason.PREFILL_LOST, "gone")
        assert len(pending) == 2
    assert one.failures == [(FallbackReason.PREFILL_LOST, "gone")]
    assert other.failures == []
    assert len(pending) == 0


def test_failure_told_before_the_wait_ends_it_at_once_and_only_once():
    pending = PendingTransfers()
    assert not pending.fail("early", FallbackReason.PREFILL_UNREACHABLE, "refused")
    first, second = RecordingTransfer(), RecordingTransfer()
    with pending.waiting("early", first):
        assert first.failures == [(FallbackReason.PREFILL_UNREACHABLE, "refused")]
    with pending.waiting("early", second):
        assert second.failures == []


def test_early_failures_are_bounded_and_the_oldest_goes_first():
    pending = PendingTransfers()
    for i in range(MAX_EARLY_FAILURES + 1):
        pending.fail(str(i), FallbackReason.PREFILL_LOST, "")
    oldest, newest = RecordingTransfer(), RecordingTransfer()
    with pending.waiting("0", oldest), pending.waiting(str(MAX_EARLY_FAILURES), newest):
        assert oldest.failures == []
        assert len(newest.failures) == 1


def test_wait_that_raises_is_forgotten():
    pending = PendingTransfers()
    try:
        with pending.waiting("x", RecordingTransfer()):
            raise RuntimeError("boom")
    except RuntimeError:
        pass
    assert len(pending) == 0
