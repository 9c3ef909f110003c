"""KV over loopback: bytes per second of the code itself, Farfill with TLS against Mooncake and NIXL in clear.

Both ends of each system in one network namespace of their own, on the same cores, in turn; medians. Farfill verifies
certificates and tickets, encrypts, and checks every chunk; codec none. Both of its encryptions are measured. NIXL is
measured with UCX's own settings, which count, and with segments raised to 1 MiB, which is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass

from _common import Figures, median, note, note_machine
from _transfer_lab import (
    MIB,
    NEAR,
    EndError,
    Farfill,
    Moved,
    System,
    bench_pki,
    mooncake_environment,
    nixl_environment,
    try_peer,
)
from farfill.testing.lab import Lab, missing_requirement

AT_NEAR = (NEAR, NEAR)
MUST = {"mooncake": 1.2, "nixl": 3.0}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    rounds: int
    nbytes: int


FULL, QUICK = Plan(9, 512 * MIB), Plan(5, 128 * MIB)


def main() -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and bytes: for development, not for results")
    arguments = parser.parse_args()
    if (problem := missing_requirement()) is not None:
        note(f"no lab here: {problem}")
        return 1
    plan = QUICK if arguments.quick else FULL
    note_machine()
    note(f"{'QUICK run, not for results; ' if arguments.quick else ''}{plan}")
    figures = Figures()
    with bench_pki() as pki, Lab() as lab, contextlib.ExitStack() as stack:
        systems: list[System] = []
        for port, encryption in enumerate(("tls", "sealed"), 7401):
            farfill = Farfill(
                lab, pki, content_bytes=plan.nbytes, sites=AT_NEAR, port=port, encryption=encryption
            )  # fmt: skip
            farfill.name = encryption
            stack.callback(farfill.close)
            systems.append(farfill)
        for name, environment in (
            ("mooncake", mooncake_environment(lanes=4)),
            ("nixl", nixl_environment("lo", raised=False)),
            ("nixl_raised", nixl_environment("lo")),
        ):
            kind = name.partition("_")[0]
            peer = try_peer(lab, kind, plan.nbytes, environment, sites=AT_NEAR, name=name)
            if peer is not None:
                stack.callback(peer.close)
                systems.append(peer)
        moved = in_turn(plan, systems)
    for encryption in ("tls", "sealed"):
        own = rate(moved[encryption])
        for kind, least in MUST.items():
            name = f"loopback_{encryption}_vs_{kind}"
            if kind in moved:
                figures.at_least(name, own / rate(moved[kind]), least)
            else:
                figures.not_measured(name, f">= {least:g}")
        if "nixl_raised" in moved:
            figures.reported(f"loopback_{encryption}_vs_nixl_raised", own / rate(moved["nixl_raised"]))
        figures.reported(f"loopback_{encryption}_gbyte_per_s", own / 8e9)
    for name, results in moved.items():
        for side in ("sender", "receiver"):
            used = [getattr(one, f"{side}_cpu_s") / (one.nbytes * 8e-9) for one in results]
            figures.reported(f"loopback_{name}_{side}_cores_per_gbit_s", median(used))
    note(f"load average at the end {os.getloadavg()[0]:.2f}")
    return figures.exit_code


def in_turn(plan: Plan, systems: list[System]) -> dict[str, list[Moved]]:
    """Every system's transfers, round by round, after one that is not counted."""
    moved: dict[str, list[Moved]] = {system.name: [] for system in systems}
    for system in systems:
        system.move(plan.nbytes)
    for _ in range(plan.rounds):
        for system in systems:
            moved[system.name].append(system.move(plan.nbytes))
    for name, results in moved.items():
        note(f"{name}: {' '.join(f'{one.bits_per_s / 8e9:.2f}' for one in results)} GB/s")
        note(f"  last: {results[-1]}")
    return moved


def rate(moved: list[Moved]) -> float:
    """Median bits per second."""
    return median([one.bits_per_s for one in moved])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EndError as error:
        note(f"failed: {error}")
        sys.exit(1)
