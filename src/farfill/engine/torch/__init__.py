"""The embedded engine: Hugging Face model definitions run by torch. Importing this package imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.config.paths import default_environment

if TYPE_CHECKING:
    from farfill.engine.local import LocalEngine

# Threads that wait for each other sleep: spinning ones slow everybody down who shares the machine's cores.
_OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def load_engine(model: ModelConfig, engine: EngineConfig, prefill: PrefillConfig, base_dir: Path) -> LocalEngine:
    """Load the model folder (`model.path`, relative to `base_dir`) and make an engine of it, not yet started.

    Sets the process's torch thread count and, unless torch was loaded before, how its threads wait. Raises
    ConfigError when the folder, the device or the sizes are wrong, ModelUnsupportedError when the model keeps state
    that cannot be moved or resumed exactly.
    """
    default_environment(_OPENMP)
    if engine.ranks > 1:
        from farfill.engine.torch.ranks.engine import load
    else:
        from farfill.engine.torch.loader import load

    return load(model, engine, prefill, base_dir)
