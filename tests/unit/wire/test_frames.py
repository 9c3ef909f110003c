"""Frame headers and control payloads: round trips, bounds, and refusals by name."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.errors import IncompatiblePeerError, ProtocolError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.wire.frames import (
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CONTROL_BYTES,
    AcceptPayload,
    FrameHeader,
    FrameType,
    HelloPayload,
    OpenPayload,
    ReasonPayload,
    decode_payload,
    encode_frame,
    layout_difference,
    layout_payload,
    pack_header,
    transfer_key,
    unpack_header,
)

LAYOUT = KVLayout(
    (
        TensorLayout(0, "k", TensorKind.FULL, "bfloat16", (2, 64)),
        TensorLayout(1, "k", TensorKind.WINDOW, "bfloat16", (2, 64), window_tokens=512),
    ),
    prefill_chunk_tokens=256,
)

control_types = st.sampled_from([kind for kind in FrameType if kind is not FrameType.CHUNK])
u32 = st.integers(0, 2**32 - 1)
sixteen = st.binary(min_size=16, max_size=16)


@given(control_types, sixteen, u32, st.integers(0, 2**64 - 1), u32, st.integers(0, MAX_CONTROL_BYTES), sixteen, u32)
def test_control_header_survives_the_round_trip(kind, transfer, piece, offset, raw, wire, checksum, attempt) -> None:
    header = FrameHeader(kind, transfer, piece, offset, raw, wire, 0, 0, checksum, attempt)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed) == header


@given(st.integers(1, MAX_CHUNK_BYTES), st.data())
def test_chunk_header_survives_the_round_trip(raw: int, data: st.DataObject) -> None:
    codec = data.draw(st.integers(0, 2))
    wire = raw if codec == 0 else data.draw(st.integers(1, raw))
    header = FrameHeader(FrameType.CHUNK, bytes(16), 1, 2, raw, wire, codec, 1, bytes(16), 3)
    assert unpack_header(header.pack()) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_give_a_bounded_header_or_a_typed_error(data: bytes) -> None:
    for candidate in (data, b"FARF\x01" + data[5:], b"FARF\x01\x06" + data[6:]):
        try:
            header = unpack_header(candidate)
        except (ProtocolError, IncompatiblePeerError):
            continue
        limit = MAX_CHUNK_BYTES if header.type is FrameType.CHUNK else MAX_CONTROL_BYTES
        assert header.wire_bytes <= limit


@given(st.sampled_from([HelloPayload, ReasonPayload, OpenPayload, AcceptPayload]), st.binary(max_size=200))
def test_any_payload_is_decoded_or_refused_with_a_typed_error(kind, data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_payload(kind, data), kind)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"raw_bytes": MAX_CHUNK_BYTES + 1, "wire_bytes": 10, "codec": 1}, "oversize"),
        ({"raw_bytes": 0, "wire_bytes": 0}, "oversize"),
        ({"raw_bytes": 10, "wire_bytes": 11, "codec": 2}, "oversize"),
        ({"raw_bytes": 10, "wire_bytes": 9, "codec": 0}, "oversize"),
        ({"codec": 5}, "bad_frame"),
        ({"flags": 4}, "bad_frame"),
        ({"type": FrameType.OPEN, "wire_bytes": MAX_CONTROL_BYTES + 1}, "oversize"),
    ],
)
def test_header_over_a_bound_is_refused(changes: dict[str, int], reason: str) -> None:
    header = replace(FrameHeader(FrameType.CHUNK, raw_bytes=10, wire_bytes=10), **changes)
    with pytest.raises(ProtocolError) as caught:
        unpack_header(pack_header(header))
    assert caught.value.reason == reason


def test_header_of_another_version_names_both_versions() -> None:
    with pytest.raises(IncompatiblePeerError, match="version 9 there, 1 here") as caught:
        unpack_header(pack_header(FrameHeader(FrameType.PING), version=9))
    assert caught.value.reason == "protocol_version"


def test_payload_survives_the_round_trip() -> None:
    payload = OpenPayload("token", b"d" * 32, 7, 1, 256, 65536, layout_payload(LAYOUT))
    frame = encode_frame(FrameHeader(FrameType.OPEN, transfer_key("t")), payload)
    header = unpack_header(frame[:HEADER_BYTES])
    assert header.wire_bytes == len(frame) - HEADER_BYTES
    assert decode_payload(OpenPayload, frame[HEADER_BYTES:]) == payload


def test_payload_over_its_limit_is_neither_sent_nor_accepted() -> None:
    with pytest.raises(ProtocolError):
        encode_frame(FrameHeader(FrameType.ACCEPT), AcceptPayload(65536, bytes(MAX_CONTROL_BYTES)))
    long_text = encode_frame(FrameHeader(FrameType.FAIL), ReasonPayload("r" * 300))
    with pytest.raises(ProtocolError):
        decode_payload(ReasonPayload, long_text[HEADER_BYTES:])


def test_transfer_keys_differ_for_different_ids() -> None:
    keys = {transfer_key(f"transfer-{i}") for i in range(1000)}
    assert len(keys) == 1000
    assert all(len(key) == 16 for key in keys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensors": LAYOUT.tensors[:1]}, "tensor 'k' of layer 1 is missing there"),
        ({"tensors": (*LAYOUT.tensors, replace(LAYOUT.tensors[0], layer=5))}, "tensor 'k' of layer 5 is extra there"),
        ({"tensors": (replace(LAYOUT.tensors[0], dtype="float16"), LAYOUT.tensors[1])}, "dtype 'float16' there"),
        ({"tensors": (replace(LAYOUT.tensors[0], row_shape=(4, 64)), LAYOUT.tensors[1])}, "shape (4, 64) there"),
        ({"tensors": (LAYOUT.tensors[0], replace(LAYOUT.tensors[1], window_tokens=9))}, "window_tokens 9 there"),
        ({"tensors": LAYOUT.tensors[::-1]}, "another order"),
        ({"prefill_chunk_tokens": 512}, "prefill chunks of 512 tokens there"),
    ],
)
def test_layout_difference_names_the_first_one(change: dict[str, object], words: str) -> None:
    theirs = replace(LAYOUT, **change)
    payload = OpenPayload("", b"", 1, theirs.version, theirs.prefill_chunk_tokens, 65536, layout_payload(theirs))
    difference = layout_difference(LAYOUT, payload)
    assert difference is not None
    assert words in difference


def test_equal_layouts_do_not_differ() -> None:
    payload = OpenPayload("", b"", 1, LAYOUT.version, LAYOUT.prefill_chunk_tokens, 65536, layout_payload(LAYOUT))
    assert layout_difference(LAYOUT, payload) is None
