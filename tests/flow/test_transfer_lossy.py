"""KV that travels lossy on request: rows as agreed, states exact, still checked bit for bit, and never by surprise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.flow.test_transfer_corruption import FlippingTransport

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.core.layout import TensorLayout
from farfill.kv.codec import Codec
from farfill.kv.lossy import row_groups
from farfill.kv.manifest import Manifest
from farfill.transfer.protocol import ReceiveResult
from farfill.transport.memory import MemoryNetwork
from farfill.wire.frames import MIN_CHUNK_BYTES
from support.transfer_harness import (
    DECODE,
    HYBRID,
    PREFILL,
    BytesSlot,
    Ends,
    config,
    two_ends,
)

NUM_TOKENS = 1500


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    async with two_ends(tmp_path, HYBRID) as ends:
        yield ends


def float_pieces(manifest: Manifest) -> list[tuple[int, memoryview]]:
    """Normally distributed numbers in each tensor's dtype."""
    rng = np.random.default_rng(0)
    pieces = []
    for piece in manifest.pieces:
        wide = manifest.layout.tensors[piece.tensor].dtype == "float32"
        numbers = rng.standard_normal(piece.nbytes // (4 if wide else 2), dtype=np.float32)
        pieces.append((piece.index, memoryview((numbers if wide else _bfloat16(numbers)).tobytes())))
    return pieces


def _bfloat16(numbers: np.ndarray) -> np.ndarray:
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def floats(data: bytes | bytearray | memoryview, tensor: TensorLayout) -> np.ndarray:
    if tensor.dtype == "float32":
        return np.frombuffer(data, np.float32)
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


async def move(
    ends: Ends, pieces: list[tuple[int, memoryview]] | None = None
) -> tuple[ReceiveResult, object, BytesSlot, list[tuple[int, memoryview]]]:
    """One transfer and how it ended for both."""
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    pieces = pieces or float_pieces(slot.manifest)
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    outgoing.offer(pieces)
    outgoing.finish()
    result, sent = await asyncio.gather(expected.wait(), outgoing.wait(), return_exceptions=True)
    assert isinstance(result, ReceiveResult)
    return result, sent, slot, pieces


def set_both(ends: Ends, **settings: object) -> None:
    ends.receiver = ends.make_receiver(config=config(**settings))
    ends.sender = ends.make_sender(config=config(**settings))


@pytest.mark.parametrize(("lossy", "tolerance"), [("int8", 0.02), ("fp8", 0.08)])
@pytest.mark.parametrize("compression", ["none", "zstd", "auto"])
async def test_rows_arrive_nearly_and_states_exactly(
    ends: Ends, lossy: str, tolerance: float, compression: str
) -> None:
    set_both(ends, lossy=lossy, compression=compression)
    await ends.start()
    result, sent, slot, pieces = await move(ends)
    assert result.complete
    assert not isinstance(sent, BaseException)
    for piece, (_, data) in zip(slot.manifest.pieces, pieces, strict=True):
        tensor = slot.manifest.layout.tensors[piece.tensor]
        held = slot.memory[piece.index]
        if row_groups(tensor) is None:
            assert held == data, tensor
        else:
            assert held != data, tensor
            assert np.abs(floats(held, tensor) - floats(data, tensor)).max() < tolerance * 5
    assert result.stats.codec == lossy
    assert result.stats.wire_bytes < 0.6 * result.stats.raw_bytes
    assert ends.sender_seen.counts[f"sent:{lossy}"] == ends.receiver_seen.counts[f"received:{lossy}"] > 0


async def test_numbers_that_are_not_finite_make_their_chunk_travel_exactly(ends: Ends) -> None:
    set_both(ends, lossy="int8")
    await ends.start()
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    pieces = float_pieces(slot.manifest)
    broken = bytearray(pieces[0][1])
    broken[0:2] = (0x7FC0).to_bytes(2, "little")
    pieces[0] = (0, memoryview(bytes(broken)))
    result, _, slot, _ = await move(ends, pieces)
    assert result.complete
    assert slot.memory[0][:MIN_CHUNK_BYTES] == broken[:MIN_CHUNK_BYTES], "the first chunk, with the NaN in it"
    assert slot.memory[1] != pieces[1][1]
    assert ends.sender_seen.counts["sent:int8"] > 0


@pytest.mark.parametrize("lossy", ["int8", "fp8"])
async def test_flipped_bits_are_found_and_resent(ends: Ends, lossy: str) -> None:
    settings = {"lossy": lossy, "connections": 1}
    network = MemoryNetwork()
    ends.receiver = ends.make_receiver(
        listen="decode", transport=network.transport(ends.identity(DECODE, "decode")), config=config(**settings)
    )
    transport = FlippingTransport(network.transport(ends.identity(PREFILL, "prefill")), flips=3)
    ends.sender = ends.make_sender(transport=transport, config=config(**settings))
    await ends.start()
    result, sent, _, _ = await move(ends)
    assert result.complete
    assert not isinstance(sent, BaseException)
    assert ends.receiver_seen.counts["resent:checksum"] >= 1


@pytest.mark.parametrize(("there", "here"), [("int8", "none"), ("none", "int8"), ("int8", "fp8")])
async def test_ends_that_do_not_agree_move_nothing_and_say_why(ends: Ends, there: str, here: str) -> None:
    ends.receiver = ends.make_receiver(config=config(lossy=here))
    ends.sender = ends.make_sender(config=config(lossy=there))
    await ends.start()
    result, sent, slot, _ = await move(ends)
    assert (result.complete, result.failure) == (False, FallbackReason.FINGERPRINT_MISMATCH)
    assert f"kv_transfer.lossy is {there} there, {here} here" in result.detail
    assert isinstance(sent, TransferError)
    assert ends.receiver_seen.counts["refused:lossy_mismatch"] == 1
    assert not any(any(memory) for memory in slot.memory)


async def test_a_sender_that_quantises_without_saying_so_is_cut_off(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPEN says none, chunks come as int8: nothing of it lands."""
    set_both(ends)
    monkeypatch.setattr("farfill.transfer.encoder.lossy_codec", lambda config: Codec.INT8)
    await ends.start()
    ends.receiver_seen.counts.clear()
    result, sent, slot, _ = await move(ends)
    assert not result.complete
    assert isinstance(sent, TransferError)
    rows = [p.index for p in slot.manifest.pieces if row_groups(slot.manifest.layout.tensors[p.tensor]) is not None]
    assert not any(any(slot.memory[index]) for index in rows)
