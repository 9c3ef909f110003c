"""torchvision beside a CPU build of torch, for tests of models whose code in vLLM imports it (Qwen3.5).

PyPI has only torchvision's CUDA build, whose compiled operators this torch cannot load, and importing it then fails
where it describes them. Run by `make vllm`: unpacks that wheel into a folder of its own beside the environment's
packages, and declares the two operators that are described, which nothing here ever calls. Only engines that get the
folder in their PYTHONPATH see it. In production install the build that fits instead (docs/vllm.md).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WHEEL = "torchvision==0.28.0"
FOLDER = Path(sys.prefix) / "torchvision-cpu"
_DECLARE = """\
from torch.library import Library as _Library

_declared = _Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", str(FOLDER), WHEEL], check=True)
    start = FOLDER / "torchvision" / "__init__.py"
    start.write_text(_DECLARE + start.read_text())


if __name__ == "__main__":
    main()
