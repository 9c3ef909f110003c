"""Messages come out of a byte stream whole and in order, however it is cut; what is none is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.errors import ProtocolError
from farfill.wire.blocks import MAX_FRAME_BYTES, BlocksChanged, BlocksReader, encode_blocks
from farfill.wire.events import EventReader
from farfill.wire.stream import StreamReader, framed


@given(st.lists(st.binary(max_size=40)), st.integers(1, 20))
def test_any_cutting_gives_the_same_messages(bodies: list[bytes], step: int):
    stream = b"".join(framed(body) for body in bodies)
    reader = StreamReader(lambda body: body, max_bytes=40, what="message")
    found = [body for at in range(0, len(stream), step) for body in reader.feed(stream[at : at + step])]
    assert found == bodies
    assert reader.at_boundary
    assert [body for at in range(0, len(stream), step) for body in reader.take(stream[at : at + step])] == bodies
    assert [body for body in bodies for body in reader.take(framed(body))] == bodies
    assert reader.at_boundary


def test_a_half_message_is_no_boundary():
    reader = BlocksReader()
    message = encode_blocks(BlocksChanged(first=3, changes=[("stored", b"k" * 16)]))
    assert list(reader.feed(message[:-1])) == []
    assert not reader.at_boundary
    assert list(reader.feed(message[-1:])) == [BlocksChanged(first=3, changes=[("stored", b"k" * 16)])]


def test_what_came_before_a_broken_message_is_still_told():
    message = BlocksChanged(first=1, changes=[])
    feed = BlocksReader().feed(encode_blocks(message) + framed(b"\xc1"))
    assert next(feed) == message
    with pytest.raises(ProtocolError, match="malformed frame of block events"):
        next(feed)


def test_an_oversized_message_is_refused_before_it_is_there():
    with pytest.raises(ProtocolError, match=f"frame of block events of {MAX_FRAME_BYTES + 1} bytes is over the limit"):
        list(BlocksReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))
    with pytest.raises(ProtocolError, match="message of 5 bytes is over the limit"):
        StreamReader(bytes, max_bytes=4, what="message").take(framed(b"12345"))
    with pytest.raises(ProtocolError, match="malformed event frame"):
        list(EventReader().feed(framed(b"{}")))
