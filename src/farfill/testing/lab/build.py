"""Compiles the lab's packet relay on first use and keeps it in Farfill's cache folder, under its source's digest."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from farfill.config.paths import cache_dir
from farfill.testing.lab.errors import LabError

SOURCE = Path(__file__).with_name("relay.c")
_FLAGS = ("-O2", "-std=gnu11")
_COMPILE_DEADLINE_S = 60.0


def compiler() -> str | None:
    """Path of the C compiler, or None."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def relay_binary() -> Path:
    """The compiled relay. Raises `LabError` where no compiler is found or it fails."""
    digest = hashlib.sha256(SOURCE.read_bytes() + repr((os.uname().machine, _FLAGS)).encode()).hexdigest()[:16]
    binary = cache_dir() / "lab" / f"relay-{digest}"
    if binary.exists():
        return binary
    cc = compiler()
    if cc is None:
        raise LabError("the lab compiles its packet relay: install a C compiler (Debian: gcc and libc6-dev)")
    binary.parent.mkdir(parents=True, exist_ok=True)
    # Two may compile at once: each into a folder of its own, the rename is atomic.
    with tempfile.TemporaryDirectory(dir=binary.parent) as scratch:
        made = Path(scratch) / "relay"
        done = subprocess.run(
            [cc, *_FLAGS, "-o", str(made), str(SOURCE)],
            capture_output=True, text=True, timeout=_COMPILE_DEADLINE_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise LabError(f"{cc} could not compile {SOURCE.name}: {done.stderr.strip()}")
        made.rename(binary)
    return binary
