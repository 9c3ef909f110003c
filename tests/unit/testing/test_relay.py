"""The relay that acts as a bad link: what it does to bytes, and that it does nothing else."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from farfill.testing.relay import Relay

KIB = 1024


class Echo:
    """A TCP server that sends back what it gets."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._server.getsockname())
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,))
            thread.start()
            self._threads.append(thread)

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(65536):
                    sock.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._accepting.join(5)
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def dial(relay: Relay) -> socket.socket:
    host, port = relay.address.split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def round_trip(sock: socket.socket, data: bytes) -> bytes:
    sock.sendall(data)
    return receive(sock, len(data))


def receive(sock: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = sock.recv(min(65536, count - len(received)))
        assert part, "the stream ended early"
        received += part
    return received


def is_over(sock: socket.socket) -> bool:
    """Whether the stream ends, by a reset or quietly."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_bytes_pass_unchanged_and_are_counted(echo: Echo) -> None:
    data = os.urandom(700 * KIB)
    with Relay(echo.address) as relay, dial(relay) as sock:
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        received = receive(sock, len(data))
        sender.join()
        assert received == data
        assert (relay.up.bytes, relay.connections_accepted) == (len(data), 1)
    assert not [t for t in threading.enumerate() if t.name == "farfill-relay"]


def test_delay_adds_up_to_the_round_trip(echo: Echo) -> None:
    with Relay(echo.address, delay_s=0.05) as relay, dial(relay) as sock:
        round_trip(sock, b"warm")
        started_s = time.monotonic()
        assert round_trip(sock, b"ping") == b"ping"
        assert 0.1 <= time.monotonic() - started_s < 1


def test_rate_is_shared_by_connections_and_can_change(echo: Echo) -> None:
    with Relay(echo.address, rate_bytes_per_s=400 * KIB) as relay, dial(relay) as one, dial(relay) as two:
        started_s = time.monotonic()
        for sock in (one, two):
            sock.sendall(bytes(100 * KIB))
        for sock in (one, two):
            assert len(sock.recv(1)) == 1
            receive(sock, 100 * KIB - 1)
        assert time.monotonic() - started_s >= 0.49
        relay.set_rate(None)
        started_s = time.monotonic()
        assert len(round_trip(one, bytes(100 * KIB))) == 100 * KIB
        assert time.monotonic() - started_s < 0.4


def test_cut_resets_and_refuses_until_healed(echo: Echo) -> None:
    with Relay(echo.address) as relay:
        with dial(relay) as sock:
            assert round_trip(sock, b"x") == b"x"
            relay.cut()
            assert is_over(sock)
        with dial(relay) as sock:
            assert is_over(sock)
        relay.heal()
        with dial(relay) as sock:
            assert round_trip(sock, b"y") == b"y"


def test_blackhole_swallows_and_heal_delivers(echo: Echo) -> None:
    with Relay(echo.address) as relay, dial(relay) as sock:
        assert round_trip(sock, b"x") == b"x"
        relay.blackhole()
        sock.sendall(b"y")
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(5)
        relay.heal()
        assert sock.recv(1) == b"y"


def test_reset_one_spares_the_others(echo: Echo) -> None:
    with Relay(echo.address) as relay, dial(relay) as first, dial(relay) as second:
        for sock in (first, second):
            assert round_trip(sock, b"x") == b"x"
        relay.reset_one()
        assert is_over(first)
        assert round_trip(second, b"y") == b"y"
