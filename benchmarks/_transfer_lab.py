"""Systems that move bytes from site far to site near of a lab: Farfill, Mooncake, NIXL and iperf3, alike to measure."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from _common import note
from _transfer_layout import FINGERPRINT, cache_folder, layout_of, tokens_for
from farfill.cli.pki import Member, create_pki
from farfill.core.ticket import Ticket
from farfill.kv.manifest import build_manifest
from farfill.testing.lab import Lab
from farfill.transfer.tickets import sign_ticket
from farfill.transport.tls import PeerIdentity

NEAR, FAR = "near", "far"
MIB = 1024 * 1024
START_DEADLINE_S = 60.0
TRANSFER_DEADLINE_S = 240.0
_HERE = Path(__file__).parent
# UCX looks for network devices in /sys, which shows those of the namespace it was mounted in.
_WITH_OWN_SYSFS = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")


class EndError(Exception):
    """One end said what went wrong, or is gone."""


class End:
    """A process at a site that answers JSON lines."""

    def __init__(self, lab: Lab, site: str, argv: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._process = lab.start(
            site,
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("FARFILL_BENCH_VERBOSE") else subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env={**os.environ, **(environment or {})},
        )
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self, verb: str, **arguments: Any) -> Future[dict[str, Any]]:
        """Ask; the answer comes when it is done."""
        number = next(self._numbers)
        future = self._waiting[number] = Future()
        try:
            self._process.stdin.write(json.dumps({"id": number, "do": verb, **arguments}) + "\n")
        except (BrokenPipeError, ValueError):
            raise EndError("the process has ended") from None
        return future

    def ask(self, verb: str, *, deadline_s: float = TRANSFER_DEADLINE_S, **arguments: Any) -> dict[str, Any]:
        """Ask and wait. Raises EndError."""
        return answer_of(self.begin(verb, **arguments), deadline_s)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout:
            answer = json.loads(line)
            self._waiting.pop(answer.pop("id")).set_result(answer)
        for future in list(self._waiting.values()):
            future.set_result({"error": "the process has ended"})


def answer_of(future: Future[dict[str, Any]], deadline_s: float = TRANSFER_DEADLINE_S) -> dict[str, Any]:
    """The answer. Raises EndError when it is an error, or does not come."""
    try:
        answer = future.result(deadline_s)
    except TimeoutError:
        raise EndError(f"no answer within {deadline_s:g} s") from None
    if "error" in answer:
        raise EndError(answer["error"])
    return answer


@dataclass(frozen=True, slots=True)
class Moved:
    """One transfer of `nbytes` that took `seconds`, and the CPU seconds of its ends and of the lab."""

    nbytes: int
    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float
    relay_cpu_s: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def bits_per_s(self) -> float:
        """Goodput."""
        return self.nbytes * 8 / self.seconds


class System(Protocol):
    """Something that moves bytes from far to near."""

    name: str

    def move(self, nbytes: int) -> Moved:
        """Move about so many. Raises EndError."""
        ...


class Farfill:
    """`KVSender` and `KVReceiver` in processes of their own, with certificates, tickets and checksums."""

    def __init__(
        self,
        lab: Lab,
        pki: Pki,
        *,
        layout: str = "8b",
        content: Path | None = None,
        content_bytes: int = 0,
        sites: tuple[str, str] = (FAR, NEAR),
        names: tuple[str, str] = ("prefill-far", "decode-near"),
        port: int = 7401,
        **config: Any,
    ) -> None:
        self.name = "farfill"
        self.layout = layout_of(layout)
        self._pki = pki
        self._names = names
        self._lab = lab
        values = {"timeout_ms": 60_000, "compression": "none", **config}
        common = {"pki": str(pki.folder), "layout": layout, "config": values}
        receive = {**common, "name": names[1], "listen": f"{lab.address(sites[1])}:{port}"}
        send = {
            **common,
            "name": names[0],
            "content": str(content) if content is not None else None,
            "content_bytes": content_bytes,
        }
        self.timeout_s = values["timeout_ms"] / 1000
        self.receiver = End(lab, sites[1], _own(_HERE / "_transfer_end.py", "receive", json.dumps(receive)))
        self.sender = End(lab, sites[0], _own(_HERE / "_transfer_end.py", "send", json.dumps(send)))
        self.address = self.receiver.ask("start", deadline_s=START_DEADLINE_S)["address"]
        self.sender.ask("start", deadline_s=START_DEADLINE_S)

    def move(self, nbytes: int) -> Moved:
        """See `System`."""
        return self.finish(self.begin([nbytes]))[0]

    def begin(self, sizes: Sequence[int]) -> Sending:
        """Announce, then start to send all at once."""
        tickets = [self._ticket(size) for size in sizes]
        announced = [asdict(ticket) for ticket in tickets]
        for ticket in announced:
            self.receiver.ask("expect", ticket=ticket, timeout_s=self.timeout_s)
        before = self._cpu()
        results = [self.receiver.begin("result", transfer_id=ticket.transfer_id) for ticket in tickets]
        tokens = [self._pki.sign(ticket) for ticket in tickets]
        sent = self.sender.begin(
            "send", address=self.address, tickets=announced, tokens=tokens, timeout_s=self.timeout_s
        )
        return Sending([build_manifest(self.layout, t.num_tokens).total_bytes for t in tickets], sent, results, before)

    def finish(self, sending: Sending) -> list[Moved]:
        """Wait for all. Raises EndError when a transfer failed or arrived different."""
        sent = answer_of(sending.sent)
        received = [answer_of(result) for result in sending.results]
        used = [after - before for after, before in zip(self._cpu(), sending.cpu_before, strict=True)]
        share = [value / len(sending.sizes) for value in used]
        moved = []
        for size, one, other in zip(sending.sizes, sent["transfers"], received, strict=True):
            if not other["complete"]:
                raise EndError(other["detail"])
            if other["digest"] != one["digest"]:
                raise EndError("other bytes arrived than were sent")
            detail = {**one, "connections_open": sent["connections"]}
            moved.append(Moved(size, one["seconds"], *share, detail))
        return moved

    def close(self) -> None:
        """End both processes; nothing may be left in them."""
        active = self.sender.ask("close", deadline_s=START_DEADLINE_S)["active"]
        held = self.receiver.ask("close", deadline_s=START_DEADLINE_S)["held"]
        self.sender.close()
        self.receiver.close()
        if active or held:
            raise EndError(f"{active} transfers and {held} slots are left")

    def _ticket(self, nbytes: int) -> Ticket:
        return self._pki.ticket(*self._names, num_tokens=tokens_for(self.layout, nbytes))

    def _cpu(self) -> tuple[float, float, float]:
        return self.sender.ask("usage")["cpu_s"], self.receiver.ask("usage")["cpu_s"], self._lab.relay_cpu_s


@dataclass(frozen=True, slots=True)
class Sending:
    """Transfers of a `Farfill` under way."""

    sizes: list[int]
    sent: Future[dict[str, Any]]
    results: list[Future[dict[str, Any]]]
    cpu_before: tuple[float, float, float]


class PeerSystem:
    """Mooncake or NIXL, by the Python of `make bench-peers`."""

    def __init__(
        self,
        lab: Lab,
        kind: str,
        nbytes: int,
        environment: dict[str, str],
        *,
        slice_bytes: int = 0,
        sites: tuple[str, str] = (FAR, NEAR),
        name: str | None = None,
    ) -> None:
        """`slice_bytes`: Mooncake's bytes come in writes of so many; 0: in one."""
        self.name = name or kind
        self._slice_bytes = slice_bytes
        self._lab = lab
        self._marks = itertools.cycle(range(1, 256))
        python = peers_python()
        if not python.exists():
            raise EndError(f"{python} is not there: run make bench-peers")
        ends = [
            End(
                lab,
                site,
                [
                    *_WITH_OWN_SYSFS,
                    str(python),
                    str(_HERE / "_peer_end.py"),
                    kind,
                    role,
                    lab.address(site),
                    str(nbytes),
                ],
                environment,
            )
            for site, role in ((sites[0], "send"), (sites[1], "receive"))
        ]
        self.sender, self.receiver = ends
        self.sender.ask("connect", where=self.receiver.ask("where", deadline_s=START_DEADLINE_S)["where"])

    def move(self, nbytes: int) -> Moved:
        """See `System`. Ends when the peer says so and the bytes are there, whichever is later."""
        mark = next(self._marks)
        before = self._cpu()
        arriving = self.receiver.begin("arrived", nbytes=nbytes, mark=mark, deadline_s=TRANSFER_DEADLINE_S)
        sent = self.sender.ask("write", nbytes=nbytes, slice_bytes=self._slice_bytes or nbytes, mark=mark)
        arrived_s = answer_of(arriving)["done_s"]
        used = [after - earlier for after, earlier in zip(self._cpu(), before, strict=True)]
        detail = {"said_done_early_s": arrived_s - sent["done_s"]}
        return Moved(nbytes, max(sent["done_s"], arrived_s) - sent["start_s"], *used, detail)

    def close(self) -> None:
        """End both processes."""
        self.sender.close()
        self.receiver.close()

    def _cpu(self) -> tuple[float, float, float]:
        return self.sender.ask("usage")["cpu_s"], self.receiver.ask("usage")["cpu_s"], self._lab.relay_cpu_s


class Iperf:
    """Steady goodput of `connections` connections from far to near, without their start."""

    PORT = 5201

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        lab.start(NEAR, ["iperf3", "-s", "-p", str(self.PORT)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        lab.wait_listening(NEAR, self.PORT)

    def bits_per_s(self, connections: int, seconds: float) -> float:
        """Measured over `seconds` after 1.5 s of start. Raises EndError."""
        argv = ["iperf3", "-c", self._lab.address(NEAR), "-p", str(self.PORT), "-P", str(connections)]
        argv += ["-t", f"{seconds:g}", "-O", "2", "-J"]
        done = self._lab.run(FAR, argv, timeout_s=seconds + 60, check=False, capture_output=True, text=True)
        report = json.loads(done.stdout)
        if "error" in report:
            raise EndError(f"iperf3: {report['error']}")
        return report["end"]["sum_received"]["bits_per_second"]


class Pki:
    """Certificates and ticket keys for a benchmark."""

    def __init__(self, folder: Path, names: Sequence[tuple[str, str]]) -> None:
        members = [Member(PeerIdentity("bench", site, role, f"{role}-{site}"), ()) for role, site in names]
        create_pki(folder, members, days=1)
        self.folder = folder
        self._key = (folder / "ticket.key").read_bytes()
        self._ids = itertools.count()

    def ticket(self, prefill: str, decode: str, *, num_tokens: int) -> Ticket:
        """A new one."""
        now = time.time()
        return Ticket(
            transfer_id=f"bench-{next(self._ids)}",
            fingerprint=FINGERPRINT,
            tenant="bench",
            prefill=prefill,
            decode=decode,
            num_tokens=num_tokens,
            issued_unix_s=now,
            expires_unix_s=now + 600,
        )

    def sign(self, ticket: Ticket) -> str:
        """As the gateway would."""
        return sign_ticket(ticket, self._key)


@contextlib.contextmanager
def bench_pki(names: Sequence[tuple[str, str]] = (("prefill", FAR), ("decode", NEAR))) -> Iterator[Pki]:
    """A throw-away one for (role, site)s; workers are named ROLE-SITE."""
    with tempfile.TemporaryDirectory(prefix="farfill-bench-") as folder:
        yield Pki(Path(folder) / "pki", names)


def peers_python() -> Path:
    """The interpreter of `make bench-peers`."""
    return cache_folder() / "bench-peers" / "bin" / "python"


def mooncake_environment(*, lanes: int) -> dict[str, str]:
    """Over TCP, on `lanes` connections that are kept."""
    return {
        "MC_FORCE_TCP": "true",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_LANES_PER_PEER": str(lanes),
        "MC_LOG_LEVEL": "WARNING",
    }


def nixl_environment(device: str, *, raised: bool = True) -> dict[str, str]:
    """Over UCX's TCP on one network device; `raised`: with segments of 1 MiB instead of UCX's 8 KiB."""
    environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": device, "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR"}
    if raised:
        environment |= {"UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m"}
    return environment


def try_peer(lab: Lab, kind: str, nbytes: int, environment: dict[str, str], **options: Any) -> PeerSystem | None:
    """The competitor, or None with the reason noted."""
    try:
        return PeerSystem(lab, kind, nbytes, environment, **options)
    except EndError as error:
        note(f"{kind} cannot be measured: {error}")
        return None


def _own(script: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(script), *arguments]
