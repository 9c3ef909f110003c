"""The embedded engine: Hugging Face model definitions run by torch. Importing this package imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig

if TYPE_CHECKING:
    from farfill.engine.local import LocalEngine


def load_engine(model: ModelConfig, engine: EngineConfig, prefill: PrefillConfig, base_dir: Path) -> LocalEngine:
    """Load the model folder (`model.path`, relative to `base_dir`) and make an engine of it, not yet started.

    Sets the process's torch thread count. Raises ConfigError when the folder or the sizes are wrong,
    ModelUnsupportedError when the model keeps state that cannot be moved or resumed exactly.
    """
    from farfill.engine.torch.loader import load

    return load(model, engine, prefill, base_dir)
