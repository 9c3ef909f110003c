"""The fingerprint of a model folder as an engine runs it: equal ones mean exchangeable KV."""

from __future__ import annotations

import json
from pathlib import Path

import blake3

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
# Keys of config.json that say where a file came from, not what the model computes.
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def fingerprint(folder: Path, *engine: object) -> str:
    """32 hex digits over weights, config, tokenizer, template, and `engine`: all else that decides what KV means.

    The parts of `engine` count by their `repr`.
    """
    digest = blake3.blake3(repr(engine).encode())
    config = json.loads((folder / "config.json").read_text())
    identity = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    digest.update(json.dumps(identity, sort_keys=True).encode())
    present = [folder / name for name in _FILES if (folder / name).is_file()]
    for path in (*present, *sorted(folder.glob("*.safetensors"))):
        # Each file by name and digest, so that bytes cannot move from one to the next unnoticed.
        content = blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).digest()
        digest.update(path.name.encode() + b"\0" + content)
    return digest.hexdigest(length=16)
