"""Engine events must reach the event loop complete, in order, from any thread."""

import asyncio
import threading

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.errors import CancelledWorkError, EngineError, FarfillError
from farfill.engine.protocol import PrefillStats, TokenEvent
from farfill.worker.sinks import TokenQueue, TransferSink

STATS = PrefillStats(queued_s=0.1, compute_s=0.2, computed_tokens=3, cached_tokens=4)


def on_engine_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def test_events_from_another_thread_arrive_in_order_then_the_error():
    queue = TokenQueue(asyncio.get_running_loop())

    def engine() -> None:
        queue.prefilled(STATS)
        for token in range(50):
            queue.token(TokenEvent(index=0, token_ids=(token,), text=str(token)))
        queue.failed(EngineError("out of memory"))

    on_engine_thread(engine)
    seen = [event.token_ids[0] for event in await queue.next_events()]
    assert seen == list(range(50))
    assert queue.stats == STATS
    with pytest.raises(EngineError, match="out of memory"):
        await queue.next_events()


async def test_foreign_exception_becomes_a_typed_error():
    queue = TokenQueue(asyncio.get_running_loop())
    on_engine_thread(lambda: queue.failed(ValueError("bad shape")))
    with pytest.raises(FarfillError, match="bad shape") as caught:
        await queue.next_events()
    assert caught.value.reason == "engine_error"


class RecordingTransfer:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def offer(self, pieces) -> None:
        self.calls.append([index for index, _ in pieces])

    def keepalive(self) -> None:
        self.calls.append("keepalive")

    def finish(self) -> None:
        self.calls.append("finish")

    def fail(self, reason: FallbackReason, detail: str) -> None:
        self.calls.append(reason)

    async def wait(self):
        raise AssertionError("not awaited here")


async def test_finished_prefill_is_offered_then_finished():
    transfer = RecordingTransfer()
    sink = TransferSink(transfer, asyncio.get_running_loop())

    def engine() -> None:
        sink.progress()
        sink.pieces_ready([(0, memoryview(b"a")), (1, memoryview(b"b"))])
        sink.finished(STATS)

    on_engine_thread(engine)
    assert await sink.done == STATS
    assert transfer.calls == ["keepalive", [0, 1], "finish"]


async def test_failed_prefill_tells_the_other_side():
    transfer = RecordingTransfer()
    sink = TransferSink(transfer, asyncio.get_running_loop())
    on_engine_thread(lambda: sink.failed(EngineError("nan")))
    with pytest.raises(EngineError, match="nan"):
        await sink.done
    assert transfer.calls == [FallbackReason.PREFILL_FAILED]


async def test_withdrawn_prefill_leaves_the_reason_to_whoever_withdrew_it():
    transfer = RecordingTransfer()
    sink = TransferSink(transfer, asyncio.get_running_loop())
    on_engine_thread(lambda: sink.failed(CancelledWorkError("withdrawn")))
    with pytest.raises(CancelledWorkError):
        await sink.done
    assert transfer.calls == []
