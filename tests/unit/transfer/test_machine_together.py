"""Both machines joined by a hostile network: any order, twice, lost, corrupted. Property: right bytes or a typed end.

The network keeps every message ever sent and may deliver any of them at any time, so late chunks and stale
acknowledgements are the rule. Connections die at will; the sender's driver is modelled in a few lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

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
from farfill.transfer.sender_machine import SenderMachine

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


@dataclass
class World:
    """Two machines, their drivers in miniature, and the messages between them."""

    held: frozenset[int] = frozenset()
    now_s: float = 0.0
    up: list[tuple[int, Any]] = field(default_factory=list)
    down: list[Any] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    sender_ends: list[Ended] = field(default_factory=list)
    receiver_ends: list[Ended] = field(default_factory=list)
    writing: dict[int, int] = field(default_factory=dict)
    claims: int = 0

    def __post_init__(self) -> None:
        self.sender = SenderMachine(MANIFEST, LIMITS, 0.0)
        self.receiver = ReceiverMachine(MANIFEST, self.held, LIMITS, 1 << 20, 0.0)
        self.sender_does(self.sender.begin(), 0)
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
                case SendFail() | SendChunk():
                    self.up.append((connection, effect))
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
            case Control.KEEPALIVE:
                self.tell_receiver(Heard())
            case Control.RESUME if self.receiver.ended is None:
                self.tell_receiver(Resumed())
            case Control.RESUME | Control.FINISH:
                if self.receiver.ended is not None:
                    self.down.append(SendComplete() if self.complete else SendFail(*self.outcome))
            case SendFail(reason, detail):
                self.tell_receiver(PeerFailed(reason, detail))
            case SendChunk():
                self.chunk(message, corrupt=corrupt, cut=cut)

    @property
    def complete(self) -> bool:
        return self.receiver.ended is not None and self.receiver.ended.reason is FallbackReason.NONE

    @property
    def outcome(self) -> tuple[FallbackReason, str]:
        assert self.receiver.ended is not None
        return self.receiver.ended.reason, self.receiver.ended.detail

    def chunk(self, message: SendChunk, *, corrupt: bool, cut: bool) -> None:
        """One chunk arrives, from its first byte to its last (or is cut in between)."""
        self.claims += 1
        claim = self.claims
        begun = self.tell_receiver(ChunkBegun(message.chunk, claim))
        ended_before = self.receiver.ended is not None
        if any(isinstance(e, WriteChunk) for e in begun):
            assert not ended_before, "a fenced transfer is not written to"
            assert message.chunk not in self.written, "verified bytes are not overwritten"
            self.writing[claim] = message.chunk
        for drop in (e for e in begun if isinstance(e, DropChunk)):
            if drop.acknowledge:
                self.down.append(Acked(message.chunk))
            elif ended_before:
                self.down.append(SendComplete() if self.complete else SendFail(*self.outcome))
            return
        if cut:
            self.tell_receiver(ChunkAborted(message.chunk, claim))
            return
        for effect in self.tell_receiver(ChunkLanded(message.chunk, claim, "checksum" if corrupt else None)):
            match effect:
                case Ack(chunk):
                    assert not corrupt
                    assert chunk not in self.written
                    self.written[chunk] = claim
                    self.down.append(Acked(chunk))
                case Nack(chunk, reason):
                    assert corrupt
                    self.down.append(Nacked(chunk, message.attempt, reason))
                case _:
                    pass

    def arrive_down(self, message: Any) -> None:
        match message:
            case Accept(chunk_bytes, held):
                assert self.receiver.grid is not None
                self.tell_sender(Accepted(chunk_bytes, pack_bitmap(held, self.receiver.grid.num_chunks)))
            case SendComplete():
                self.tell_sender(PeerCompleted())
            case SendFail(reason, detail):
                self.tell_sender(PeerFailed(reason, detail))
            case _:
                self.tell_sender(message)

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
                self.tell_sender(Pull(connection), connection)
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
    st.tuples(st.just("pull"), st.integers(0, CONNECTIONS - 1), st.sampled_from([math.inf, 0.4, 0.0])),
    st.tuples(st.just("up"), st.integers(0, 30), st.sampled_from(["take", "keep", "corrupt", "cut"])),
    st.tuples(st.just("down"), st.integers(0, 30), st.sampled_from(["take", "keep", "drop"])),
    st.tuples(st.just("lose"), st.integers(0, CONNECTIONS - 1)),
    st.tuples(st.just("wait"), st.floats(0.0, 0.6)),
    st.tuples(st.just("link"), st.booleans()),
    st.tuples(st.just("heard")),
)


def act(world: World, action: tuple[Any, ...]) -> None:
    match action:
        case ("offer", piece):
            world.tell_sender(Offered((piece,)))
        case ("pull", connection, overdue_s):
            world.tell_sender(Pull(connection, overdue_s), connection)
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


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTIONS, max_size=80), st.sampled_from([frozenset[int](), frozenset({0, 1}), frozenset({3})]))
def test_any_order_of_events_ends_with_right_bytes_or_a_typed_failure(
    actions: list[tuple[Any, ...]], held: frozenset[int]
) -> None:
    world = World(held)
    for action in actions:
        act(world, action)
        world.check()
    world.tell_sender(Offered(tuple(range(len(MANIFEST.pieces)))))
    world.tell_sender(Finished())
    world.tell_sender(LinkUp())
    world.tell_receiver(LinkUp())
    world.settle()
    world.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.sampled_from(["sender", "receiver"]), st.lists(ACTIONS, max_size=40))
def test_nothing_is_written_after_either_side_failed(
    before: list[tuple[Any, ...]], side: str, after: list[tuple[Any, ...]]
) -> None:
    world = World()
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


def test_without_faults_every_chunk_travels_once() -> None:
    world = World()
    world.tell_sender(Offered(tuple(range(len(MANIFEST.pieces)))))
    world.tell_sender(Finished())
    world.settle()
    assert world.complete
    assert world.sender_ends == [Ended(FallbackReason.NONE, "")]
    assert world.claims == len(world.written) == 14
