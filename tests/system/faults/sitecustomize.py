"""For worker processes of system tests: flips one bit of every third chunk after it was hashed, its first time only.

Python imports this at its start when the folder is on PYTHONPATH. It stands for a bit that flips in memory or in a
network card: behind the sender's checksum, before the encryption of the connection.
"""

from __future__ import annotations

import itertools

from farfill.transport.protocol import OutgoingFrame
from farfill.wire.frames import HEADER_BYTES, FrameType, unpack_header

EVERY = 3

_count = itertools.count(1)
_init = OutgoingFrame.__init__


def _init_flipped(self: OutgoingFrame, head: bytes, payload: memoryview | None = None) -> None:
    if payload is not None:
        header = unpack_header(head[:HEADER_BYTES])
        if header.type is FrameType.CHUNK and header.attempt == 0 and next(_count) % EVERY == 0:
            damaged = bytearray(payload)
            damaged[len(damaged) // 2] ^= 0x10
            payload = memoryview(damaged)
    _init(self, head, payload)


OutgoingFrame.__init__ = _init_flipped
