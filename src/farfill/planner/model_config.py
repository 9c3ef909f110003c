"""Reads a Hugging Face config.json for planning: finds the file, and takes fields out of it with errors that name them.

Nothing is fetched: a hub id works only when its config.json is in the local cache.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from farfill.config.paths import hugging_face_hub
from farfill.core.errors import ConfigError

MAX_CONFIG_BYTES = 16 * 1024 * 1024
# Where multimodal and wrapped models keep the part that has the KV cache.
_INNER = ("text_config", "llm_config", "language_config", "thinker_config", "talker_config", "decoder")

Json = Mapping[str, object]
_T = TypeVar("_T")


MAX_NUMBER = 1 << 31
_KIND_WORDS: dict[type, str] = {int: "whole numbers", str: "texts"}
_MOST_SHOWN = 80


class UnknownArchitectureError(ConfigError):
    """The model's KV cache is not known, or a field it depends on is missing or senseless."""

    reason = "architecture_unknown"


def read_model_config(model: str) -> tuple[Json, Path]:
    """The config of a file, a folder, or a cached hub id, and where it was. Raises ConfigError naming what to do."""
    path = _find(model)
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes; this is no config.json")
        value = json.loads(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply; this is no config.json") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a model's config.json: it holds no JSON object")
    return cast("Json", value), path


def _find(model: str) -> Path:
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"{path.parent} has no config.json; name the model's folder or its config.json")
        return path
    if path.is_file():
        return path
    cached = _cached(model)
    if cached is not None:
        return cached
    raise ConfigError(
        f"{model}: no such file or folder, and not in the local Hugging Face cache; nothing is fetched here:"
        " download the model's config.json and name it"
    )


def _cached(repo: str) -> Path | None:
    """config.json of hub id `repo` in the cache: the revision `main` refers to, or else the newest snapshot."""
    if repo.count("/") > 1 or repo.startswith((".", "/")):
        return None
    folder = hugging_face_hub() / f"models--{repo.replace('/', '--')}"
    ref = folder / "refs" / "main"
    if ref.is_file():
        found = folder / "snapshots" / ref.read_text().strip() / "config.json"
        if found.is_file():
            return found
    snapshots = sorted(folder.glob("snapshots/*/config.json"), key=lambda p: p.stat().st_mtime)
    return snapshots[-1] if snapshots else None


class Fields:
    """The fields of the text part of a config. Getters raise UnknownArchitectureError naming model type and field."""

    def __init__(self, config: Json) -> None:
        inner = text_config(config)
        self._config = inner
        found = inner.get("model_type") or config.get("model_type")
        if not isinstance(found, str) or not found:
            raise UnknownArchitectureError(
                "model_type is missing from the config, so its KV cache is not known; is this a model's config.json?"
            )
        self.model_type = found
        self._outer = config

    def dtype(self, known: Collection[str]) -> str | None:
        """The model's type, one of `known`; None: not given."""
        for part in (self._config, self._outer):
            for name in ("dtype", "torch_dtype"):
                value = part.get(name)
                if value is None or value in ("", "auto"):
                    continue
                found = value.removeprefix("torch.") if isinstance(value, str) else ""
                if found not in known:
                    fix = "say what the cache is kept in: --kv-dtype, in a plan file model.kv_dtype"
                    raise self.error(name, f"is {value!r}, not one of {', '.join(known)},", fix)
                return found
        return None

    def has(self, *names: str) -> bool:
        """Whether any of `names` is given, and not null."""
        return any(self._config.get(name) is not None for name in names)

    def int(self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_NUMBER) -> int:
        """The first of `names` that is given."""
        for name in names:
            value = self._config.get(name)
            if value is None or value == "auto":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise self.error(name, f"is {value!r}, not a whole number")
            if value < least:
                raise self.error(name, f"is {value}, but must be at least {least}")
            if value > most:
                raise self.error(name, f"is {value}, but may be at most {most}")
            return value
        if default is None:
            raise self.error(names[0], "is missing")
        return default

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A true or false."""
        value = self._config.get(name)
        if value is None:
            return default
        if value not in (True, False):  # 0 and 1 are taken too
            raise self.error(name, f"is {value!r}, neither true nor false")
        return bool(value)

    def text(self, name: str, *, or_int: bool = False) -> str | None:
        """A text; None when it is not given, or, with `or_int`, a whole number."""
        value = self._config.get(name)
        if value is None or isinstance(value, str):
            return value
        if or_int and isinstance(value, int):
            return None
        raise self.error(name, f"is {value!r}, not a text")

    def ints(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None when it is not given."""
        return self._list(name, int)

    def texts(self, *names: str) -> tuple[str, ...] | None:
        """The first list of texts that is given."""
        for name in names:
            found = self._list(name, str)
            if found is not None:
                return found
        return None

    def group(self, name: str) -> Fields | None:
        """A group of fields within this one."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"is {value!r}, not a group of fields")
        return Fields({"model_type": self.model_type, **cast("dict[str, object]", value)})

    def of_layer(self, layer: int) -> Fields:
        """These fields as they are in layer number `layer`."""
        differing = self._config.get("per_layer_config")
        own = cast("Json", differing).get(str(layer)) if isinstance(differing, dict) else None
        return Fields({**self._config, **cast("Json", own)}) if isinstance(own, dict) else self

    def error(self, name: str, what: str, fix: str = "") -> UnknownArchitectureError:
        """To be raised: what is wrong with the field `name`, and what to do."""
        then = f"; {fix}" if fix else ""
        return UnknownArchitectureError(f"{name} {what} in the config of this {self.model_type} model{then}")

    def _list(self, name: str, kind: type[_T]) -> tuple[_T, ...] | None:
        value = self._config.get(name)
        if value is None:
            return None
        items = cast("Sequence[object]", value) if isinstance(value, list) else [None]
        wrong = next((i for i in items if not isinstance(i, kind) or (kind is int and isinstance(i, bool))), self)
        if wrong is not self:
            raise self.error(f"{name}:", f"{_shown(value)} is not a list of {_KIND_WORDS[kind]}")
        return tuple(cast("Sequence[_T]", items))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def text_config(config: Json) -> Json:
    """The innermost part of `config` that describes a text decoder."""
    while True:
        inner = next((part for name in _INNER if isinstance(part := config.get(name), dict)), None)
        if inner is None:
            return config
        config = cast("Json", inner)
