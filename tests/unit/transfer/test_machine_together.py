"""Both machines joined by a hostile network: any order, twice, lost, corrupted. Property: right bytes or a typed end.

The network keeps every message ever sent and may deliver any of them at any time, so late chunks and stale
acknowledgements are the rule. Connections die at will; the drivers are modelled in a few lines. Some worlds let
chunks leave before ACCEPT, with a receiver that may choose another cut than the one they left in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.core.cluster import FallbackReason
from farfill.core.errors import ProtocolError
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
    Resumed,
    SendChunk,
    SendComplete,
    SendControl,
    SendFail,
    Tick,
    TransferLimits,
    WriteChunk,
)
from farfill.transfer.grid import pack_bitmap
from farfill.transfer.receiver_machine import ReceiverMachine
from farfill.transfer.sender_machine import EARLY_REFUSED, SenderMachine

LAYOUT = KVLayout(
    (
        TensorLayout(0, "k", TensorKind.FULL, "float32", (256, 128)),
        TensorLayout(0, "v", TensorKind.FULL, "float32", (256, 128)),
    ),
    prefill_chunk_tokens=2,
)
MANIFEST = build_manifest(LAYOUT, 7)
LIMITS = TransferLimits(timeout_s=4.0, grace_s=1.0, open_grace_s=0.5, retry=3, keepalive_s=0.5)
CHUNK_BYTES = 128 * 1024
CONNECTIONS = 3
EVERYBODY = frozenset(range(CONNECTIONS))


@dataclass(frozen=True)
class Chunked:
    """A CHUNK frame."""

    piece: int
    offset: int
    nbytes: int
    attempt: int
    early: bool


@dataclass(frozen=True)
class Answered:
    """An ACK, or a NACK with its reason."""

    piece: int
    offset: int
    attempt: int
    reason: str | None


@dataclass
class World:
    """Two machines, their drivers in miniature, and the messages between them."""

    held: frozenset[int] = frozenset()
    early_bytes: int = 0
    limit_bytes: int = 1 << 20
    now_s: float = 0.0
    up: list[tuple[int, Any]] = field(default_factory=list)
    down: list[Any] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    sender_ends: list[Ended] = field(default_factory=list)
    receiver_ends: list[Ended] = field(default_factory=list)
    writing: dict[int, int] = field(default_factory=dict)
    claims: int = 0
    waiting: list[Chunked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sender = SenderMachine(MANIFEST, LIMITS, 0.0)
        self.receiver = ReceiverMachine(MANIFEST, self.held, LIMITS, self.limit_bytes, 0.0)
        self.sender_does(self.sender.begin(CHUNK_BYTES, self.early_bytes), 0)
        self.receiver_does(self.receiver.begin())

    def tell_sender(self, event: Any, connection: int = 0) -> None:
        self.sender_does(self.sender.handle(event, self.now_s), connection)

    def tell_receiver(self, event: Any) -> list[Any]:
        effects = self.receiver.handle(event, self.now_s)
        self.receiver_does(effects)
        return effects

    def sender_does(self, effects: list[Any], connection: int) -> None:
        for effect in effects:
            match effect:
                case SendControl(control):
                    self.up.append((connection, control))
                    self.tell_sender(ControlSent(control, connection))
                case SendFail():
                    self.up.append((connection, effect))
                case SendChunk(index, attempt, early):
                    assert self.sender.grid is not None
                    chunk = self.sender.grid.chunk(index)
                    assert early or self.sender.accepted
                    self.up.append((connection, Chunked(chunk.piece, chunk.offset, chunk.nbytes, attempt, early)))
                case Ended():
                    self.sender_ends.append(effect)
                case _:
                    pass

    def receiver_does(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Accept() | SendComplete() | SendFail():
                    self.down.append(effect)
                case Ended():
                    self.receiver_ends.append(effect)
                    self.writing.clear()
                case _:
                    pass

    def arrive_up(self, message: Any, *, corrupt: bool = False, cut: bool = False) -> None:
        match message:
            case Control.OPEN:
                self.tell_receiver(Opened(CHUNK_BYTES))
                waiting, self.waiting = self.waiting, []
                for chunk in waiting:
                    self.chunk(chunk, corrupt=False, cut=False)
            case Control.KEEPALIVE:
                self.tell_receiver(Heard())
            case Control.RESUME if self.receiver.ended is None:
                self.tell_receiver(Resumed())
            case Control.RESUME | Control.FINISH:
                if self.receiver.ended is not None:
                    self.say_outcome()
            case SendFail(reason, detail):
                self.tell_receiver(PeerFailed(reason, detail))
            case Chunked():
                self.chunk(message, corrupt=corrupt, cut=cut)

    @property
    def complete(self) -> bool:
        return self.receiver.ended is not None and self.receiver.ended.reason is FallbackReason.NONE

    @property
    def outcome(self) -> tuple[FallbackReason, str]:
        assert self.receiver.ended is not None
        return self.receiver.ended.reason, self.receiver.ended.detail

    def chunk(self, message: Chunked, *, corrupt: bool, cut: bool) -> None:
        """One chunk arrives, from its first byte to its last (or is cut in between)."""
        grid = self.receiver.grid
        if grid is None and self.receiver.ended is None:
            assert message.early
            if corrupt:  # there is no memory for it
                self.answer(message, EARLY_REFUSED)
            elif not cut:
                self.waiting.append(message)
            return
        if grid is None:
            self.say_outcome()
            return
        try:
            index = grid.find(message.piece, message.offset, message.nbytes).index
        except ProtocolError:
            assert message.early
            self.answer(message, EARLY_REFUSED)
            return
        self.claims += 1
        claim = self.claims
        begun = self.tell_receiver(ChunkBegun(index, claim))
        ended_before = self.receiver.ended is not None
        if any(isinstance(e, WriteChunk) for e in begun):
            assert not ended_before, "a fenced transfer is not written to"
            assert index not in self.written, "verified bytes are not overwritten"
            self.writing[claim] = index
        for drop in (e for e in begun if isinstance(e, DropChunk)):
            if drop.acknowledge:
                self.answer(message, None)
            elif ended_before:
                self.say_outcome()
            return
        if cut:
            self.tell_receiver(ChunkAborted(index, claim))
            return
        for effect in self.tell_receiver(ChunkLanded(index, claim, "checksum" if corrupt else None)):
            match effect:
                case Ack(chunk):
                    assert not corrupt
                    assert chunk not in self.written
                    self.written[chunk] = claim
                    self.answer(message, None)
                case Nack(_, reason):
                    assert corrupt
                    self.answer(message, reason)
                case _:
                    pass

    def answer(self, message: Chunked, reason: str | None) -> None:
        self.down.append(Answered(message.piece, message.offset, message.attempt, reason))

    def say_outcome(self) -> None:
        self.down.append(SendComplete() if self.complete else SendFail(*self.outcome))

    def arrive_down(self, message: Any) -> None:
        match message:
            case Accept(chunk_bytes, held):
                assert self.receiver.grid is not None
                self.tell_sender(Accepted(chunk_bytes, pack_bitmap(held, self.receiver.grid.num_chunks)))
            case SendComplete():
                self.tell_sender(PeerCompleted())
            case SendFail(reason, detail):
                self.tell_sender(PeerFailed(reason, detail))
            case Answered(piece, offset, attempt, reason):
                grid = self.sender.grid
                assert grid is not None
                if reason == EARLY_REFUSED and self.sender.accepted and offset % grid.chunk_bytes:
                    return
                index = grid.find(piece, offset).index
                self.tell_sender(Acked(index) if reason is None else Nacked(index, attempt, reason))

    def lose(self, connection: int) -> None:
        self.up = [(carrier, message) for carrier, message in self.up if carrier != connection]
        self.sender_does(self.sender.handle(ConnectionLost(connection), self.now_s), (connection + 1) % CONNECTIONS)

    def check(self) -> None:
        assert len(self.sender_ends) <= 1
        assert len(self.receiver_ends) <= 1
        if self.complete:
            grid = self.receiver.grid
            wanted = set(range(grid.num_chunks)) if grid else set()
            held = {c for p in self.held for c in grid.of_piece(p)} if grid else set()
            assert set(self.written) | held >= wanted
            assert self.receiver.prefix_tokens == MANIFEST.num_tokens
        if self.sender_ends and self.sender_ends[0].reason is FallbackReason.NONE:
            assert self.complete, "the sender believes only what the receiver confirmed"

    def settle(self) -> None:
        """No more faults: everything left is delivered in order, time passes; both must end."""
        for _ in range(400):
            if self.sender.ended and self.receiver.ended:
                return
            for connection in range(CONNECTIONS):
                self.tell_sender(Pull(connection, early=True), connection)
            up, self.up = self.up, []
            for _, message in up:
                self.arrive_up(message)
            down, self.down = self.down, []
            for message in down:
                self.arrive_down(message)
            self.now_s += 0.05
            self.tell_sender(Tick())
            self.tell_receiver(Tick())
        raise AssertionError("one side hangs")


ACTIONS = st.one_of(
    st.tuples(st.just("offer"), st.integers(0, len(MANIFEST.pieces) - 1)),
    st.tuples(st.just("pull"), st.integers(0, CONNECTIONS - 1), st.sampled_from([math.inf, 0.4, 0.0]), st.booleans()),
    st.tuples(st.just("up"), st.integers(0, 30), st.sampled_from(["take", "keep", "corrupt", "cut"])),
    st.tuples(st.just("down"), st.integers(0, 30), st.sampled_from(["take", "keep", "drop"])),
    st.tuples(st.just("lose"), st.integers(0, CONNECTIONS - 1)),
    st.tuples(st.just("wait"), st.floats(0.0, 1.2)),
    st.tuples(st.just("link"), st.booleans()),
    st.tuples(st.just("heard")),
)


def act(world: World, action: tuple[Any, ...]) -> None:
    match action:
        case ("offer", piece):
            world.tell_sender(Offered((piece,)))
        case ("pull", connection, patience_s, take_over):
            stuck = EVERYBODY if take_over else frozenset()
            world.tell_sender(Pull(connection, patience_s, early=True, stuck=stuck, unseen=EVERYBODY), connection)
        case ("up", number, how) if world.up:
            _, message = entry = world.up[number % len(world.up)]
            if how != "keep":
                world.up.remove(entry)
            world.arrive_up(message, corrupt=how == "corrupt", cut=how == "cut")
            if how == "cut":
                world.lose(entry[0])
        case ("down", number, how) if world.down:
            message = world.down[number % len(world.down)]
            if how != "keep":
                world.down.remove(message)
            if how != "drop":
                world.arrive_down(message)
            else:
                # TCP loses an answer only with its connection: all of them may have carried it.
                for connection in range(CONNECTIONS):
                    world.lose(connection)
        case ("lose", connection):
            world.lose(connection)
        case ("wait", seconds):
            world.now_s += seconds
            world.tell_sender(Tick())
            world.tell_receiver(Tick())
        case ("link", standing):
            world.tell_sender(LinkUp() if standing else LinkDown("lost"))
            world.tell_receiver(LinkUp() if standing else LinkDown())
        case ("heard",):
            world.tell_sender(Heard())
        case _:
            pass


@settings(max_examples=400)
@given(
    st.lists(ACTIONS, max_size=80),
    st.sampled_from([frozenset[int](), frozenset({0, 1}), frozenset({3})]),
    st.sampled_from([0, CHUNK_BYTES, 3 * CHUNK_BYTES, 1 << 30]),
    st.sampled_from([1 << 20, CHUNK_BYTES // 2]),
)
def test_any_order_of_events_ends_with_right_bytes_or_a_typed_failure(
    actions: list[tuple[Any, ...]], held: frozenset[int], early_bytes: int, limit_bytes: int
) -> None:
    world = World(held, early_bytes, limit_bytes)
    for action in actions:
        act(world, action)
        world.check()
    world.tell_sender(Offered(tuple(range(len(MANIFEST.pieces)))))
    world.tell_sender(Finished())
    world.tell_sender(LinkUp())
    world.tell_receiver(LinkUp())
    world.settle()
    world.check()


@settings(max_examples=200)
@given(
    st.lists(ACTIONS, max_size=40),
    st.sampled_from(["sender", "receiver"]),
    st.lists(ACTIONS, max_size=40),
    st.sampled_from([0, 1 << 30]),
)
def test_nothing_is_written_after_either_side_failed(
    before: list[tuple[Any, ...]], side: str, after: list[tuple[Any, ...]], early_bytes: int
) -> None:
    world = World(early_bytes=early_bytes)
    for action in before:
        act(world, action)
    failure = Failed(FallbackReason.PREFILL_FAILED, "broken")
    if side == "receiver":
        world.tell_receiver(failure)
    else:
        world.tell_sender(failure)
        for _, message in [entry for entry in world.up if isinstance(entry[1], SendFail)]:
            world.arrive_up(message)
    written = dict(world.written)
    if world.receiver.ended is not None:
        for action in after:
            act(world, action)
            world.check()
        assert world.written == written


@pytest.mark.parametrize("early_bytes", [0, CHUNK_BYTES, 1 << 30])
def test_without_faults_every_chunk_travels_once(early_bytes: int) -> None:
    world = World(early_bytes=early_bytes)
    world.tell_sender(Offered(tuple(range(len(MANIFEST.pieces)))))
    world.tell_sender(Finished())
    world.settle()
    assert world.complete
    assert world.sender_ends == [Ended(FallbackReason.NONE, "")]
    assert world.claims == len(world.written) == 14
