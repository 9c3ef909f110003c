"""Shared memory of requests: bounded, removed when released, swept when its owner was killed."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from farfill.core.errors import CapacityError, InvalidRequestError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.engine.vllm.files import KVFolder, folder_problem
from farfill.kv.manifest import build_manifest

LAYOUT = KVLayout((TensorLayout(0, "kv", TensorKind.FULL, "uint8", (64,), row_tokens=4),), 8)
MANIFEST = build_manifest(LAYOUT, 16)


def test_files_count_until_released_and_views_stay_readable() -> None:
    folder = KVFolder(2 * MANIFEST.total_bytes)
    first, second = folder.open(MANIFEST), folder.open(MANIFEST)
    view = first.buffer(1)
    view[:3] = b"abc"
    assert first.path.read_bytes()[128:131] == b"abc"
    with pytest.raises(CapacityError) as caught:
        folder.open(MANIFEST)
    assert caught.value.reason == "kv_memory"
    first.release()
    first.release()
    assert not first.path.exists()
    assert bytes(view[:3]) == b"abc"
    assert folder.used_bytes == second.nbytes
    assert folder.orphans() == []
    second.release()
    folder.close()
    assert not folder.path.exists()


def test_a_prompt_larger_than_all_there_is_names_the_setting() -> None:
    folder = KVFolder(100)
    with pytest.raises(InvalidRequestError, match=r"engine\.kv_cache_mb"):
        folder.open(MANIFEST)
    folder.close()


def test_a_full_disk_is_no_room_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = KVFolder(1 << 20)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match="No space left"):
        folder.open(MANIFEST)
    assert (folder.used_bytes, folder.orphans()) == (0, [])
    assert list(folder.path.iterdir()) == []
    folder.close()


def test_a_file_without_an_owner_is_seen() -> None:
    folder = KVFolder(1 << 20)
    file = folder.open(MANIFEST)
    os.link(file.path, f"{file.path}.1.rank0")
    assert folder.orphans() == []
    file.release()
    assert folder.orphans() == [f"{file.key}.1.rank0"]
    folder.close()


def test_folders_of_killed_engines_are_removed() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = Path("/dev/shm") / f"farfill-vllm-{ended.pid}-left"
    left.mkdir(exist_ok=True)
    KVFolder(1).close()
    assert not left.exists()


def test_only_a_private_folder_of_a_worker_may_be_attached_to(tmp_path: Path) -> None:
    folder = KVFolder(1 << 20)
    try:
        assert folder_problem(str(folder.path)) == ""
        os.chmod(folder.path, 0o750)
        assert "private" in folder_problem(str(folder.path))
    finally:
        folder.close()
    assert folder_problem(str(folder.path)) == "No such file or directory"
    (tmp_path / "other").mkdir(mode=0o700)
    assert "worker" in folder_problem(str(tmp_path / "other"))
    (tmp_path / "farfill-vllm-1-link").symlink_to(tmp_path / "other")
    assert "worker" in folder_problem(str(tmp_path / "farfill-vllm-1-link"))
    (tmp_path / "farfill-vllm-1-file").touch(mode=0o600)
    assert "private" in folder_problem(str(tmp_path / "farfill-vllm-1-file"))
