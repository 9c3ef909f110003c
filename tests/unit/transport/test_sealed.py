"""Sealed records: what was sealed opens once, in order and unchanged; anything else ends the connection."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.transport import sealed
from farfill.transport.errors import TransportError
from farfill.transport.protocol import Channel
from farfill.transport.sealed import (
    KEY_BYTES,
    RECORD_BYTES,
    SealedReader,
    SealedWriter,
    key_of_message,
    new_key_message,
)
from farfill.transport.tcp import TlsTcpTransport
from support.pki import make_pki
from support.transfer_harness import eventually
from unit.transport.test_connection import connect

KEY = bytes(range(KEY_BYTES))


class Pipe:
    """Sealed bytes from a writer, to be handed to a reader as a test likes."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._feed, self._fed = socket.socketpair()
        for sock in (self._near, self._far, self._feed, self._fed):
            sock.setblocking(False)
        self.writer = SealedWriter(KEY, self._near)
        self.reader = SealedReader(KEY, self._fed)

    def seal(self, data: bytes) -> bytes:
        """One record."""
        assert self.writer.send(memoryview(data)) == len(data)
        sealed_bytes = b""
        while not (done := self.writer.flush()) or not sealed_bytes or self._more():
            sealed_bytes += self._far.recv(1 << 20)
            if done and not self._more():
                break
        return sealed_bytes

    def _more(self) -> bool:
        try:
            return bool(self._far.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False

    def feed(self, data: bytes) -> None:
        self._feed.sendall(data)

    def end(self) -> None:
        self._feed.close()

    def receive(self, count: int = RECORD_BYTES) -> bytes | None:
        place = memoryview(bytearray(count))
        received = self.reader.recv_into(place)
        return None if received is None else bytes(place[:received])

    def drain(self) -> None:
        """Receive to the end of the stream."""
        while self.receive() != b"":
            pass

    def close(self) -> None:
        for sock in (self._near, self._far, self._feed, self._fed):
            sock.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_record_opens_to_what_was_sealed_and_hides_it(pipe: Pipe) -> None:
    secret = b"a prompt nobody else may read " * 40
    wire = pipe.seal(secret)
    assert secret[:16] not in wire
    pipe.feed(wire)
    assert pipe.receive() == secret
    assert pipe.receive() is None


def test_same_bytes_look_different_each_time(pipe: Pipe) -> None:
    assert pipe.seal(b"x" * 100) != pipe.seal(b"x" * 100)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=8),
    st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    st.integers(1, 7000),
)
def test_any_cut_of_the_wire_and_of_the_reader_keeps_the_stream(sizes: list[int], cuts: list[int], room: int) -> None:
    pipe = Pipe()
    try:
        records = [os.urandom(size) for size in sizes]
        wire = b"".join(pipe.seal(record) for record in records)
        got, position, turn = b"", 0, 0
        while position < len(wire):
            step = cuts[turn % len(cuts)]
            pipe.feed(wire[position : position + step])
            position, turn = position + step, turn + 1
            while (part := pipe.receive(room)) is not None:
                got += part
        assert got == b"".join(records)
    finally:
        pipe.close()


@settings(max_examples=80)
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_found(position: int, bit: int) -> None:
    pipe = Pipe()
    try:
        wire = bytearray(pipe.seal(b"k" * 300) + pipe.seal(b"v" * 300))
        wire[position % len(wire)] ^= 1 << bit
        pipe.feed(bytes(wire))
        pipe.end()
        with pytest.raises(TransportError) as caught:
            pipe.drain()
        assert caught.value.reason in ("bad_seal", "truncated")
        assert caught.value.retryable
    finally:
        pipe.close()


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 0, 1], [0, 2], [1, 2], [2]], ids=str)
def test_record_out_of_order_repeated_or_dropped_does_not_open(pipe: Pipe, order: list[int]) -> None:
    wires = [pipe.seal(bytes([i]) * 50) for i in range(3)]
    pipe.feed(b"".join(wires[i] for i in order))
    pipe.end()
    with pytest.raises(TransportError) as caught:
        pipe.drain()
    assert caught.value.reason == "bad_seal"


def test_record_of_another_key_or_the_other_direction_does_not_open(pipe: Pipe) -> None:
    other = SealedWriter(os.urandom(KEY_BYTES), pipe._near)
    assert other.send(memoryview(b"y" * 20))
    assert other.flush()
    pipe.feed(pipe._far.recv(100))
    with pytest.raises(TransportError, match="changed on the way"):
        pipe.receive()


@pytest.mark.parametrize("length", [0, RECORD_BYTES + 1, 0xFFFFFFFF])
def test_length_out_of_bounds_ends_it_before_any_memory_is_taken(pipe: Pipe, length: int) -> None:
    pipe.feed(length.to_bytes(4, "big") + bytes(40))
    with pytest.raises(TransportError) as caught:
        pipe.receive()
    assert caught.value.reason == "bad_seal"


def test_end_inside_a_record_is_told_from_an_end_between_records(pipe: Pipe) -> None:
    wire = pipe.seal(b"z" * 500)
    pipe.feed(wire + wire[:100])
    assert pipe.receive() == b"z" * 500
    pipe.end()
    with pytest.raises(TransportError) as caught:
        pipe.receive()
    assert caught.value.reason == "truncated"


def test_end_between_records_is_the_end_of_the_stream(pipe: Pipe) -> None:
    pipe.feed(pipe.seal(b"z"))
    pipe.end()
    assert pipe.receive() == b"z"
    assert pipe.receive() == b""


def test_keys_move_on_in_step_and_no_pair_of_key_and_nonce_comes_twice(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed, "RECORDS_PER_KEY", 3)
    used: list[tuple[bytes, bytes]] = []

    class Watched:
        def __init__(self, key: bytes) -> None:
            self.key = key
            self.aead = AESGCM(key)

        def encrypt_into(self, nonce: bytes, *arguments: Any) -> int:
            used.append((self.key, nonce))
            return self.aead.encrypt_into(nonce, *arguments)

        def decrypt_into(self, *arguments: Any) -> int:
            return self.aead.decrypt_into(*arguments)

    monkeypatch.setattr(sealed, "AESGCM", Watched)
    pipe.writer = SealedWriter(KEY, pipe._near)
    for number in range(11):
        pipe.feed(pipe.seal(bytes([number]) * 10))
        assert pipe.receive() == bytes([number]) * 10
    assert len(set(used)) == 11
    assert len({key for key, _ in used}) == 4


def test_writer_takes_nothing_more_while_the_socket_is_full(pipe: Pipe) -> None:
    data = memoryview(bytes(RECORD_BYTES))
    taken = 0
    while count := pipe.writer.send(data):
        taken += count
        assert taken < 64 * RECORD_BYTES, "nothing holds it back"
    assert not pipe.writer.flush()


@pytest.mark.parametrize("message", [b"", b"farfill-seal-1", b"x" * 31, bytes(31), bytes(64)])
def test_peer_that_sends_no_key_is_refused(message: bytes) -> None:
    with pytest.raises(TransportError) as caught:
        key_of_message(message)
    assert caught.value.reason == "bad_seal"


def test_every_connection_and_direction_has_a_key_of_its_own() -> None:
    keys = [new_key_message() for _ in range(16)]
    assert len({key for key, _ in keys}) == 16
    assert all(key_of_message(message) == key for key, message in keys)


@pytest.mark.parametrize("sealing", [(True, True), (True, False), (False, True), (False, False)])
def test_records_are_sealed_only_when_both_ends_ask_for_it(tmp_path: Path, sealing: tuple[bool, bool]) -> None:
    pki = make_pki(tmp_path)
    dialled, accepted = connect(
        TlsTcpTransport(server=pki.name("decode").server(), sealed=sealing[0]),
        TlsTcpTransport(client=pki.name("prefill", role="prefill").client(), sealed=sealing[1]),
        "127.0.0.1:0",
    )
    try:
        for channel in (dialled, accepted):
            assert (type(channel).__name__ == "SealedChannel") is all(sealing)
        _exchange(dialled, accepted)
        _exchange(accepted, dialled)
    finally:
        dialled.close()
        accepted.close()


def _exchange(source: Channel, target: Channel) -> None:
    data = memoryview(b"sealed or not, it arrives")
    assert source.send(data) == len(data)
    assert source.flush()
    place, got = memoryview(bytearray(len(data))), 0

    def arrived() -> bool:
        nonlocal got
        got += target.recv_into(place[got:]) or 0
        return got == len(data)

    eventually(arrived)
    assert place == data


class _Trickle:
    """A socket that leaves the last bytes of what it is given behind."""

    def __init__(self, rng: random.Random) -> None:
        self.taken = bytearray()
        self._rng = rng

    def send(self, _: object, data: memoryview) -> int:
        if len(data) <= 2000 and self._rng.random() < 0.7:
            raise BlockingIOError
        count = max(1, len(data) - self._rng.choice((0, 1, 900, 2000, 4000)))
        self.taken += data[:count]
        return count


@pytest.mark.parametrize("seed", range(20))
def test_records_go_out_whole_however_little_the_socket_leaves_behind(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    line = _Trickle(rng)
    monkeypatch.setattr("socket.socket.send", line.send)
    writer = SealedWriter(KEY, None)  # type: ignore[arg-type]
    plain = bytearray()
    while len(plain) < 40 * RECORD_BYTES:
        data = rng.randbytes(rng.choice((64, 300, 5000, RECORD_BYTES)))
        if writer.send(memoryview(data)):
            plain += data
    while not writer.flush():
        pass
    monkeypatch.undo()
    near, far = socket.socketpair()
    with near, far:
        sending = threading.Thread(target=lambda: near.sendall(line.taken))
        sending.start()
        reader, opened = SealedReader(KEY, far), bytearray()
        place = memoryview(bytearray(RECORD_BYTES))
        while len(opened) < len(plain):
            count = reader.recv_into(place)
            assert count
            opened += place[:count]
        sending.join()
    assert opened == plain
