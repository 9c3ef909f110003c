"""The cluster file as one of several models sees it: as if that model were the only one."""

from __future__ import annotations

from collections.abc import Iterator

from farfill.config.model import ClusterConfig, ModelConfig
from farfill.config.problems import KeyPath, Problem
from farfill.core.cluster import Role

FIRST = ""
"""Key of the section `model`; the others have their keys under `models`."""


def models_of(config: ClusterConfig) -> dict[str, ModelConfig]:
    """All models by key; the first one is that of clients who name none, where that is allowed."""
    return {FIRST: config.model, **config.models}


def config_for_model(config: ClusterConfig, key: str) -> ClusterConfig:
    """`config` with this model as `model`, and its own threshold where it has one. Other models are left out."""
    model = models_of(config)[key]
    routing = config.routing
    if model.remote_prefill_threshold_tokens is not None:
        routing = routing.model_copy(update={"remote_prefill_threshold_tokens": model.remote_prefill_threshold_tokens})
    return config.model_copy(update={"model": model, "models": {}, "routing": routing})


def config_for_worker(config: ClusterConfig, name: str) -> ClusterConfig:
    """`config` with the worker's model as `model`."""
    return config_for_model(config, config.workers[name].model or FIRST)


def model_problems(config: ClusterConfig) -> Iterator[Problem]:
    """Names that two models share, workers of unknown models, models that nobody decodes."""
    taken: dict[str, KeyPath] = {}
    for key, model in models_of(config).items():
        path = _path(key)
        for field, name in (("name", model.name), *(("aliases", alias) for alias in model.aliases)):
            if name in taken:
                other = ".".join(str(part) for part in taken[name])
                yield Problem(
                    (*path, field), f"{name!r} is the name of {other}, too", "give each model names of its own"
                )
            taken.setdefault(name, path)
    for name, worker in config.workers.items():
        if worker.model is not None and worker.model not in config.models:
            known = ", ".join(config.models) or "none"
            yield Problem(
                ("workers", name, "model"),
                f"there is no model {worker.model!r} under models",
                f"there are: {known}; leave it out for the one of model",
            )
    for key in models_of(config) if config.models else ():
        if not any((w.model or FIRST) == key and w.role is not Role.PREFILL for w in config.workers.values()):
            fix = "add a decode worker" + (f" with model: {key}" if key else " without model")
            yield Problem(_path(key), "no worker decodes this model", fix)


def _path(key: str) -> KeyPath:
    return ("models", key) if key else ("model",)
