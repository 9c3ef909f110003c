"""KV over a WAN of 1 Gbit/s and 30 ms that misbehaves: what idleness, killed connections, a cut and a crowd cost.

In the lab (`docs/lab.md`), BBR, codec none, mutual TLS, checksums. Ratios compare with undisturbed ones of the same
run; medians. `cold`: the first transfer after the connections were idle for 60 s. `killed`: the kernel aborts one of
eight connections every second. `cut`: both directions lose everything for 2 s. `crowd`: 100 transfers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from _common import Figures, median, note, note_machine
from _transfer_lab import FAR, MIB, NEAR, EndError, Farfill, Pki, bench_pki
from farfill.testing.lab import Lab, missing_requirement

RATE_BITS_PER_S = 1e9
RTT_S = 0.03
SMALL_BYTES = 8 * MIB
CUT_S = 2.0
CONNECTIONS = 8
POLL_S = 0.05
BUDGET_MB = 64
PORT = 7401


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    rounds: int
    idle_s: float
    kill_bytes: int
    cut_bytes: int
    crowd: int


FULL = Plan(5, 60.0, 512 * MIB, 256 * MIB, 100)
QUICK = Plan(2, 5.0, 256 * MIB, 128 * MIB, 30)


def main() -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and bytes: for development, not for results")
    parser.add_argument("--only", choices=("cold", "killed", "cut", "crowd"), action="append", help="some conditions")
    parser.add_argument("--encryption", choices=("tls", "sealed"), default="tls")
    arguments = parser.parse_args()
    if (problem := missing_requirement()) is not None:
        note(f"no lab here: {problem}")
        return 1
    plan = QUICK if arguments.quick else FULL
    note_machine()
    note(f"{'QUICK run, not for results; ' if arguments.quick else ''}encryption {arguments.encryption}, {plan}")
    figures = Figures()
    for name in arguments.only or ("cold", "killed", "cut", "crowd"):
        measure = {"cold": cold, "killed": killed, "cut": cut, "crowd": crowd}[name]
        try:
            with wan() as lab:
                measure(figures, plan, lab, arguments.encryption)
        except EndError as error:
            note(f"{name} failed: {error}")
            figures.not_measured(name, "a result")
    note(f"load average at the end {os.getloadavg()[0]:.2f}")
    return figures.exit_code


def cold(figures: Figures, plan: Plan, lab: Lab, encryption: str) -> None:
    """As many idle pairs as rounds, so that all are idle at the same time; each is cold once."""
    pairs = range(plan.rounds)
    names = [(role, f"{site}{i}") for i in pairs for role, site in (("prefill", FAR), ("decode", NEAR))]
    with bench_pki(names) as pki, contextlib.ExitStack() as stack:
        links: list[Farfill] = []
        for i in pairs:
            ends = (f"prefill-{FAR}{i}", f"decode-{NEAR}{i}")
            links.append(
                started(stack, lab, pki, SMALL_BYTES, names=ends, port=PORT + i, encryption=encryption)
            )  # fmt: skip
        warm = [one.move(SMALL_BYTES).seconds for one in links for _ in range(3)]
        note(f"idle for {plan.idle_s:g} s")
        time.sleep(plan.idle_s)
        first = [one.move(SMALL_BYTES).seconds for one in links]
    note(f"warm {ms(warm)} ms, cold {ms(first)} ms")
    figures.at_most(f"cold_{SMALL_BYTES // MIB}MB_vs_warm", median(first) / median(warm), 1.3)


def killed(figures: Figures, plan: Plan, lab: Lab, encryption: str) -> None:
    """Goodput while one of eight connections is aborted every second."""
    with bench_pki() as pki, contextlib.ExitStack() as stack:
        farfill = started(stack, lab, pki, plan.kill_bytes, connections=CONNECTIONS, encryption=encryption)
        calm: list[float] = []
        disturbed: list[float] = []
        for _ in range(plan.rounds):
            calm.append(farfill.move(plan.kill_bytes).seconds)
            sending = farfill.begin([plan.kill_bytes])
            kills = 0
            with every_second(sending.sent) as seconds:
                for number in seconds:
                    kills += kill_connection(lab, number)
            moved = farfill.finish(sending)[0]
            note(f"{kills} killed; resent {moved.detail['resent_chunks']} of {moved.detail['chunks']} chunks")
            disturbed.append(moved.seconds)
            if not kills:
                raise EndError("no connection was killed")
    note(f"undisturbed {ms(calm)} ms, killed {ms(disturbed)} ms")
    figures.at_least("killed_goodput_vs_undisturbed", median(calm) / median(disturbed), 0.8)


def cut(figures: Figures, plan: Plan, lab: Lab, encryption: str) -> None:
    """How much later a transfer ends that lost the link for 2 s in its middle, and what travelled twice."""
    link = lab.link(NEAR, FAR)
    with bench_pki() as pki, contextlib.ExitStack() as stack:
        farfill = started(stack, lab, pki, plan.cut_bytes, encryption=encryption)
        calm: list[float] = []
        late: list[float] = []
        again: list[float] = []
        for _ in range(plan.rounds):
            calm.append(farfill.move(plan.cut_bytes).seconds)
            before = counted(farfill)
            sending = farfill.begin([plan.cut_bytes])
            wait_until(lambda start=before: counted(farfill)[1] - start[1] > plan.cut_bytes / 2)
            link.cut()
            healed_s = time.monotonic() + CUT_S
            in_flight = 0
            while time.monotonic() < healed_s:
                sent, received = (now - then for now, then in zip(counted(farfill), before, strict=True))
                in_flight = max(in_flight, sent - received)
                time.sleep(POLL_S)
            link.heal()
            moved = farfill.finish(sending)[0]
            resent = counted(farfill)[0] - before[0] - moved.nbytes
            note(f"in flight {in_flight / MIB:.1f} MiB, resent {resent / MIB:.1f} MiB, {moved.seconds:.2f} s")
            late.append(moved.seconds)
            again.append(resent / max(in_flight, 1))
    note(f"undisturbed {ms(calm)} ms, cut {ms(late)} ms")
    figures.at_most("cut_2s_extra_s", median(late) - median(calm), CUT_S + 1.0)
    figures.at_most("cut_2s_resent_vs_in_flight", median(again), 1.1)


def crowd(figures: Figures, plan: Plan, lab: Lab, encryption: str) -> None:
    """Fairness among many transfers of one link, and the memory they need beyond their slots."""
    unfair: list[float] = []
    extra: list[float] = []
    with bench_pki() as pki, contextlib.ExitStack() as stack:
        farfill = started(
            stack, lab, pki, SMALL_BYTES, encryption=encryption, receive_budget_mb=BUDGET_MB
        )  # fmt: skip
        farfill.finish(farfill.begin([SMALL_BYTES] * plan.crowd))  # slots exist from now on
        for _ in range(plan.rounds):
            before = farfill.receiver.ask("usage")["rss_bytes"]
            sending = farfill.begin([SMALL_BYTES] * plan.crowd)
            most = before
            while not sending.sent.done():
                most = max(most, farfill.receiver.ask("usage")["rss_bytes"])
                time.sleep(POLL_S)
            seconds = [one.seconds for one in farfill.finish(sending)]
            unfair.append(max(seconds) / median(seconds))
            extra.append((most - before) / MIB)
            note(f"median {median(seconds):.2f} s, slowest {max(seconds):.2f} s, memory +{extra[-1]:.0f} MiB")
    figures.at_most(f"crowd_{plan.crowd}_slowest_vs_median", median(unfair), 2.0)
    figures.at_most("crowd_receiver_memory_mib", max(extra), BUDGET_MB)


def started(stack: contextlib.ExitStack, lab: Lab, pki: Pki, nbytes: int, **options: Any) -> Farfill:
    """Both ends, with their connections open."""
    farfill = Farfill(lab, pki, content_bytes=nbytes, **options)
    stack.callback(farfill.close)
    farfill.move(nbytes)
    return farfill


def counted(farfill: Farfill) -> tuple[int, int]:
    """Raw bytes of chunks sent and received so far."""
    sent = farfill.sender.ask("usage").get("sent_bytes", 0)
    return sent, farfill.receiver.ask("usage").get("received_bytes", 0)


def kill_connection(lab: Lab, number: int) -> int:
    """Abort one connection to the receiver, each time another; how many that were."""
    own = ["state", "established", "dport", "=", f":{PORT}"]
    listed = lab.run(FAR, ["ss", "-tnH", *own], timeout_s=10, capture_output=True, text=True).stdout.splitlines()
    if not listed:
        return 0
    local = sorted(line.split()[2] for line in listed)[number % len(listed)]
    lab.run(
        FAR, ["ss", "-tnHK", *own, "sport", "=", f":{local.rpartition(':')[2]}"], timeout_s=10, capture_output=True
    )  # fmt: skip
    return 1


@contextlib.contextmanager
def every_second(until: Future[dict[str, Any]]) -> Iterator[Iterator[int]]:
    """Counts seconds until that is done."""
    done = threading.Event()
    until.add_done_callback(lambda _: done.set())
    yield (number for number in itertools.takewhile(lambda _: not done.wait(1.0), itertools.count()))


def wait_until(condition: Any, deadline_s: float = 60.0) -> None:
    """Raises EndError when it never comes true."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise EndError("the transfer does not get half way")
        time.sleep(POLL_S)


@contextlib.contextmanager
def wan() -> Iterator[Lab]:
    """A lab of two sites with that link."""
    with Lab((NEAR, FAR), seed=1, congestion_control="bbr") as lab:
        lab.link(NEAR, FAR).set(rate_bits_per_s=RATE_BITS_PER_S, rtt_s=RTT_S)
        yield lab


def ms(values: list[float]) -> str:
    """For people."""
    return " ".join(f"{value * 1e3:.0f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
