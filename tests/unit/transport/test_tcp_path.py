"""What the kernel says about a real TCP connection, and closing one so that nothing arrives late."""

from __future__ import annotations

import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farfill.transport.tcp_path import MAX_AWAITED_BYTES, WaterMarks, close_at_once, sample_path, tune
from support.transfer_harness import eventually

SYSCTL = Path("/proc/sys/net/ipv4")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is read on Linux only")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield near, far


def test_sample_tells_what_was_sent_and_how_long_a_round_trip_takes(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    before = sample_path(near)
    assert before is not None
    near.sendall(bytes(200_000))
    received = 0
    while received < 200_000:
        received += len(far.recv(65536))
    after = sample_path(near)
    assert after is not None
    assert after.segments_sent > before.segments_sent
    assert after.segments_resent == 0
    assert 0 < after.rtt_s < 1
    assert after.delivery_bytes_per_s > 0
    eventually(lambda: (s := sample_path(near)) is not None and s.silent_s == 0.0)
    algorithms = (SYSCTL / "tcp_available_congestion_control").read_text().split()
    assert after.congestion in algorithms


def test_bbr_is_used_where_it_is_allowed_and_the_default_kept_where_asked(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    before = sample_path(far)
    tune(far, choose_congestion=False)
    after = sample_path(far)
    assert before is not None
    assert after is not None
    assert after.congestion == before.congestion
    allowed = (SYSCTL / "tcp_allowed_congestion_control").read_text().split()
    tune(near, choose_congestion=True)
    chosen = sample_path(near)
    assert chosen is not None
    assert chosen.congestion == ("bbr" if "bbr" in allowed else before.congestion)
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_socket_that_is_closed_says_nothing() -> None:
    sock = socket.socket()
    sock.close()
    assert sample_path(sock) is None


def test_closing_at_once_drops_what_was_not_read(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    near.setblocking(False)
    eventually(lambda: not _takes_more(near))
    close_at_once(near)
    far.settimeout(5)

    def read_to_the_end() -> None:
        while far.recv(1 << 20):
            pass

    with pytest.raises(ConnectionResetError):
        read_to_the_end()


def _takes_more(sock: socket.socket) -> bool:
    try:
        return sock.send(bytes(1 << 20)) > 0
    except BlockingIOError:
        return False


def test_who_waits_for_a_large_chunk_reads_before_the_window_is_full(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    marks = WaterMarks(far)
    marks.await_bytes(1 << 20)
    near.sendall(bytes(far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 4))
    assert select.select([far], [], [], 30)[0], "the sender fills the window before it is read"


def test_a_wide_window_is_waited_for_in_larger_parts(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    marks = WaterMarks(far)
    marks.await_bytes(1 << 20)
    narrow = far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * narrow)
    marks.await_bytes(1 << 20)
    assert narrow < far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) <= MAX_AWAITED_BYTES
    marks.await_bytes(1)
    near.sendall(b"x")
    assert select.select([far], [], [], 30)[0]
