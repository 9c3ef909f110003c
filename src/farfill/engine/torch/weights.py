"""Reading a model folder with transformers: what is not whole, or not this model, is refused in one line.

transformers makes up what a checkpoint lacks and drops what it does not expect. Either gives text that looks like the
model's and is not, so here both are errors, but for the parts named in `_SPARE`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig
from transformers.utils import logging

from farfill.core.errors import ConfigError

_SHOWN = 6
# Of other tasks than writing text: towers of models that are used without them here, and heads that guess ahead.
_SPARE = re.compile(
    r"(^|\.)(vision\w*|visual|audio\w*|embed_vision|embed_audio|image_newline|mm_\w+|multi_modal_projector|mtp\w*)(\.|$)"
    r"|(^|\.)rotary_emb\.inv_freq$"
)
_AGAIN = "fetch it again (`farfill model fetch`)"


def open_config(folder: Path) -> Any:
    """The config of a model folder. Raises ConfigError."""
    try:
        given = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {folder}: config.json is not valid JSON ({error}); {_AGAIN}") from error
    kind = given.get("model_type") if isinstance(given, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"model.path: {folder}: config.json has no model_type; name a folder of a Hugging Face model")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model.path: {folder}: config.json: model_type {kind} is not one that transformers "
            f"{transformers.__version__} knows; take another model, or a Farfill with a newer transformers"
        )
    try:
        with _quiet():
            return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a config's class raises whatever it trips over
        raise ConfigError(
            f"model.path: {folder}: config.json: model_type {kind}: {_line(error)}; correct it, or {_AGAIN}"
        ) from error


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises ConfigError."""
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exceptions
        raise ConfigError(f"model.path: {folder}: tokenizer.json cannot be read ({_line(error)}); {_AGAIN}") from error


def load_weights(kind: Any, folder: Path, model_type: str, **options: Any) -> Any:
    """The model of class `kind` with all its weights from `folder`; `options` as for `from_pretrained`.

    Raises ConfigError naming the file, the tensors or the package at fault.
    """
    _require_whole(folder)
    where = f"model.path: {folder}"
    try:
        with _quiet():
            # A model folder is complete; asking the hub for what is missing would only hide that.
            net, found = kind.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are named below
                output_loading_info=True,
                **options,
            )
    except ImportError as error:
        raise ConfigError(
            f"{where}: config.json: model_type {model_type} wants a package that is not here: {_line(error)}"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{where}: transformers cannot load this model (model_type {model_type}): {_line(error)}; "
            f"compare config.json with the weights, or {_AGAIN}"
        ) from error
    _require_all(where, model_type, found)
    return net


def _require_whole(folder: Path) -> None:
    """Every file can be opened, and those of the index are there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"model.path: {folder}: {index.name} is no index of weights; {_AGAIN}") from error
        missing = sorted(name for name in named if not (folder / str(name)).is_file())
        if missing:
            raise ConfigError(
                f"model.path: {folder} lacks {_some(missing)}, which {index.name} names; fetch the folder again"
            )
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model.path: {folder}: {path.name} is not whole ({_line(error)}); {_AGAIN}") from error


def _require_all(where: str, model_type: str, found: dict[str, Any]) -> None:
    faults: list[str] = []
    if found["missing_keys"]:
        faults.append(f"the weights lack {_some(found['missing_keys'])}")
    if found["mismatched_keys"]:
        shapes = (f"{name} ({tuple(has)}, not {tuple(wants)})" for name, has, wants in found["mismatched_keys"])
        faults.append(f"of another shape than config.json says are {_some(shapes)}")
    unexpected = [name for name in found["unexpected_keys"] if not _SPARE.search(name)]
    if unexpected:
        faults.append(f"config.json has no place for {_some(unexpected)}")
    if faults:
        raise ConfigError(
            f"{where}: config.json (model_type {model_type}) and the *.safetensors do not fit together: "
            f"{'; '.join(faults)}. Fetch the folder again (`farfill model fetch`), or correct its config.json"
        )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def _line(error: Exception) -> str:
    """The first line of what it says, without the dot."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".")[:300] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and reports of transformers: what counts of them is an error here."""
    before = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
