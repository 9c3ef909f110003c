"""A lab's sites, what runs there, and that nothing is left of it, however its owner ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from farfill.testing.lab import Lab, LabError
from lab.wan import DEADLINE_S, connection, flood, wait_for

pytestmark = pytest.mark.lab

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
OWNER = f"""
import os, sys, time
from farfill.testing.lab import Lab
with Lab() as lab:
    sleeper = lab.start("far", {SLEEPER!r})
    inode = os.fstat(lab.namespace("far")).st_ino
    print(lab.relay_pid, sleeper.pid, inode, flush=True)
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Also false for a process that has ended and was not waited for yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def holders(namespace_inode: int) -> set[int]:
    """Processes that are in a network namespace or hold a descriptor of it."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            links = [process / "ns/net", *(process / "fd").iterdir()]
            if any(_target(link) == f"net:[{namespace_inode}]" for link in links):
                found.add(int(process.name))
    return found


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # a descriptor that was closed meanwhile
        return ""


def test_three_sites_reach_each_other_over_links_of_their_own() -> None:
    with Lab(("near", "east", "west")) as lab:
        lab.link("near", "east").set(rtt_s=0.01)
        lab.link("west", "near").set(rtt_s=0.04)
        lab.link("near", "west").cut()
        assert flood(lab, "east", "west", count=5) == 5
        assert flood(lab, "near", "west", count=5) == 0
        lab.link("near", "west").heal()
        with connection(lab, "near", "east") as joined:
            assert 0.01 <= joined.connect_s < 0.04
        with connection(lab, "west", "near") as joined:
            assert 0.04 <= joined.connect_s < 0.4
            assert joined.server.getpeername()[0] == lab.address("west")


def test_a_process_at_a_site_is_reached_from_the_other_and_ends_with_the_lab() -> None:
    with Lab() as lab:
        server = lab.start(
            "near", [sys.executable, "-m", "http.server", "8000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        lab.wait_listening("near", 8000)
        url = f"http://{lab.address('near')}:8000/"
        done = lab.run(
            "far",
            [sys.executable, "-c", f"import urllib.request as r; print(r.urlopen({url!r}, timeout=10).status)"],
            timeout_s=DEADLINE_S,
            capture_output=True,
        )
        assert done.stdout == b"200\n"
        assert server.poll() is None
    assert server.returncode == -signal.SIGKILL


def test_waiting_for_a_listener_that_never_comes_ends(lab: Lab) -> None:
    with pytest.raises(LabError, match="port 8000"):
        lab.wait_listening("near", 8000, deadline_s=0.1)


def test_a_thread_started_inside_stays_at_the_site_and_its_starter_comes_home(lab: Lab) -> None:
    home = os.stat("/proc/thread-self/ns/net").st_ino
    seen = []
    go_on = threading.Event()

    def look() -> None:
        go_on.wait(DEADLINE_S)
        seen.append(os.stat("/proc/thread-self/ns/net").st_ino)

    with lab.inside("far"):
        thread = threading.Thread(target=look)
        thread.start()
    go_on.set()
    thread.join(DEADLINE_S)
    assert seen == [os.fstat(lab.namespace("far")).st_ino]
    assert os.stat("/proc/thread-self/ns/net").st_ino == home


def test_congestion_control_is_that_of_the_site_and_locked() -> None:
    with Lab(congestion_control="cubic") as lab:
        lab.set_congestion_control("near", "reno", lock=False)
        with connection(lab, "far", "near") as joined:
            algorithms = [
                end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
                for end in (joined.client, joined.server)
            ]
            assert algorithms == [b"cubic", b"reno"]
            with pytest.raises(PermissionError):
                joined.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        with pytest.raises(LabError):
            lab.set_congestion_control("near", "no-such-algorithm")


def test_tcp_windows_are_large_at_sites_and_untouched_outside(lab: Lab) -> None:
    outside = Path("/proc/sys/net/ipv4/tcp_rmem").read_text()
    assert lab.sysctl("near", "net.ipv4.tcp_rmem").split()[2] == str(64 * 2**20)
    assert lab.sysctl("near", "net.ipv4.tcp_slow_start_after_idle", "0") == "0"
    assert lab.sysctl("far", "net.ipv4.tcp_slow_start_after_idle") == "1"
    assert Path("/proc/sys/net/ipv4/tcp_rmem").read_text() == outside


def test_a_site_or_lab_that_is_not_there_is_named(lab: Lab) -> None:
    with pytest.raises(LabError, match="no site east"):
        lab.address("east")
    with pytest.raises(LabError, match="from near to near"):
        lab.link("near", "near")
    with pytest.raises(LabError, match="names of their own"):
        Lab(("near", "near"))
    with pytest.raises(LabError, match="not up"):
        Lab().link("near", "far")


def test_nothing_is_left_after_the_end() -> None:
    with Lab() as lab:
        relay_pid = lab.relay_pid
        # A grandchild that the lab itself knows nothing of.
        parent = lab.start("far", ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
        sleeper_pid = int(parent.stdout.readline())
        inodes = [os.fstat(lab.namespace(site)).st_ino for site in lab.sites]
        assert holders(inodes[1]) >= {os.getpid(), relay_pid, sleeper_pid}
        parent.stdout.close()
        link = lab.link("near", "far")
    assert not is_running(relay_pid)
    assert not is_running(sleeper_pid)
    assert [holders(inode) for inode in inodes] == [set(), set()]
    with pytest.raises(LabError):
        link.set(loss=0.5)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_after_the_owner_was_killed(ending: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        relay_pid, sleeper_pid, inode = map(int, owner.stdout.readline().split())
        assert is_running(relay_pid)
        assert is_running(sleeper_pid)
        owner.send_signal(ending)
        assert owner.wait(DEADLINE_S) == -ending
    wait_for(lambda: not is_running(relay_pid) and not is_running(sleeper_pid), "relay and process to end", 5)
    wait_for(lambda: not holders(inode), "the namespace to go", 5)


def test_a_relay_that_was_killed_is_told_and_the_lab_still_ends() -> None:
    with Lab() as lab:
        sleeper = lab.start("far", SLEEPER)
        os.kill(lab.relay_pid, signal.SIGKILL)
        with pytest.raises(LabError, match="has ended"):
            lab.link("near", "far").set(loss=0.5)
    assert sleeper.returncode == -signal.SIGKILL
