"""KV over a WAN of 1 Gbit/s and 30 ms: Farfill against iperf3, Mooncake (TCP) and NIXL (UCX over TCP).

In the lab (`docs/lab.md`), both sites on this machine. Farfill sends with mutual TLS, tickets, checksums and codec none
unless said; the others send in clear. Connections are open, and every measured transfer follows a small unmeasured one
of the same system. All rates of a ratio come from the same run, in turn, and are medians. A competitor that cannot be
had (`make bench-peers`) leaves its figures not measured, which is falling short.

Farfill's time is what the sender sees: from its beginning to the confirmation that the set is complete. A competitor's
ends when it says so and its bytes are there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from _common import Figures, median, note, note_machine
from _transfer_lab import (
    FAR,
    MIB,
    NEAR,
    EndError,
    Farfill,
    Iperf,
    Moved,
    Pki,
    System,
    bench_pki,
    mooncake_environment,
    nixl_environment,
    try_peer,
)
from _transfer_layout import real_kv
from farfill.testing.lab import Lab, missing_requirement

RATE_BITS_PER_S = 1e9
RTT_S = 0.03
LOSS = 0.001
IPERF_CONNECTIONS = 8
DEVICE = "wan0"
# Connections and bytes of one write (0: all in one), the fastest of 1 to 128 and of both ways to write.
MOONCAKE = {"bbr": (4, 0), "cubic": (16, MIB)}
WARM_UP_BYTES = {"bbr": 16 * MIB, "cubic": 4 * MIB}
# A competitor this much slower than the other at a small size does not come into it at a large one.
HOPELESS = 0.5
KV_CHUNKS, KV_CHUNKS_QUICK = 6, 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    rounds: int
    large_bytes: int
    small_bytes: int
    iperf_s: float
    kv_chunks: int


FULL = Plan(5, 256 * MIB, 32 * MIB, 4.0, KV_CHUNKS)
QUICK = Plan(3, 64 * MIB, 16 * MIB, 2.0, KV_CHUNKS_QUICK)


def main() -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and bytes: for development, not for results")
    parser.add_argument("--only", choices=("bbr", "cubic", "auto"), action="append", help="some conditions")
    parser.add_argument("--encryption", choices=("tls", "sealed"), default="tls", help="of Farfill")
    arguments = parser.parse_args()
    if (problem := missing_requirement()) is not None:
        note(f"no lab here: {problem}")
        return 1
    plan = QUICK if arguments.quick else FULL
    note_machine()
    note(f"{'QUICK run, not for results; ' if arguments.quick else ''}encryption {arguments.encryption}, {plan}")
    wanted = arguments.only or ("bbr", "cubic", "auto")
    figures = Figures()
    with bench_pki() as pki:
        for loss in (0.0, LOSS) if "bbr" in wanted else ():
            clean_or_lossy_bbr(figures, plan, pki, loss, arguments.encryption)
        if "cubic" in wanted:
            lossy_cubic(figures, plan, pki, arguments.encryption)
        if "auto" in wanted:
            codec_auto(figures, plan, pki, arguments.encryption)
    note(f"load average at the end {os.getloadavg()[0]:.2f}")
    return figures.exit_code


def clean_or_lossy_bbr(figures: Figures, plan: Plan, pki: Pki, loss: float, encryption: str) -> None:
    """BBR fills the line whatever carries the bytes: Farfill must, sealed and checked."""
    label = f"bbr_loss_{loss * 100:g}%"
    with wan("bbr", loss) as lab, contextlib.ExitStack() as stack:
        iperf = Iperf(lab)
        farfill = started_farfill(stack, lab, pki, plan.large_bytes, encryption)
        peers = started_peers(stack, lab, "bbr", plan.large_bytes)
        line, moved = in_turn(plan, "bbr", [farfill, *peers], plan.large_bytes, iperf, IPERF_CONNECTIONS)
        own = goodput(moved["farfill"])
        figures.at_least(f"{label}_vs_iperf3", own / line, 0.95)
        for name in ("mooncake", "nixl"):
            versus(figures, f"{label}_vs_{name}", own, moved.get(name), 1.0)
        if not loss:
            cpu_figures(figures, "none", moved["farfill"])
        note_drops(lab)


def lossy_cubic(figures: Figures, plan: Plan, pki: Pki, encryption: str) -> None:
    """CUBIC takes loss for a full line: only the number of connections helps."""
    with wan("cubic", LOSS) as lab, contextlib.ExitStack() as stack:
        iperf = Iperf(lab)
        farfill = started_farfill(stack, lab, pki, plan.large_bytes, encryption)
        peers = started_peers(stack, lab, "cubic", plan.large_bytes)
        farfill.move(plan.large_bytes)  # lets the number of connections settle
        for nbytes in (plan.small_bytes, plan.large_bytes):
            label = f"cubic_loss_{LOSS * 100:g}%_{nbytes // MIB}MB"
            connections = round(farfill.move(plan.small_bytes).detail["connections_open"])
            line, moved = in_turn(plan, "cubic", [farfill, *peers], nbytes, iperf, connections)
            own = goodput(moved["farfill"])
            best = max((goodput(moved[peer.name]) for peer in peers), default=None)
            if best is None:
                figures.not_measured(f"{label}_vs_better_peer", ">= 2")
            else:
                figures.at_least(f"{label}_vs_better_peer", own / best, 2.0)
                peers = [peer for peer in peers if goodput(moved[peer.name]) >= HOPELESS * best]
            figures.at_least(f"{label}_vs_iperf3_{connections}_connections", own / line, 0.9)
        note_drops(lab)


def codec_auto(figures: Figures, plan: Plan, pki: Pki, encryption: str) -> None:
    """The bf16 cache of a real model, compressed on the way: raw bytes against the bare line."""
    content = real_kv(plan.kv_chunks)
    nbytes = content.stat().st_size
    with wan("bbr", 0.0) as lab, contextlib.ExitStack() as stack:
        iperf = Iperf(lab)
        farfill = Farfill(lab, pki, layout="smollm2", content=content, compression="auto", encryption=encryption)
        stack.callback(farfill.close)
        farfill.move(nbytes)  # lets codec and link be measured
        line, moved = in_turn(plan, "bbr", [farfill], nbytes, iperf, IPERF_CONNECTIONS)
        figures.at_least("codec_auto_raw_vs_iperf3", goodput(moved["farfill"]) / line, 1.35)
        cpu_figures(figures, "auto", moved["farfill"])
        note_drops(lab)


def in_turn(
    plan: Plan, congestion: str, systems: Sequence[System], nbytes: int, iperf: Iperf, connections: int
) -> tuple[float, dict[str, list[Moved]]]:
    """Median iperf3 goodput with `connections`, and every system's transfers of `nbytes`, round by round."""
    lines: list[float] = []
    moved: dict[str, list[Moved]] = {system.name: [] for system in systems}
    for _ in range(plan.rounds):
        lines.append(iperf.bits_per_s(connections, plan.iperf_s))
        for system in systems:
            system.move(WARM_UP_BYTES[congestion])
            moved[system.name].append(system.move(nbytes))
    note(f"{congestion}, {nbytes / MIB:.0f} MiB: iperf3 -P {connections}: {mbits(lines)} Mbit/s")
    for name, results in moved.items():
        note(f"  {name}: {mbits([result.bits_per_s for result in results])} Mbit/s")
        note(f"    last: {results[-1]}")
    return median(lines), moved


def versus(figures: Figures, name: str, own: float, other: list[Moved] | None, least: float) -> None:
    """Farfill's goodput over a competitor's."""
    if other is None:
        figures.not_measured(name, f">= {least:g}")
    else:
        figures.at_least(name, own / goodput(other), least)


def cpu_figures(figures: Figures, codec: str, moved: Sequence[Moved]) -> None:
    """Cores per Gbit/s of raw bytes, which is CPU seconds per Gbit. The kernel's TCP at the receiver is the relay's."""
    for side in ("sender", "receiver", "relay"):
        used = [getattr(one, f"{side}_cpu_s") / (one.nbytes * 8e-9) for one in moved]
        figures.reported(f"{side}_cores_per_gbit_s_codec_{codec}", median(used))


def goodput(moved: Sequence[Moved]) -> float:
    """Median bits per second."""
    return median([one.bits_per_s for one in moved])


def wan(congestion: str, loss: float) -> contextlib.AbstractContextManager[Lab]:
    """A lab of two sites with that link, which allow only that congestion control."""

    @contextlib.contextmanager
    def up():
        with Lab((NEAR, FAR), seed=1, congestion_control=congestion) as lab:
            lab.link(NEAR, FAR).set(rate_bits_per_s=RATE_BITS_PER_S, rtt_s=RTT_S, loss=loss)
            yield lab

    return up()


def started_farfill(stack: contextlib.ExitStack, lab: Lab, pki: Pki, nbytes: int, encryption: str) -> Farfill:
    """Both ends, without a codec."""
    farfill = Farfill(lab, pki, content_bytes=nbytes, encryption=encryption)
    stack.callback(farfill.close)
    farfill.move(nbytes)
    return farfill


def started_peers(stack: contextlib.ExitStack, lab: Lab, congestion: str, nbytes: int) -> list[System]:
    """The competitors that can be had, at their best settings."""
    lanes, slice_bytes = MOONCAKE[congestion]
    wanted = (
        ("mooncake", mooncake_environment(lanes=lanes), slice_bytes),
        ("nixl", nixl_environment(DEVICE), 0),
    )
    peers: list[System] = []
    for kind, environment, written_bytes in wanted:
        peer = try_peer(lab, kind, nbytes, environment, slice_bytes=written_bytes)
        if peer is not None:
            stack.callback(peer.close)
            peers.append(peer)
    return peers


def note_drops(lab: Lab) -> None:
    """Says when the relay starved, which makes the run worthless."""
    dropped = lab.device_drops(FAR) + lab.device_drops(NEAR)
    if dropped:
        note(f"warning: {dropped} packets were dropped by the sites' devices: the relay got too little CPU")


def mbits(values: Sequence[float]) -> str:
    """For people."""
    return " ".join(f"{value / 1e6:.0f}" for value in values)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EndError as error:
        note(f"failed: {error}")
        sys.exit(1)
