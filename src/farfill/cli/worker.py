"""`farfill worker`: any worker of the cluster file, with an engine of its own if need be."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from farfill.cli.decode import run_worker_named
from farfill.config.load import LoadedConfig, load_config
from farfill.config.model import EngineConfig
from farfill.core.errors import ConfigError


class EngineKind(StrEnum):
    """`engine.type`."""

    TORCH = "torch"
    VLLM = "vllm"


def worker(
    config: Annotated[Path, typer.Option(help="Cluster file.")] = Path("cluster.yaml"),
    name: Annotated[str | None, typer.Option(help="Which worker, if the file has several.")] = None,
    engine: Annotated[EngineKind | None, typer.Option(help="Instead of engine.type.")] = None,
    attach: Annotated[
        str | None, typer.Option(help="URL of a vLLM that runs already on this host, instead of engine.attach.")
    ] = None,
) -> None:
    """Run a worker of any role."""
    loaded = with_engine(load_config(config), engine, attach)
    run_worker_named(loaded, pick(loaded, name))


def with_engine(loaded: LoadedConfig, engine: EngineKind | None, attach: str | None) -> LoadedConfig:
    """The cluster file with what the command line says of the engine. Raises ConfigError."""
    said: dict[str, Any] = {}
    if engine is not None:
        said["type"] = str(engine)
    if attach is not None:
        said["attach"] = attach
    if not said:
        return loaded
    try:
        section = EngineConfig.model_validate({**loaded.config.engine.model_dump(), **said})
    except ValidationError as error:
        raise ConfigError(f"--attach: {attach!r} is no http://HOST:PORT and no unix:/PATH") from error
    if section.attach is not None and section.type != "vllm":
        raise ConfigError("--attach needs --engine vllm, or engine.type: vllm")
    return replace(loaded, config=loaded.config.model_copy(update={"engine": section}))


def pick(loaded: LoadedConfig, name: str | None) -> str:
    """Which worker to run. Raises ConfigError when the file has several and none is named."""
    workers = loaded.config.workers
    if name is None and len(workers) == 1:
        return next(iter(workers))
    if name is None:
        raise ConfigError(f"{loaded.path}: several workers; say --name with one of: {', '.join(workers)}")
    if name not in workers:
        raise ConfigError(f"{loaded.path}: no worker is named {name}; known: {', '.join(workers)}")
    return name
