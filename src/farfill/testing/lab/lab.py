"""Sites of a WAN on one machine: network namespaces joined by links whose rate, delay, loss and cuts can be changed.

Needs root. The host's own network is not touched, nothing has a name, and nothing is left behind, even when the
process that made the lab is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from farfill.testing.lab.build import compiler, relay_binary
from farfill.testing.lab.errors import LabError
from farfill.testing.lab.link import Direction, Link
from farfill.testing.lab.namespace import DEVICE, MTU_BYTES, create_namespace, create_tun, inside, ip
from farfill.testing.lab.process import RelayProcess

MAX_SITES = 8
_NETWORK = "10.77.0"
# Enough window for several Gbit/s over a long way; hosts meant for such links raise it, too.
_TCP_WINDOW_BYTES = 64 * 1024 * 1024
# Packets: the devices must never drop, that is for the links to do.
_DEVICE_QUEUE = 10_000
_SYSCTL = Path("/proc/sys")
_LISTEN = "0A"
_POLL_S = 0.01
_KILL_DEADLINE_S = 10.0


def missing_requirement() -> str | None:
    """Why a lab cannot be made here, or None."""
    if os.geteuid() != 0:
        return "the lab needs root, for network namespaces"
    if shutil.which("ip") is None:
        return "the lab needs `ip`: install iproute2"
    if not os.access(_SYSCTL / "net/ipv4/tcp_rmem", os.W_OK):
        return "the lab needs a writable /proc/sys"
    if compiler() is None:
        return "the lab needs a C compiler (cc)"
    try:
        with _closing(create_namespace()) as namespace, inside(namespace), _closing(create_tun()):
            return None
    except LabError as error:
        return str(error)


class Lab:
    """Context manager. Sites reach each other at `address(site)`; every two are joined by a link, at first perfect.

    `seed` fixes which packets of a direction are lost. `congestion_control` is that of every site; see
    `set_congestion_control`. All methods may be called from any thread.
    """

    def __init__(
        self, sites: Sequence[str] = ("near", "far"), *, seed: int = 0, congestion_control: str | None = None
    ) -> None:
        if not 2 <= len(set(sites)) == len(sites) <= MAX_SITES:
            raise LabError(f"a lab has 2 to {MAX_SITES} sites with names of their own, not {', '.join(sites)}")
        self.sites = tuple(sites)
        self._seed = seed
        self._congestion_control = congestion_control
        self._namespaces: dict[str, int] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._relay: RelayProcess | None = None
        self._started: list[subprocess.Popen[Any]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Lab:
        relay_binary()  # compile before anything is set up
        with contextlib.ExitStack() as stack:
            self._namespaces = {site: stack.enter_context(_closing(create_namespace())) for site in self.sites}
            with contextlib.ExitStack() as devices:
                tuns = {site: devices.enter_context(_closing(self._create_device(site))) for site in self.sites}
                ends = [(tuns[site], self._namespaces[site], self.address(site)) for site in self.sites]
                self._relay = RelayProcess.start(ends, seed=self._seed)
            stack.callback(self._forget)
            stack.callback(self._relay.close)
            for first, second in combinations(self.sites, 2):
                indices = self.sites.index(first), self.sites.index(second)
                self._links[first, second] = Link(self._relay, *indices)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, site: str) -> str:
        """The site's IPv4 address, the same from all other sites."""
        self._known(site)
        return f"{_NETWORK}.{self.sites.index(site) + 1}"

    def link(self, first: str, second: str) -> Link:
        """The link of two sites; `forward` leads from `first` to `second` as the lab's `sites` are ordered."""
        self._known(first)
        self._known(second)
        self._running_relay()
        link = self._links.get((first, second)) or self._links.get((second, first))
        if link is None:
            raise LabError(f"no link leads from {first} to {second}")
        return link

    def direction(self, source: str, target: str) -> Direction:
        """The way from `source` to `target`."""
        link = self.link(source, target)
        return link.forward if (source, target) in self._links else link.backward

    @contextlib.contextmanager
    def inside(self, site: str) -> Iterator[None]:
        """The calling thread is at the site: sockets, threads and processes it makes meanwhile stay there.

        Leave it before awaiting anything. A whole event loop can run at a site in a thread of its own.
        """
        with inside(self.namespace(site)):
            yield

    def namespace(self, site: str) -> int:
        """Descriptor of the site's network namespace, open as long as the lab."""
        self._known(site)
        if site not in self._namespaces:
            raise LabError("the lab is not up")
        return self._namespaces[site]

    def start(self, site: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process at the site; options as for `Popen`. It is killed with the lab, children included."""
        with self.inside(site):
            process = subprocess.Popen(argv, **options)
        self._started.append(process)
        return process

    def run(
        self, site: str, argv: Sequence[str], *, timeout_s: float, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Runs a process at the site to its end; options and errors as for `subprocess.run`."""
        with self.inside(site):
            return subprocess.run(argv, timeout=timeout_s, check=check, **options)

    def set_congestion_control(self, site: str, name: str, *, lock: bool = True) -> None:
        """For connections the site opens or accepts from now on, also where the host's allowed list leaves it out.

        `lock` refuses `TCP_CONGESTION` on their sockets, as on a host that allows nothing else.
        """
        self._route(site, "congctl", *(["lock"] if lock else []), name)

    def sysctl(self, site: str, key: str, value: str | None = None) -> str:
        """A setting of the site's network, such as `net.ipv4.tcp_slow_start_after_idle`, changed first if asked."""
        path = _SYSCTL / key.replace(".", "/")
        with self.inside(site):
            if value is not None:
                path.write_text(value)
            return path.read_text().strip()

    def wait_listening(self, site: str, port: int, *, deadline_s: float = 10.0) -> None:
        """Waits, without connecting, until something at the site listens on the TCP port."""
        end = time.monotonic() + deadline_s
        while port not in self._listening(site):
            if time.monotonic() > end:
                raise LabError(f"nothing at {site} listens on port {port} after {deadline_s:g} s")
            time.sleep(_POLL_S)

    def device_drops(self, site: str) -> int:
        """Packets the site's own device dropped. Not 0: the relay got too little CPU, and loss was not as set."""
        with self.inside(site):
            text = Path("/proc/thread-self/net/dev").read_text()
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{DEVICE}:"))
        return int(line.rpartition(":")[2].split()[11])

    @property
    def relay_pid(self) -> int:
        return self._running_relay().pid

    @property
    def relay_cpu_s(self) -> float:
        """CPU time of the relay, with the receiving sites' TCP, which runs where packets are delivered."""
        return self._running_relay().cpu_s

    def _running_relay(self) -> RelayProcess:
        if self._relay is None:
            raise LabError("the lab is not up")
        return self._relay

    def _create_device(self, site: str) -> int:
        with self.inside(site):
            tun_fd = create_tun()
            ip("link", "set", "lo", "up")
            ip("link", "set", DEVICE, "mtu", str(MTU_BYTES), "txqueuelen", str(_DEVICE_QUEUE), "addrgenmode", "none")
            ip("address", "add", f"{self.address(site)}/24", "dev", DEVICE, "noprefixroute")
            ip("link", "set", DEVICE, "up")
        self._route(site)
        if self._congestion_control is not None:
            self.set_congestion_control(site, self._congestion_control)
        for key in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"):
            least, default, _ = self.sysctl(site, key).split()
            self.sysctl(site, key, f"{least} {default} {_TCP_WINDOW_BYTES}")
        # What one connection learned must not change the next measurement.
        self.sysctl(site, "net.ipv4.tcp_no_metrics_save", "1")
        return tun_fd

    def _route(self, site: str, *attributes: str) -> None:
        with self.inside(site):
            ip("route", "replace", f"{_NETWORK}.0/24", "dev", DEVICE, "src", self.address(site), *attributes)

    def _listening(self, site: str) -> set[int]:
        with self.inside(site):
            tables = [Path(f"/proc/thread-self/net/{name}").read_text() for name in ("tcp", "tcp6")]
        rows = [row.split() for table in tables for row in table.splitlines()[1:]]
        return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTEN}

    def _forget(self) -> None:
        """After the relay's end: reaps what it killed, and lets no descriptor be used that is closed next."""
        self._relay = None
        self._links.clear()
        self._namespaces = {}
        while self._started:
            process = self._started.pop()
            process.kill()  # for what moved to another namespace, or outlived a relay that was killed
            process.wait(_KILL_DEADLINE_S)

    def _known(self, site: str) -> None:
        if site not in self.sites:
            raise LabError(f"no site {site}: the lab has {', '.join(self.sites)}")


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
