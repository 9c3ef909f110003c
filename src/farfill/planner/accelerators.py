"""Accelerators as their makers describe them: dense 16-bit matrix rate, memory, memory rate. For roofline estimates."""

from __future__ import annotations

from dataclasses import dataclass

from farfill.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device. `flops` are dense bfloat16 (float16) per second, `bandwidth` memory bytes per second."""

    name: str
    flops: float
    memory_bytes: float
    bandwidth: float
    source: str


_TABLE = (
    Accelerator("A10", 125e12, 24e9, 0.600e12, "NVIDIA A10 datasheet"),
    Accelerator("A30", 165e12, 24e9, 0.933e12, "NVIDIA A30 datasheet"),
    Accelerator("A100-80G", 312e12, 80e9, 2.039e12, "NVIDIA A100 80GB SXM datasheet"),
    Accelerator("L4", 121e12, 24e9, 0.300e12, "NVIDIA L4 datasheet, half of the figure with sparsity"),
    Accelerator("L40S", 362e12, 48e9, 0.864e12, "NVIDIA L40S datasheet"),
    Accelerator("H20", 148e12, 96e9, 4.0e12, "NVIDIA H20 datasheet, 96 GB"),
    Accelerator("H100", 989e12, 80e9, 3.35e12, "NVIDIA H100 SXM datasheet, half of the figure with sparsity"),
    Accelerator("H200", 989e12, 141e9, 4.8e12, "NVIDIA H200 SXM datasheet, half of the figure with sparsity"),
    Accelerator("B200", 2250e12, 180e9, 7.7e12, "NVIDIA DGX B200 datasheet over 8, half of the figure with sparsity"),
    Accelerator("B300", 2250e12, 288e9, 7.75e12, "NVIDIA DGX B300 datasheet over 8, half of the figure with sparsity"),
    Accelerator(
        "GB200", 2500e12, 186e9, 8.0e12, "NVIDIA GB200 NVL72 datasheet over 72, half of the figure with sparsity"
    ),
    Accelerator("MI300X", 1307e12, 192e9, 5.3e12, "AMD Instinct MI300X datasheet"),
    Accelerator("MI325X", 1307e12, 256e9, 6.0e12, "AMD Instinct MI325X datasheet"),
)
ACCELERATORS = {accelerator.name: accelerator for accelerator in _TABLE}


def find_accelerator(name: str) -> Accelerator:
    """By name, in any case. Raises ConfigError naming those that are known."""
    for known, accelerator in ACCELERATORS.items():
        if known.lower() == name.lower():
            return accelerator
    what = f"accelerator {name!r} is not known" if name.strip() else "no accelerator is named"
    raise ConfigError(f"{what}; known are: {', '.join(ACCELERATORS)}, or write a profile")
