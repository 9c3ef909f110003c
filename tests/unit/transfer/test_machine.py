"""Single situations of the sender and the receiver machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.kv.manifest import build_manifest
from farfill.transfer.events import (
    Accept,
    Accepted,
    Ack,
    Acked,
    ChunkAborted,
    ChunkBegun,
    ChunkLanded,
    ChunksReady,
    Confirmed,
    ConnectionLost,
    Control,
    ControlSent,
    DropChunk,
    Ended,
    Failed,
    Finished,
    Heard,
    LinkDown,
    LinkUp,
    Nack,
    Nacked,
    Offered,
    Opened,
    PeerCompleted,
    PeerFailed,
    Pull,
    Resent,
    Resumed,
    RevokeClaim,
    SendChunk,
    SendComplete,
    SendControl,
    SendFail,
    Tick,
    TransferLimits,
    WriteChunk,
)
from farfill.transfer.receiver_machine import TRICKLE_PATIENCE, ReceiverMachine
from farfill.transfer.sender_machine import EARLY_REFUSED, SenderMachine

LAYOUT = KVLayout((TensorLayout(0, "k", TensorKind.FULL, "float32", (256, 128)),), prefill_chunk_tokens=1)
MANIFEST = build_manifest(LAYOUT, 3)
LIMITS = TransferLimits(timeout_s=4.0, grace_s=1.0, open_grace_s=0.5, retry=2, keepalive_s=0.5)
CHUNK = 128 * 1024
NONE_HELD = b"\0"
BOTH = frozenset({0, 1})


def sending(offered: tuple[int, ...] = (0, 1, 2)) -> SenderMachine:
    machine = SenderMachine(MANIFEST, LIMITS, 0.0)
    machine.begin()
    machine.handle(Accepted(CHUNK, NONE_HELD), 0.0)
    machine.handle(Offered(offered), 0.0)
    return machine


def receiving(held: frozenset[int] = frozenset()) -> ReceiverMachine:
    machine = ReceiverMachine(MANIFEST, held, LIMITS, 1 << 20, 0.0)
    machine.begin()
    machine.handle(Opened(CHUNK), 0.0)
    return machine


class TestSender:
    def test_nothing_is_pulled_before_accept(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        assert machine.begin() == [SendControl(Control.OPEN)]
        assert machine.handle(Offered((0,)), 0.0) == []
        assert machine.handle(Pull(0), 0.0) == []
        assert ChunksReady() in machine.handle(Accepted(CHUNK, NONE_HELD), 0.1)
        assert machine.handle(Pull(0), 0.1) == [SendChunk(0, 0)]

    def test_granted_chunks_leave_before_accept_and_only_where_granted(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        machine.begin(CHUNK, CHUNK)
        assert ChunksReady() in machine.handle(Offered((0, 1, 2)), 0.0)
        assert machine.handle(Pull(0), 0.0) == [], "this connection has no grant"
        assert machine.handle(Pull(0, early=True), 0.0) == [SendChunk(0, 0, early=True)]
        assert machine.handle(Pull(1, early=True), 0.0) == [], "the grant is used up"
        assert machine.handle(Accepted(CHUNK, NONE_HELD), 0.1)
        assert machine.handle(Pull(1, early=True), 0.1) == [SendChunk(1, 0)]
        assert machine.inflight == 2, "the early one is not sent again"

    def test_refused_early_chunk_waits_for_accept_and_is_no_failure(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        machine.begin(CHUNK, 10 * CHUNK)
        machine.handle(Offered((0, 1, 2)), 0.0)
        assert machine.handle(Pull(0, early=True), 0.0) == [SendChunk(0, 0, early=True)]
        assert machine.handle(Nacked(0, 0, EARLY_REFUSED), 0.0) == [Resent(0, EARLY_REFUSED)]
        assert machine.handle(Pull(0, early=True), 0.0) == []
        machine.handle(Accepted(CHUNK, NONE_HELD), 0.1)
        assert machine.handle(Pull(0), 0.1) == [SendChunk(0, 1)]
        for attempt in range(1, LIMITS.retry + 1):
            machine.handle(Nacked(0, attempt, EARLY_REFUSED), 0.1)
            assert machine.handle(Pull(0), 0.1) == [SendChunk(0, attempt + 1)]
        assert isinstance(machine.handle(Nacked(0, LIMITS.retry + 1, EARLY_REFUSED), 0.1)[-1], Ended), "not for ever"

    def test_early_chunks_of_a_lost_connection_are_asked_for_after_accept(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        machine.begin(CHUNK, 10 * CHUNK)
        machine.handle(ControlSent(Control.OPEN, 0), 0.0)
        machine.handle(Offered((0, 1, 2)), 0.0)
        machine.handle(Pull(1, early=True), 0.0)
        assert machine.handle(ConnectionLost(1), 0.0) == [], "the receiver may not know the transfer yet"
        assert SendControl(Control.RESUME) in machine.handle(Accepted(CHUNK, NONE_HELD), 0.1)
        assert Confirmed(0) in machine.handle(Accepted(CHUNK, b"\1"), 0.2)

    def test_other_cut_than_proposed_starts_afresh(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        machine.begin(2 * CHUNK, 10 * CHUNK)
        machine.handle(Offered((0, 1, 2)), 0.0)
        machine.handle(Pull(0, early=True), 0.0)
        assert Resent(0, "recut") in machine.handle(Accepted(CHUNK, NONE_HELD), 0.1)
        assert machine.handle(Nacked(0, 0, EARLY_REFUSED), 0.1) == [], "of the cut before"
        assert machine.handle(Pull(0), 0.1) == [SendChunk(0, 1)]

    def test_held_chunks_are_skipped(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        machine.handle(Offered((0, 1, 2)), 0.0)
        machine.handle(Accepted(CHUNK, b"\x05"), 0.0)
        assert machine.handle(Pull(0), 0.0) == [SendChunk(1, 0)]
        assert machine.handle(Pull(0), 0.0) == []

    def test_finish_follows_the_last_chunk_and_needs_a_complete_set(self) -> None:
        machine = sending()
        machine.handle(Finished(), 0.0)
        assert machine.handle(Pull(0), 0.0) == [SendChunk(0, 0)]
        machine.handle(Pull(0), 0.0)
        assert machine.handle(Pull(1), 0.0) == [SendChunk(2, 0), SendControl(Control.FINISH)]
        incomplete = sending((0, 2))
        effects = incomplete.handle(Finished(), 0.0)
        assert effects[-1] == Ended(FallbackReason.PROTOCOL, "prefill ended with 1 pieces missing")

    def test_piece_outside_the_manifest_ends_it(self) -> None:
        assert sending().handle(Offered((3,)), 0.0)[-1] == Ended(
            FallbackReason.PROTOCOL, "piece 3 is not in the manifest"
        )

    def test_lost_connection_costs_only_what_it_carried_and_did_not_arrive(self) -> None:
        machine = sending()
        for connection in (0, 1, 0):
            machine.handle(Pull(connection), 0.0)
        assert machine.handle(ConnectionLost(0), 0.0) == [SendControl(Control.RESUME)]
        assert machine.handle(Pull(1), 0.0) == [], "first the receiver says what it holds"
        assert machine.handle(Accepted(CHUNK, b"\x01"), 0.1) == [
            Confirmed(0),
            Resent(2, "connection_lost"),
            ChunksReady(),
        ]
        assert machine.handle(Pull(1), 0.1) == [SendChunk(2, 1)]
        assert machine.inflight == 2

    def test_lost_connection_repeats_what_was_not_answered(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        machine.begin()
        machine.handle(ControlSent(Control.OPEN, 1), 0.0)
        assert machine.handle(ConnectionLost(0), 0.0) == []
        assert machine.handle(ConnectionLost(1), 0.0) == [SendControl(Control.OPEN)]
        machine = sending()
        machine.handle(ControlSent(Control.OPEN, 1), 0.0)
        machine.handle(ControlSent(Control.FINISH, 1), 0.0)
        assert machine.handle(ConnectionLost(1), 0.0) == [SendControl(Control.FINISH)]
        machine.handle(Pull(0), 0.0)
        assert machine.handle(ConnectionLost(0), 0.0) == [SendControl(Control.RESUME)]
        machine.handle(ControlSent(Control.RESUME, 2), 0.0)
        assert machine.handle(ConnectionLost(2), 0.0) == [SendControl(Control.RESUME)]
        machine.handle(ControlSent(Control.RESUME, 3), 0.0)
        machine.handle(Accepted(CHUNK, NONE_HELD), 0.0)
        assert machine.handle(ConnectionLost(3), 0.0) == []

    def test_finish_waits_until_doubtful_chunks_are_settled(self) -> None:
        machine = sending()
        for _ in range(3):
            machine.handle(Pull(0), 0.0)
        machine.handle(ConnectionLost(0), 0.0)
        assert machine.handle(Finished(), 0.0) == []
        assert machine.handle(Accepted(CHUNK, b"\x07"), 0.1)[-1] == SendControl(Control.FINISH)

    def test_receiver_that_never_says_what_it_holds_times_out(self) -> None:
        machine = sending()
        machine.handle(Pull(0), 0.0)
        machine.handle(ConnectionLost(0), 1.0)
        machine.handle(Tick(), 4.9)
        assert machine.ended is None
        machine.handle(Tick(), 5.0)
        assert machine.ended == Ended(FallbackReason.TRANSFER_TIMEOUT, "not confirmed in 4 s")

    def test_idle_connection_takes_over_what_is_stuck_on_another(self) -> None:
        machine = sending()
        for connection in (0, 0, 1):
            machine.handle(Pull(connection, 1.0), 0.0)
        assert machine.handle(Pull(1, 1.0, stuck=BOTH), 0.9) == []
        assert machine.overdue_on(1, 0.9) == frozenset()
        assert machine.overdue_on(1, 1.0) == {0}
        assert machine.overdue_on(0, 1.0) == {1}
        assert machine.handle(Pull(1, 1.0, stuck=frozenset({1})), 1.0) == [], "slow, but not stuck"
        assert machine.handle(Pull(1, 1.0, stuck=BOTH), 1.0) == [Resent(0, "overdue"), SendChunk(0, 1)]
        assert machine.handle(Pull(0, 1.0, stuck=BOTH), 1.0) == [Resent(2, "overdue"), SendChunk(2, 1)], "not its own"
        machine.handle(Accepted(CHUNK, NONE_HELD), 1.0)
        assert machine.handle(ConnectionLost(0), 1.0) == [SendControl(Control.RESUME)]
        assert machine.handle(Accepted(CHUNK, NONE_HELD), 1.0) == [
            Resent(2, "connection_lost"),
            Resent(1, "connection_lost"),
            ChunksReady(),
        ]

    def test_chunk_is_taken_over_a_bounded_number_of_times_and_that_fails_nothing(self) -> None:
        machine = sending((0,))
        machine.handle(Pull(0, 1.0), 0.0)
        everybody = frozenset(range(11))
        taken = [machine.handle(Pull(1 + turn, 1.0, stuck=everybody), 10.0 * (1 + turn)) for turn in range(10)]
        assert sum(bool(effects) for effects in taken) == LIMITS.retry + 1
        assert machine.ended is None

    def test_chunk_that_was_sent_behind_much_else_is_overdue_later(self) -> None:
        machine = sending((0,))
        machine.handle(Pull(0, 9.0), 0.0)
        assert machine.handle(Pull(1, 1.0, unseen=BOTH), 8.9) == []
        assert machine.handle(Pull(1, 1.0, unseen=BOTH), 9.0) == [Resent(0, "overdue"), SendChunk(0, 1)]

    def test_retry_is_bounded_and_the_reason_tells_what_failed(self) -> None:
        machine = sending((0,))
        for attempt in range(2):
            assert machine.handle(Pull(0), 0.0) == [SendChunk(0, attempt)]
            assert machine.handle(Nacked(0, attempt, "checksum"), 0.0) == [Resent(0, "checksum"), ChunksReady()]
        machine.handle(Pull(0), 0.0)
        effects = machine.handle(Nacked(0, 2, "checksum"), 0.0)
        assert [type(effect) for effect in effects] == [SendFail, Ended]
        assert machine.ended is not None
        assert machine.ended.reason is FallbackReason.CHECKSUM

    def test_stale_nack_is_ignored(self) -> None:
        machine = sending((0,))
        assert machine.handle(Nacked(0, 0, "checksum"), 0.0) == []
        machine.handle(Pull(0), 0.0)
        machine.handle(ConnectionLost(0), 0.0)
        machine.handle(Accepted(CHUNK, NONE_HELD), 0.0)
        machine.handle(Pull(1), 0.0)
        assert machine.handle(Nacked(0, 0, "checksum"), 0.0) == []

    def test_deadlines(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        assert machine.handle(Tick(), 3.9) == []
        machine.handle(Tick(), 4.0)
        assert machine.ended == Ended(FallbackReason.TRANSFER_TIMEOUT, "not accepted in 4 s")
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        machine.handle(LinkDown("refused"), 0.1)
        assert machine.handle(Tick(), 0.5) == []
        machine.handle(Tick(), 0.6)
        assert machine.ended == Ended(FallbackReason.LINK_LOST, "refused"), "a peer never reached is given up sooner"
        machine = sending(())
        assert machine.handle(Tick(), 100.0) == [], "prefill may take its time"
        machine.handle(LinkDown("gone"), 100.0)
        machine.handle(LinkUp(), 100.5)
        assert machine.handle(Tick(), 102.0) == []
        machine.handle(LinkDown("gone"), 103.0)
        assert machine.handle(Tick(), 103.9) == []
        machine.handle(Tick(), 104.0)
        assert machine.ended == Ended(FallbackReason.LINK_LOST, "gone")

    def test_unconfirmed_finish_times_out(self) -> None:
        machine = sending()
        machine.handle(Finished(), 0.0)
        for chunk in range(3):
            machine.handle(Pull(0), 1.0)
            machine.handle(Acked(chunk), 1.0)
        assert machine.handle(Tick(), 4.9) == []
        machine.handle(Tick(), 5.0)
        assert machine.ended == Ended(FallbackReason.TRANSFER_TIMEOUT, "not confirmed in 4 s")

    def test_keepalives_are_rate_limited_and_come_by_themselves_while_chunks_wait(self) -> None:
        machine = sending(())
        assert machine.handle(Heard(), 0.4) == []
        assert machine.handle(Heard(), 0.5) == [SendControl(Control.KEEPALIVE)]
        assert machine.handle(Heard(), 0.9) == []
        assert machine.handle(Tick(), 9.0) == [], "an idle prefill must not look alive"
        machine.handle(Offered((0,)), 9.0)
        assert machine.handle(Tick(), 9.0) == [SendControl(Control.KEEPALIVE)]

    def test_nothing_happens_after_the_end(self) -> None:
        machine = sending()
        assert machine.handle(Failed(FallbackReason.PREFILL_FAILED, "x"), 0.0) == [
            SendFail(FallbackReason.PREFILL_FAILED, "x"),
            Ended(FallbackReason.PREFILL_FAILED, "x"),
        ]
        for event in (Pull(0), Tick(), Failed(FallbackReason.PROTOCOL, "y"), ConnectionLost(0)):
            assert machine.handle(event, 99.0) == []

    def test_complete_counts_once_the_receiver_has_accepted(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        machine.begin()
        assert machine.handle(PeerCompleted(), 0.0) == []
        assert machine.ended is None
        machine.handle(Accepted(CHUNK, NONE_HELD), 0.1)
        assert machine.ended is not None
        assert machine.ended.reason is FallbackReason.NONE

    def test_complete_may_come_instead_of_accept(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        machine.begin()
        machine.handle(PeerCompleted(answers_open=True), 0.0)
        assert machine.ended is not None
        assert machine.ended.reason is FallbackReason.NONE

    def test_complete_of_an_earlier_use_does_not_hide_the_refusal(self) -> None:
        machine = SenderMachine(MANIFEST, LIMITS, 0.0)
        machine.begin()
        machine.handle(PeerCompleted(), 0.0)
        machine.handle(PeerFailed(FallbackReason.TICKET_INVALID, "ticket_replayed"), 0.1)
        assert machine.ended is not None
        assert machine.ended.reason is FallbackReason.TICKET_INVALID

    def test_bad_accept_ends_it(self) -> None:
        for accepted in (Accepted(CHUNK + 1, NONE_HELD), Accepted(CHUNK, b"\0\0"), Accepted(CHUNK, b"\xff")):
            machine = SenderMachine(MANIFEST, LIMITS, 0.0)
            assert isinstance(machine.handle(accepted, 0.0)[-1], Ended)


class TestReceiver:
    def test_trickle_is_given_up_by_size_and_measured_rate(self) -> None:
        """Bytes and keepalives come all the time; only the chunk's size and the rate before say that it is too slow."""
        rate = CHUNK / 0.25  # a chunk in a quarter of a second
        limits = replace(LIMITS, rate_bytes_per_s=rate, connections=2)
        patience_s = LIMITS.timeout_s + TRICKLE_PATIENCE * 2 * 0.25
        machine = ReceiverMachine(MANIFEST, frozenset(), limits, 1 << 20, 0.0)
        machine.handle(Opened(CHUNK), 0.0)
        machine.handle(ChunkBegun(0, 0), 1.0)
        machine.handle(ChunkLanded(0, 0, None), 2.0)
        machine.handle(ChunkBegun(1, 1), 2.0)
        for half_s in range(4, 2 * int(2 + patience_s)):
            machine.handle(Heard(), half_s / 2)
            assert machine.handle(Tick(), half_s / 2) == []
        machine.handle(ChunkBegun(1, 2), 6.0)  # another copy is no news
        machine.handle(Heard(), 2.0 + patience_s)
        effects = machine.handle(Tick(), 2.0 + patience_s)
        assert isinstance(effects[-1], Ended)
        assert effects[-1].reason is FallbackReason.TRANSFER_TIMEOUT
        assert machine.prefix_tokens == 1, "what came whole may be used"

    def test_slow_link_without_measured_rate_may_take_its_time(self) -> None:
        machine = receiving()
        machine.handle(ChunkBegun(0, 0), 0.0)
        for second in range(100):
            machine.handle(Heard(), float(second))
            assert machine.handle(Tick(), float(second)) == []

    def test_chunk_whose_connection_broke_is_not_waited_for(self) -> None:
        limits = replace(LIMITS, rate_bytes_per_s=1e9)
        machine = ReceiverMachine(MANIFEST, frozenset(), limits, 1 << 20, 0.0)
        machine.handle(Opened(CHUNK), 0.0)
        machine.handle(ChunkBegun(0, 0), 0.0)
        machine.handle(ChunkAborted(0, 0), 1.0)
        machine.handle(Heard(), 5.0)
        assert machine.handle(Tick(), 5.0) == []

    def test_set_is_complete_when_every_chunk_was_verified(self) -> None:
        machine = receiving()
        for chunk in range(3):
            assert machine.handle(ChunkBegun(chunk, chunk), 0.0) == [WriteChunk()]
        assert machine.handle(ChunkLanded(1, 1, None), 0.0) == [Ack(1)]
        assert machine.handle(ChunkLanded(0, 0, None), 0.0) == [Ack(0)]
        assert machine.prefix_tokens == 2
        assert machine.handle(ChunkLanded(2, 2, None), 0.0) == [Ack(2), SendComplete(), Ended(FallbackReason.NONE, "")]
        assert machine.prefix_tokens == 3

    def test_wrong_chunk_is_asked_for_again(self) -> None:
        machine = receiving()
        machine.handle(ChunkBegun(0, 1), 0.0)
        assert machine.handle(ChunkLanded(0, 1, "checksum"), 0.0) == [Nack(0, "checksum")]
        assert machine.handle(ChunkBegun(0, 2), 0.0) == [WriteChunk()]
        assert machine.handle(ChunkLanded(0, 2, None), 0.0) == [Ack(0)]

    def test_duplicate_is_dropped_and_acknowledged(self) -> None:
        machine = receiving(frozenset({1}))
        assert machine.handle(ChunkBegun(1, 1), 0.0) == [DropChunk("duplicate", acknowledge=True)]

    def test_second_copy_revokes_the_first(self) -> None:
        machine = receiving()
        machine.handle(ChunkBegun(0, 1), 0.0)
        assert machine.handle(ChunkBegun(0, 2), 0.0) == [RevokeClaim(1), WriteChunk()]
        assert machine.handle(ChunkLanded(0, 1, None), 0.0) == [DropChunk("superseded")]
        machine.handle(ChunkAborted(0, 1), 0.0)
        assert machine.handle(ChunkLanded(0, 2, None), 0.0) == [Ack(0)]

    def test_everything_is_fenced_after_the_end(self) -> None:
        machine = receiving()
        machine.handle(ChunkBegun(0, 1), 0.0)
        machine.handle(PeerFailed(FallbackReason.PREFILL_FAILED, "x"), 0.0)
        assert machine.handle(ChunkLanded(0, 1, None), 0.0) == [DropChunk("fenced")]
        assert machine.handle(ChunkBegun(1, 2), 0.0) == [DropChunk("fenced")]
        assert machine.prefix_tokens == 0

    def test_silence_times_out_and_signs_of_life_count(self) -> None:
        machine = ReceiverMachine(MANIFEST, frozenset(), LIMITS, 1 << 20, 0.0)
        machine.handle(Tick(), 4.0)
        assert machine.ended == Ended(FallbackReason.TRANSFER_TIMEOUT, "the sender never opened it in 4 s")
        machine = receiving()
        machine.handle(Heard(), 3.0)
        assert machine.handle(Tick(), 6.9) == []
        machine.handle(Tick(), 7.0)
        assert machine.ended is not None
        assert machine.ended.reason is FallbackReason.TRANSFER_TIMEOUT

    def test_lost_link_ends_it_after_the_grace(self) -> None:
        machine = receiving()
        machine.handle(LinkDown(), 1.0)
        machine.handle(LinkUp(), 1.5)
        machine.handle(LinkDown(), 2.0)
        assert machine.handle(Tick(), 2.9) == []
        machine.handle(Tick(), 3.0)
        assert machine.ended is not None
        assert machine.ended.reason is FallbackReason.LINK_LOST

    def test_silence_of_a_link_that_is_cut_is_a_lost_link(self) -> None:
        machine = receiving()
        machine.handle(LinkDown(), 3.5)
        machine.handle(Tick(), 4.0)
        assert machine.ended is not None
        assert machine.ended.reason is FallbackReason.LINK_LOST

    def test_link_given_up_because_nothing_came_is_silence_whichever_is_noticed_first(self) -> None:
        for noticed_s in (0.5, 3.5):
            machine = receiving()
            machine.handle(LinkDown(silent=True), noticed_s)
            machine.handle(Tick(), noticed_s + 4.0)
            assert machine.ended is not None
            assert machine.ended.reason is FallbackReason.TRANSFER_TIMEOUT

    def test_resume_is_answered_with_what_is_held(self) -> None:
        machine = ReceiverMachine(MANIFEST, frozenset({2}), LIMITS, 1 << 20, 0.0)
        assert machine.handle(Resumed(), 0.0) == []
        machine.handle(Opened(CHUNK), 0.0)
        machine.handle(ChunkBegun(0, 1), 0.0)
        machine.handle(ChunkLanded(0, 1, None), 0.0)
        machine.handle(ChunkBegun(1, 2), 0.0)
        assert machine.handle(Resumed(), 0.0) == [Accept(CHUNK, frozenset({0, 2}))], "half a chunk is not held"

    def test_chunk_size_is_bounded_by_the_receiver(self) -> None:
        machine = ReceiverMachine(MANIFEST, frozenset(), LIMITS, 64 * 1024, 0.0)
        assert machine.handle(Opened(CHUNK), 0.0) == [Accept(64 * 1024, frozenset())]
        assert machine.handle(Opened(CHUNK), 0.0) == [Accept(64 * 1024, frozenset())]

    @pytest.mark.parametrize("chunk_bytes", [0, 1, 64 * 1024 + 1])
    def test_bad_chunk_size_ends_it(self, chunk_bytes: int) -> None:
        machine = ReceiverMachine(MANIFEST, frozenset(), LIMITS, 1 << 20, 0.0)
        assert isinstance(machine.handle(Opened(chunk_bytes), 0.0)[-1], Ended)

    def test_chunk_before_open_is_dropped(self) -> None:
        machine = ReceiverMachine(MANIFEST, frozenset(), LIMITS, 1 << 20, 0.0)
        assert machine.handle(ChunkBegun(0, 1), 0.0) == [DropChunk("not_open")]

    def test_set_that_was_complete_before_begin_ends_once(self) -> None:
        machine = ReceiverMachine(MANIFEST, frozenset({0, 1}), LIMITS, 1 << 20, 0.0)
        machine.handle(Opened(CHUNK), 0.0)
        machine.handle(ChunkBegun(2, 1), 0.0)
        assert machine.handle(ChunkLanded(2, 1, None), 0.0)[-1] == Ended(FallbackReason.NONE, "")
        assert machine.begin() == []

    def test_set_held_whole_needs_nothing(self) -> None:
        machine = ReceiverMachine(MANIFEST, frozenset({0, 1, 2}), LIMITS, 1 << 20, 0.0)
        assert machine.begin() == [SendComplete(), Ended(FallbackReason.NONE, "")]
