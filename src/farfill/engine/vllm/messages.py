"""What the connector inside vLLM and the engine beside it tell each other. Both run on one host as one user.

Bytes of KV never pass this way: they lie in files of shared memory that the engine makes, one per request, with the
pieces of the request's manifest one after the other. The connector sends messages over a Unix socket, each a
4-byte big-endian length and one msgpack struct; what it needs to know comes with the request, in
`kv_transfer_params["farfill"]`.
"""

from __future__ import annotations

import hashlib
import socket
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from farfill.kv.manifest import Manifest

CACHE_VERSION = 1
PARAMS_KEY = "farfill"
LINE_SOCKET = "line.sock"
_ALIGN_BYTES = 64
_MAX_BYTES = 16 * 1024 * 1024


class CacheTensor(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of vLLM's cache: `block_bytes` for each block of `block_tokens` tokens (0: one state).

    `kind` is a `TensorKind` value; `window_tokens` are those before the next token that it may look at. `by_head`: a
    block is one head after the other, so that those of all ranks, one after the other, are the block of a single rank.
    """

    layer: int
    name: str
    kind: str
    block_tokens: int
    block_bytes: int
    window_tokens: int = 0
    by_head: bool = False


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First message of a vLLM worker process: what its cache is made of, and all that decides what its bytes mean.

    The rest is how vLLM was started: `model` as it was told, `kv_bytes` of one rank's cache, whether it schedules by
    priority, and what makes its grammars. `tells_begun`: it sends `Begun` and `Loaded`. `images`: how it was told to
    process images otherwise than the model's folder says.
    """

    cache_version: int
    vllm_version: str
    platform: str
    dtype: str
    rank: int
    ranks: int
    num_blocks: int
    max_model_len: int
    tensors: tuple[CacheTensor, ...]
    model: str = ""
    kv_bytes: int = 0
    prioritizes: bool = True
    grammar_backend: str = "guidance"
    tells_begun: bool = False
    images: str = ""


class Exported(msgspec.Struct, tag="exported", frozen=True):
    """These pieces of request `key` are in its file, as far as they are this rank's."""

    key: str
    pieces: tuple[int, ...]
    rank: int = 0


class Alive(msgspec.Struct, tag="alive", frozen=True):
    """A step ended."""


class ExportFailed(msgspec.Struct, tag="export_failed", frozen=True):
    """The pieces of request `key` will not come."""

    key: str
    detail: str


class LoadFailed(msgspec.Struct, tag="load_failed", frozen=True):
    """The KV of request `key` was `refused`, or could not be copied: vLLM computes its prompt, or fails it."""

    key: str
    detail: str
    refused: bool = False


class Begun(msgspec.Struct, tag="begun", frozen=True):
    """vLLM begins with request `key`, and has the KV of the first `cached_tokens` of its prompt in its own cache."""

    key: str
    cached_tokens: int


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """The KV of request `key` is in vLLM's cache, as far as it is this rank's."""

    key: str
    rank: int = 0


Message = Hello | Exported | Alive | ExportFailed | LoadFailed | Begun | Loaded

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class ExportParams(msgspec.Struct, tag="export", frozen=True):
    """Export the KV of the whole prompt of this request (`num_tokens`) into `file`."""

    key: str
    file: str
    num_tokens: int


class ImportParams(msgspec.Struct, tag="import", frozen=True):
    """The first `valid_tokens` of the prompt's first `num_tokens` tokens are in `file`, which has `file_bytes`.

    `digest`, where it is given, is that of the prompt the KV was computed for: whoever asks sent text, not token ids.
    """

    key: str
    file: str
    file_bytes: int
    num_tokens: int
    valid_tokens: int
    digest: str = ""


class WatchParams(msgspec.Struct, tag="watch", frozen=True):
    """Tell when this request begins (`Begun`); imports are told of in any case."""

    key: str


class AttachParams(msgspec.Struct, tag="attach", frozen=True):
    """From now on open the line in `folder`, and take and leave KV there."""

    folder: str
    chunk_tokens: int


Params = ExportParams | ImportParams | WatchParams | AttachParams


def attach_params(params: AttachParams) -> dict[str, object]:
    """`kv_transfer_params` of a request that only tells the connector where we are."""
    return {"do_remote_decode": False, "do_remote_prefill": False, PARAMS_KEY: msgspec.to_builtins(params)}


def export_params(params: ExportParams) -> dict[str, object]:
    """`kv_transfer_params` of a prefill, in the form stock vLLM routers use."""
    return {"do_remote_decode": True, "do_remote_prefill": False, PARAMS_KEY: msgspec.to_builtins(params)}


def import_params(params: ImportParams) -> dict[str, object]:
    """`kv_transfer_params` of a generation whose KV is there."""
    return {"do_remote_decode": False, "do_remote_prefill": True, PARAMS_KEY: msgspec.to_builtins(params)}


def watch_params(params: WatchParams) -> dict[str, object]:
    """`kv_transfer_params` of a generation without KV from elsewhere."""
    return {"do_remote_decode": False, "do_remote_prefill": False, PARAMS_KEY: msgspec.to_builtins(params)}


def read_params(raw: object) -> Params | None:
    """Ours in `kv_transfer_params`; None when there are none. Raises msgspec.ValidationError."""
    if not isinstance(raw, dict) or raw.get(PARAMS_KEY) is None:
        return None
    return msgspec.convert(raw[PARAMS_KEY], Params)


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Tells prompts apart, all tokens counted."""
    return hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=16).hexdigest()


def piece_offsets(manifest: Manifest) -> tuple[list[int], int]:
    """Where each piece begins in a request's file, and how long the file is."""
    offsets: list[int] = []
    end = 0
    for piece in manifest.pieces:
        offsets.append(end)
        end += -(-piece.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return offsets, end


def send(sock: socket.socket, message: Message) -> None:
    """Send one message, whole."""
    body = _encoder.encode(message)
    sock.sendall(len(body).to_bytes(4, "big") + body)


class Inbox:
    """Cuts the bytes of one connection into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with `data`. Raises ValueError for what is none."""
        self._data += data
        while len(self._data) >= 4:
            length = int.from_bytes(self._data[:4], "big")
            if length > _MAX_BYTES:
                raise ValueError(f"a message of {length} bytes")
            if len(self._data) < 4 + length:
                return
            body = bytes(self._data[4 : 4 + length])
            del self._data[: 4 + length]
            yield _decoder.decode(body)
