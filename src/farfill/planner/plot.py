"""Plots of the planner: one look for all, PNG or SVG by the file's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farfill.core.errors import ConfigError

_FORMATS = (".png", ".svg", ".pdf")


def figure(columns: int) -> Any:
    """A matplotlib figure with so many plots beside each other. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'farfill[plot]', or leave out --plot") from error
    drawing = Figure(figsize=(7.0 * columns, 4.6), layout="constrained", dpi=120)
    for axes in drawing.subplots(1, columns, squeeze=False)[0]:
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return drawing


def check_plot_path(path: Path) -> None:
    """Raises ConfigError when the file's name does not say a format that is known."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot: {path.name} must end in one of {', '.join(_FORMATS)}")


def save(drawing: Any, path: Path) -> None:
    """Write it. Raises ConfigError when that fails."""
    check_plot_path(path)
    for axes in drawing.axes:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    try:
        drawing.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
