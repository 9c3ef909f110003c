"""Short runs of the fuzzers: the same mutations each time, and some coverage-guided ones where atheris is installed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from fuzz.targets import MAX_RAW_BYTES, SEEDS, TARGETS

INPUTS = {
    "header": 40_000,
    "payload": 40_000,
    "events": 40_000,
    "sealed": 4_000,
    "codec": 5_000,
    "lossy": 2_000,
    "token": 4_000,
}
GUIDED_INPUTS = 100_000
# The largest declared size, its planes, and an input.
PEAK_BYTES = 8 * MAX_RAW_BYTES
INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
)
GUIDED = Path(__file__).parent / "explore.py"


def mutated(rng: random.Random, seed: bytes) -> bytes:
    """A few changes as a fuzzer makes them."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        match rng.randrange(5):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randint(1, 16)]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 16))
            case 3:
                value = rng.choice(INTERESTING)
                data[at : at + len(value)] = value
            case _:
                data[at:at] = data[: rng.randint(0, 64)]
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_valid_inputs_are_accepted(target: str):
    assert all(TARGETS[target](seed) for seed in SEEDS[target]())


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_inputs_neither_crash_a_parser_nor_make_it_allocate(target: str):
    rng, seeds, feed = random.Random(3), SEEDS[target](), TARGETS[target]
    feed(seeds[0])
    accepted = 0
    tracemalloc.start()
    try:
        for _ in range(INPUTS[target]):
            accepted += feed(mutated(rng, rng.choice(seeds)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PEAK_BYTES
    assert 0 < accepted < INPUTS[target]  # mutations that are all refused at the door try nothing


def test_guided_inputs_find_nothing(tmp_path: Path):
    pytest.importorskip("atheris", reason="atheris is not installed (it has wheels for Linux only)")
    artifacts, temporary = tmp_path / "artifacts", tmp_path / "tmp"
    temporary.mkdir()
    argv = [sys.executable, str(GUIDED), "--runs", str(GUIDED_INPUTS), "--seed", "1", "--artifacts", str(artifacts)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{GUIDED_INPUTS} inputs" in done.stdout
    assert not list(artifacts.iterdir())
    assert not list(temporary.iterdir()), "it leaves files behind"
