"""One reservation, several senders: in any order of events, one at a time writes, and nothing verified is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.core.cluster import FallbackReason
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.core.ticket import Ticket
from farfill.kv.manifest import build_manifest
from farfill.transfer.events import (
    ChunkAborted,
    ChunkBegun,
    ChunkLanded,
    DropChunk,
    Ended,
    Failed,
    LinkDown,
    LinkUp,
    Opened,
    PeerFailed,
    Resumed,
    Tick,
    TransferLimits,
    WriteChunk,
)
from farfill.transfer.handover_machine import (
    Expect,
    Fence,
    HandoverMachine,
    HandoverState,
    NextSender,
    Orphaned,
    Proceed,
    Refused,
    SenderEnded,
    Settled,
)
from farfill.transfer.receiver_machine import ReceiverMachine

LAYOUT = KVLayout(
    (
        TensorLayout(0, "k", TensorKind.FULL, "float32", (256, 128)),
        TensorLayout(0, "v", TensorKind.FULL, "float32", (256, 128)),
    ),
    prefill_chunk_tokens=2,
)
MANIFEST = build_manifest(LAYOUT, 6)
LIMITS = TransferLimits(timeout_s=4.0, grace_s=4.0, open_grace_s=0.5, retry=3, keepalive_s=0.5)
HOLD_S = 3.0
CHUNK_BYTES = 128 * 1024
LOST = FallbackReason.PREFILL_LOST


def ticket(transfer_id: str = "t0", **changes: Any) -> Ticket:
    values = Ticket(
        transfer_id=transfer_id,
        fingerprint="f",
        tenant="tenant",
        prefill=f"far-{transfer_id}",
        decode="near",
        num_tokens=6,
        issued_unix_s=0.0,
        expires_unix_s=60.0,
    )
    return replace(values, **changes)


def proceed(current: str, following: str, **changes: Any) -> Proceed:
    return Proceed(current, NextSender(ticket(following, **changes)), LOST, "gone")


def names(effects: list[Any]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def test_failed_sender_leaves_an_orphan_for_the_next_one():
    machine = HandoverMachine(ticket(), HOLD_S)
    assert machine.handle(SenderEnded("t0", FallbackReason.LINK_LOST), 1.0) == [Orphaned(HOLD_S)]
    assert machine.handle(Tick(), 1.0 + HOLD_S - 0.01) == []
    assert names(machine.handle(proceed("t0", "t1"), 3.9)) == ["Expect"]
    assert (machine.state, machine.current) == (HandoverState.RECEIVING, "t1")
    assert machine.handle(Tick(), 100.0) == []
    assert machine.handle(SenderEnded("t1", FallbackReason.NONE), 5.0) == [Settled()]


def test_sender_that_is_replaced_while_it_sends_is_fenced_before_the_next_is_expected():
    machine = HandoverMachine(ticket(), HOLD_S)
    assert machine.handle(proceed("t0", "t1"), 1.0) == [Fence(LOST, "gone")]
    assert machine.current == "t0"
    assert names(machine.handle(SenderEnded("t0", LOST), 1.0)) == ["Expect"]
    assert machine.handle(SenderEnded("t0", LOST), 1.0) == [], "it had ended before"


def test_set_that_completes_just_before_the_replacement_is_complete():
    machine = HandoverMachine(ticket(), HOLD_S)
    machine.handle(proceed("t0", "t1"), 1.0)
    assert names(machine.handle(SenderEnded("t0", FallbackReason.NONE), 1.0)) == ["Refused", "Settled"]


def test_orphan_that_nobody_adopts_in_time_is_settled():
    machine = HandoverMachine(ticket(), HOLD_S)
    machine.handle(SenderEnded("t0", LOST), 1.0)
    assert machine.handle(Tick(), 1.0 + HOLD_S) == [Settled()]
    assert names(machine.handle(proceed("t0", "t1"), 5.0)) == ["Refused"]


def test_giving_up_settles_an_orphan_at_once_and_fences_a_sender():
    machine = HandoverMachine(ticket(), HOLD_S)
    machine.handle(SenderEnded("t0", LOST), 1.0)
    assert machine.handle(Failed(LOST, "nobody left"), 1.1) == [Settled()]
    machine = HandoverMachine(ticket(), HOLD_S)
    assert machine.handle(Failed(LOST, "nobody left"), 1.1) == [Fence(LOST, "nobody left")]
    assert names(machine.handle(proceed("t0", "t1"), 1.1)) == ["Refused"]
    assert machine.handle(SenderEnded("t0", LOST), 1.1) == [Settled()]


@pytest.mark.parametrize("reason", [FallbackReason.WITHDRAWN, FallbackReason.KV_MEMORY])
def test_what_no_other_sender_can_cure_is_final(reason: FallbackReason):
    assert HandoverMachine(ticket(), HOLD_S).handle(SenderEnded("t0", reason), 1.0) == [Settled()]


def test_without_holding_the_first_failure_is_the_last():
    machine = HandoverMachine(ticket(), 0.0)
    assert names(machine.handle(proceed("t0", "t1"), 1.0)) == ["Refused"]
    assert machine.handle(SenderEnded("t0", LOST), 1.0) == [Settled()]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (proceed("other", "t1"), "transfer_superseded"),
        (proceed("t0", "t0"), "ticket_replayed"),
        (proceed("t0", "t1", tenant="another"), "ticket_wrong_transfer"),
        (proceed("t0", "t1", fingerprint="g"), "ticket_wrong_transfer"),
        (proceed("t0", "t1", decode="elsewhere"), "ticket_wrong_transfer"),
        (proceed("t0", "t1", num_tokens=7), "ticket_wrong_transfer"),
    ],
)
def test_sender_that_must_not_continue_is_refused_with_its_reason(event: Proceed, reason: str):
    for orphaned in (False, True):
        machine = HandoverMachine(ticket(), HOLD_S)
        if orphaned:
            machine.handle(SenderEnded("t0", LOST), 1.0)
        assert machine.handle(event, 1.0) == [Refused(event.sender, reason)]


def test_ticket_of_a_sender_that_failed_cannot_come_back():
    machine = HandoverMachine(ticket(), HOLD_S)
    machine.handle(SenderEnded("t0", LOST), 1.0)
    machine.handle(proceed("t0", "t1"), 1.0)
    machine.handle(SenderEnded("t1", LOST), 1.0)
    assert names(machine.handle(proceed("t1", "t0"), 1.0)) == ["Refused"]
    assert names(machine.handle(proceed("t1", "t1"), 1.0)) == ["Refused"]
    assert names(machine.handle(proceed("t1", "t2"), 1.0)) == ["Expect"]


@dataclass
class World:
    """A handover and the receiver machine of every sender it ever had; chunk contents say who wrote them."""

    now_s: float = 0.0
    receivers: dict[str, ReceiverMachine] = field(default_factory=dict)
    told_end: set[str] = field(default_factory=set)
    claims: dict[tuple[str, int], int] = field(default_factory=dict)
    memory: dict[int, str] = field(default_factory=dict)
    verified: dict[int, str] = field(default_factory=dict)
    settled: int = 0
    pieces: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.handover = HandoverMachine(ticket(), HOLD_S)
        self.expect("t0")

    def expect(self, transfer_id: str) -> None:
        assert all(receiver.ended is not None for receiver in self.receivers.values()), "two would write at once"
        self.receivers[transfer_id] = ReceiverMachine(MANIFEST, self.pieces, LIMITS, 1 << 20, self.now_s)
        # Halves of pieces are thrown away.
        kept = {chunk for chunk in self.verified if chunk // 2 in self.pieces}
        self.verified = {chunk: who for chunk, who in self.verified.items() if chunk in kept}
        self.after(transfer_id, self.receivers[transfer_id].begin())

    def tell(self, event: Any) -> None:
        for effect in self.handover.handle(event, self.now_s):
            match effect:
                case Fence(reason, detail):
                    self.receive(self.handover.current, Failed(reason, detail))
                case Expect(sender):
                    self.expect(sender.ticket.transfer_id)
                case Settled():
                    self.settled += 1
                case _:
                    pass

    def receive(self, transfer_id: str, event: Any) -> list[Any]:
        effects = self.receivers[transfer_id].handle(event, self.now_s)
        self.after(transfer_id, effects)
        return effects

    def after(self, transfer_id: str, effects: list[Any]) -> None:
        """The end of a transfer reaches the handover later, as an event of its own."""

    def pass_on_ends(self) -> None:
        for transfer_id, receiver in list(self.receivers.items()):
            if receiver.ended is not None and transfer_id not in self.told_end:
                self.told_end.add(transfer_id)
                self.pieces = receiver.pieces
                self.tell(SenderEnded(transfer_id, receiver.ended.reason))

    def chunk(self, transfer_id: str, chunk: int, step: str) -> None:
        receiver = self.receivers[transfer_id]
        if step == "begin" and receiver.grid is not None:
            claim = len(self.claims)
            effects = self.receive(transfer_id, ChunkBegun(chunk, claim))
            if any(isinstance(effect, WriteChunk) for effect in effects):
                assert chunk not in self.verified, "verified bytes are written again"
                self.claims[transfer_id, chunk] = claim
                self.memory[chunk] = transfer_id
            elif receiver.ended is not None:
                assert effects == [DropChunk("fenced")]
        elif step in ("land", "spoil") and (transfer_id, chunk) in self.claims:
            claim = self.claims.pop((transfer_id, chunk))
            before = receiver.ended
            problem = "checksum" if step == "spoil" else None
            effects = self.receive(transfer_id, ChunkLanded(chunk, claim, problem))
            if before is None and problem is None and not any(isinstance(e, DropChunk) for e in effects):
                assert self.memory[chunk] == transfer_id
                self.verified[chunk] = transfer_id
        elif step == "abort" and (transfer_id, chunk) in self.claims:
            self.receive(transfer_id, ChunkAborted(chunk, self.claims.pop((transfer_id, chunk))))


CHUNKS = sum(-(-piece.nbytes // CHUNK_BYTES) for piece in MANIFEST.pieces)
EVENTS = st.one_of(
    st.tuples(st.just("chunk"), st.integers(0, 3), st.integers(0, CHUNKS - 1), st.sampled_from(["begin", "land"])),
    st.tuples(st.just("chunk"), st.integers(0, 3), st.integers(0, CHUNKS - 1), st.sampled_from(["spoil", "abort"])),
    st.tuples(
        st.just("receiver"), st.integers(0, 3), st.sampled_from(["open", "resume", "down", "up", "tick", "fail"])
    ),
    st.tuples(st.just("handover"), st.sampled_from(["proceed", "proceed", "stale", "give up", "tick", "ends", "ends"])),
    st.tuples(st.just("time"), st.floats(0.0, 3.0)),
)


def run(world: World, events: list[Any]) -> Iterator[World]:
    for event in events:
        ids = list(world.receivers)
        match event:
            case ("chunk", sender, chunk, step):
                world.chunk(ids[sender % len(ids)], chunk, step)
            case ("receiver", sender, what):
                happened = {
                    "open": Opened(CHUNK_BYTES),
                    "resume": Resumed(),
                    "down": LinkDown(),
                    "up": LinkUp(),
                    "tick": Tick(),
                    "fail": PeerFailed(LOST, ""),
                }[what]
                world.receive(ids[sender % len(ids)], happened)
            case ("handover", "proceed"):
                world.tell(proceed(world.handover.current, f"t{len(ids)}"))
            case ("handover", "stale"):
                world.tell(proceed(ids[0], f"stale{len(ids)}") if len(ids) > 1 else Tick())
            case ("handover", "give up"):
                world.tell(Failed(LOST, ""))
            case ("handover", "tick"):
                world.tell(Tick())
            case ("handover", "ends"):
                world.pass_on_ends()
            case ("time", seconds):
                world.now_s += seconds
        yield world


@given(st.lists(EVENTS, max_size=120))
@settings(max_examples=300)
def test_any_order_of_events_keeps_one_writer_and_loses_nothing_verified(events: list[Any]):
    world = World()
    for state in run(world, events):
        live = [key for key, receiver in state.receivers.items() if receiver.ended is None]
        assert len(live) <= 1
        assert not live or live == [state.handover.current]
        assert state.settled == (state.handover.state is HandoverState.OVER)
    # Whatever happened, time alone ends it, and what counts as held was verified by one sender after the other.
    for _ in range(4):
        world.now_s += LIMITS.timeout_s + HOLD_S
        for transfer_id in world.receivers:
            world.receive(transfer_id, Tick())
        world.pass_on_ends()
        world.tell(Tick())
    assert world.settled == 1
    for piece in world.pieces:
        writers = {world.verified[chunk] for chunk in (2 * piece, 2 * piece + 1) if chunk in world.verified}
        assert len(writers) == 1, "half a piece was taken over"


@given(st.lists(EVENTS, max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_second_sender_completes_the_set_whatever_the_first_one_did(events: list[Any], random: Any):
    world = World()
    for _ in run(world, [e for e in events if e[0] in ("chunk", "receiver") or e[-1] == "ends"]):
        pass
    world.pass_on_ends()
    world.tell(proceed(world.handover.current, "second"))
    world.pass_on_ends()
    if world.handover.state is HandoverState.OVER:
        assert world.receivers["t0"].ended == Ended(FallbackReason.NONE, "")
        return
    held = set(world.pieces)
    world.receive("second", Opened(CHUNK_BYTES))
    missing = [chunk for chunk in range(CHUNKS) if chunk // 2 not in held]
    random.shuffle(missing)
    for chunk in missing:
        world.chunk("t0", chunk, "land")  # late ones of the first sender change nothing
        world.chunk("second", chunk, "begin")
        world.chunk("second", chunk, "land")
    world.pass_on_ends()
    assert world.handover.state is HandoverState.OVER
    assert world.pieces == frozenset(range(len(MANIFEST.pieces)))
    assert {world.memory[chunk] for chunk in missing} == {"second"} or not missing
