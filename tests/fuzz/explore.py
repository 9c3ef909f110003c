"""The coverage-guided fuzzer: `python tests/fuzz/explore.py --runs 2000000` (all targets together; `make fuzz`).

Each target runs in a process of its own, since the fuzzer ends its process; several at once where there are cores. An
input that crashes a target, needs over 10 s or over 1 GiB ends the run with exit code 1 and is kept in `--artifacts`.
What one run found interesting can be kept in `--corpus` for the next. Needs atheris.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parent.parent
MAX_INPUT_BYTES = 4096
MAX_RSS_MB = 1024
INPUT_TIMEOUT_S = 10
INSTRUMENTED = [
    "farfill.wire",
    "farfill.kv",
    "farfill.transfer.grid",
    "farfill.transfer.tickets",
    "farfill.transport.sealed",
]
# Shares of all inputs: a signature or a compressor costs more than a header.
SHARES = {"header": 0.35, "payload": 0.28, "events": 0.25, "sealed": 0.02, "codec": 0.05, "lossy": 0.01, "token": 0.04}


def main() -> int:
    """Fuzz every target, or one in this process; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2_000_000, help="inputs, all targets together")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--corpus", type=Path, help="folder to keep interesting inputs in")
    parser.add_argument("--artifacts", type=Path, default=Path("fuzz-artifacts"), help="folder for inputs that fail")
    parser.add_argument("--target", choices=tuple(SHARES), help="one target, in this process; needs --corpus")
    arguments = parser.parse_args()
    if arguments.target is not None:
        if arguments.corpus is None:
            parser.error("--target needs --corpus: the fuzzer ends its process, and would leave a temporary folder")
        fuzz_here(arguments.target, arguments.runs, arguments.seed, arguments.corpus, arguments.artifacts)
    arguments.artifacts.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="farfill-fuzz-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        corpus = arguments.corpus or Path(folder)
        results = list(pool.map(lambda target: _in_process(target, arguments, corpus), SHARES))
    total = 0
    for target, runs, code, output in results:
        print(f"{target}: {runs} inputs, {'ok' if code == 0 else 'FAILED'}")
        if code:
            print(output)
        total += runs
    print(f"{total} inputs in {time.monotonic() - start_s:.0f} s")
    return int(any(code for _, _, code, _ in results))


def fuzz_here(target: str, runs: int, seed: int, corpus: Path, artifacts: Path) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris  # pyright: ignore[reportMissingImports]

    sys.path.insert(0, str(TESTS))
    with atheris.instrument_imports(include=INSTRUMENTED):
        from fuzz.targets import SEEDS, TARGETS

    kept = corpus / target
    kept.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(SEEDS[target]()):
        (kept / f"seed-{number}").write_bytes(content)
    argv = [sys.argv[0], f"-runs={runs}", f"-max_len={MAX_INPUT_BYTES}", f"-rss_limit_mb={MAX_RSS_MB}"]
    argv += [f"-timeout={INPUT_TIMEOUT_S}", f"-artifact_prefix={artifacts}/{target}-", "-len_control=20"]
    argv += [f"-seed={seed}"] if seed else []

    def feed(data: bytes) -> None:
        TARGETS[target](data)

    atheris.Setup([*argv, str(kept)], feed)
    atheris.Fuzz()


def _in_process(target: str, arguments: argparse.Namespace, corpus: Path) -> tuple[str, int, int, str]:
    runs = max(1, round(arguments.runs * SHARES[target]))
    argv = [sys.executable, __file__, "--target", target, "--runs", str(runs), "--seed", str(arguments.seed)]
    argv += ["--artifacts", str(arguments.artifacts), "--corpus", str(corpus)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    # libFuzzer says it when it has really run them; anything else is a failure too.
    finished = f"Done {runs} runs" in done.stdout
    return target, runs, done.returncode or int(not finished), done.stdout[-4000:]


if __name__ == "__main__":
    sys.exit(main())
