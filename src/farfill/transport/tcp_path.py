"""What the kernel knows about the path of one TCP connection, and the socket options a WAN needs.

Socket buffers are left to the kernel's tuning: setting them would cap them at `net.core.*mem_max`, which most hosts
keep far below what tuning may reach (`net.ipv4.tcp_*mem`). Linux only; elsewhere nothing is known.
"""

from __future__ import annotations

import contextlib
import socket
from struct import Struct

from farfill.transport.protocol import UNSENT_BYTES, PathSample

# A record of TLS may be in OpenSSL's hands already, in part: so much less is certain to come.
MAX_TLS_RECORD_BYTES = 17 * 1024
MAX_AWAITED_BYTES = 128 * 1024
# Who waits for as much as the window of a young connection reads only when the sender has stopped, and so the kernel
# never sees a reason to widen it. The window is about half of the buffer.
AWAITED_PART = 4
PREFERRED_CONGESTION = b"bbr"  # loss on a WAN starves the usual default

_TCP_INFO = getattr(socket, "TCP_INFO", None)
_TCP_CONGESTION = getattr(socket, "TCP_CONGESTION", None)
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", None)
# struct tcp_info of linux/tcp.h up to tcpi_delivery_rate: snd_mss, unacked, last_ack_recv (ms), rtt (us), snd_cwnd
# (segments), total_retrans, bytes_acked, data_segs_out, delivery_rate (bytes/s). Its fields keep their places in every
# kernel since 4.9.
_INFO = Struct("=16xI4xI28xI8xI8xI16xI16xQ28xIQ")


def tune(sock: socket.socket, *, choose_congestion: bool) -> None:
    """For small frames that shall not wait, and large ones on a lossy path."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options: list[tuple[int | None, int | bytes]] = [(_TCP_NOTSENT_LOWAT, UNSENT_BYTES)]
    if choose_congestion:
        options.append((_TCP_CONGESTION, PREFERRED_CONGESTION))
    for option, value in options:
        if option is not None:
            with contextlib.suppress(OSError):  # not offered by this kernel: its default stays
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


class WaterMarks:
    """What the kernel holds of one socket before it is writable no more, or readable at all."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent_bytes = UNSENT_BYTES
        self._awaited_bytes = 1
        self._awaited_most = 1

    def hold_unsent(self, nbytes: int) -> None:
        """See `protocol.Channel`."""
        if _TCP_NOTSENT_LOWAT is None or abs(nbytes - self._unsent_bytes) * 4 < self._unsent_bytes:
            return
        self._unsent_bytes = nbytes
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, nbytes)

    def await_bytes(self, nbytes: int) -> None:
        """See `protocol.Channel`; `nbytes`: those that are certain to come to the socket."""
        nbytes = max(1, min(nbytes, MAX_AWAITED_BYTES))
        with contextlib.suppress(OSError):
            if nbytes > self._awaited_most:
                buffer_bytes = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
                self._awaited_most = max(1, buffer_bytes // AWAITED_PART)
                nbytes = min(nbytes, self._awaited_most)
            if nbytes != self._awaited_bytes:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
                self._awaited_bytes = nbytes


def sample_path(sock: socket.socket) -> PathSample | None:
    """What the kernel measured on `sock`; None when it does not tell."""
    if _TCP_INFO is None or _TCP_CONGESTION is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO.size)
        congestion = sock.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16)
    except OSError:
        return None
    if len(info) < _INFO.size:
        return None
    segment_bytes, unacked, ack_age_ms, rtt_us, window, retransmits, acked, segments, delivery_rate = _INFO.unpack(info)
    return PathSample(
        rtt_s=rtt_us / 1e6,
        segments_sent=segments,
        segments_resent=retransmits,
        delivery_bytes_per_s=float(delivery_rate),
        silent_s=ack_age_ms / 1e3 if unacked else 0.0,
        confirmed_bytes=acked,
        window_bytes_per_s=window * segment_bytes / (rtt_us / 1e6) if rtt_us else 0.0,
        congestion=congestion.split(b"\0", 1)[0].decode("ascii", "replace"),
    )


def close_at_once(sock: socket.socket) -> None:
    """Reset the connection: what the kernel still holds to be sent is dropped, and never sent late."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))
    sock.close()


_LINGER = Struct("ii")
