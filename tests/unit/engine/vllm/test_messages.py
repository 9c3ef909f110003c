"""What connector and engine tell each other, and what vLLM says of itself."""

from __future__ import annotations

import socket

import msgspec
import pytest

from farfill.core.errors import ModelUnsupportedError
from farfill.core.layout import TensorKind
from farfill.engine.vllm.health import read_vitals
from farfill.engine.vllm.layout import identity_of, layout_of, places_of, ranks_of
from farfill.engine.vllm.messages import (
    Alive,
    CacheTensor,
    Exported,
    ExportParams,
    Hello,
    ImportParams,
    Inbox,
    Message,
    export_params,
    import_params,
    read_params,
    send,
)

TENSORS = (
    CacheTensor(0, "full", "full", 128, 4096),
    CacheTensor(1, "window", "window", 128, 4096, 127),
    CacheTensor(2, "state", "recurrent", 0, 999),
)


def _hello(rank: int = 0, ranks: int = 1, tensors: tuple[CacheTensor, ...] = TENSORS) -> Hello:
    return Hello(1, "0.32", "cpu:amx", "auto/float32", rank, ranks, 100, 4096, tensors)


def test_messages_come_whole_whatever_the_pieces() -> None:
    ours, theirs = socket.socketpair()
    messages: list[Message] = [_hello(), Alive(), Exported("k", (1, 2, 3))]
    with ours, theirs:
        for message in messages:
            send(ours, message)
        data = theirs.recv(65536)
    inbox = Inbox()
    assert [message for byte in data for message in inbox.feed(bytes([byte]))] == messages
    with pytest.raises(ValueError, match="bytes"):
        list(inbox.feed(b"\xff\xff\xff\xff"))


def test_params_survive_the_way_through_vllm_and_others_are_nobodys() -> None:
    out, back = ExportParams("k", "/f", 7), ImportParams("k", "/f", 640, 7, 6)
    assert read_params(export_params(out)) == out
    assert read_params(import_params(back)) == back
    assert export_params(out)["do_remote_decode"] is True
    for foreign in (None, "x", {"do_remote_prefill": True}, {"farfill": None}):
        assert read_params(foreign) is None
    with pytest.raises(msgspec.ValidationError):
        read_params({"farfill": {"type": "import", "key": 1}})


def test_layout_has_a_row_per_block_and_chunks_of_whole_blocks() -> None:
    layout = layout_of([_hello()], 300)
    assert layout.prefill_chunk_tokens == 384
    assert [(t.kind, t.row_tokens, t.row_bytes, t.window_tokens) for t in layout.tensors] == [
        (TensorKind.FULL, 128, 4096, 0),
        (TensorKind.WINDOW, 128, 4096, 127),
        (TensorKind.RECURRENT, 1, 999, 0),
    ]
    mixed = layout_of([_hello(tensors=(*TENSORS, CacheTensor(3, "other", "full", 96, 10)))], 100)
    assert mixed.prefill_chunk_tokens == 384
    two = layout_of([_hello(0, 2), _hello(1, 2)], 128)
    assert [t.name for t in two.tensors if t.layer == 0] == ["full.rank0of2", "full.rank1of2"]
    with pytest.raises(ModelUnsupportedError):
        layout_of([_hello(tensors=())], 128)


def test_heads_of_several_ranks_are_one_row_and_states_are_not() -> None:
    """So many heads of KV are exchanged between engines of any number of ranks; states are the same number's only."""
    tensors = (CacheTensor(0, "full", "full", 128, 4096, 0, True), CacheTensor(1, "state", "recurrent", 0, 999))
    halves = (CacheTensor(0, "full", "full", 128, 2048, 0, True), CacheTensor(1, "state", "recurrent", 0, 500))
    two = [_hello(rank, 2, halves) for rank in range(2)]
    layout = layout_of(two, 128)
    assert layout.tensors[0] == layout_of([_hello(tensors=tensors)], 128).tensors[0]
    assert [t.name for t in layout.tensors] == ["full", "state.rank0of2", "state.rank1of2"]
    assert [places_of(hello) for hello in two] == [[(0, 0), (1, 0)], [(0, 2048), (2, 0)]]
    assert ranks_of(two[0]) == (2, 1, 1)
    with pytest.raises(ModelUnsupportedError, match="ranks keep different caches"):
        layout_of([_hello(0, 2, halves), _hello(1, 2, tensors)], 128)


def test_identity_differs_with_all_that_decides_what_bytes_mean() -> None:
    base = _hello()
    changes = {"cache_version": 2, "vllm_version": "0.33", "platform": "cpu:avx2", "dtype": "auto/bfloat16"}
    seen = {identity_of(base)} | {
        identity_of(msgspec.structs.replace(base, **{name: value})) for name, value in changes.items()
    }
    assert len(seen) == 1 + len(changes)
    assert identity_of(msgspec.structs.replace(base, num_blocks=5)) == identity_of(base)


def test_vitals_are_summed_over_engines_and_only_vllms_are_relayed() -> None:
    text = b"""# HELP python_info Python
python_info 1.0
# HELP vllm:kv_cache_usage_perc usage
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_queries_total{engine="1"} 20.0
vllm:prefix_cache_hits_total{engine="0"} 30.0
vllm:num_preemptions_total{engine="0"} 2.0
vllm:iteration_tokens_total_count{engine="0"} 7.0
http_requests_total 5.0
"""
    vitals = read_vitals(text)
    assert vitals.kv_usage == 0.25
    assert (vitals.totals.hit_tokens, vitals.totals.miss_tokens) == (30, 90)
    assert (vitals.totals.set_back_growth, vitals.totals.decode_steps) == (2, 7)
    lines = vitals.exposition.splitlines()
    assert len(lines) == 8
    assert all(b"vllm:" in line for line in lines)
    with pytest.raises(ValueError, match="could not convert"):
        read_vitals(b"vllm:kv_cache_usage_perc x\n")
