"""A lab that stays up between commands: a process that holds it, and the requests that reach it by the lab's name.

Requests go over an abstract Unix socket, which vanishes with the holder; only the same user is served.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys

import msgspec

from farfill.testing.lab.errors import LabError
from farfill.testing.lab.lab import Lab
from farfill.testing.lab.process import Counters

_MESSAGE_BYTES = 65536
_PEER_DEADLINE_S = 5.0
# Taking a lab down kills and reaps.
_REPLY_DEADLINE_S = 30.0


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is to change on a link; None leaves it. `rtt_s` and `jitter_s` are of the round trip."""

    rate_bits_per_s: float | None = None
    rtt_s: float | None = None
    jitter_s: float | None = None
    loss: float | None = None
    queue_bytes: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A lab to bring up, with all links alike."""

    sites: tuple[str, ...]
    seed: int
    congestion_control: str | None
    setting: Setting


class Change(msgspec.Struct, frozen=True, tag=True):
    """Sets a link, or with `one_way` only the direction from `first` to `second`: then its half of the round trip."""

    first: str
    second: str
    one_way: bool
    setting: Setting


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Cuts or heals a link or one direction of it."""

    first: str
    second: str
    one_way: bool
    cut: bool


class Show(msgspec.Struct, frozen=True, tag=True):
    """Asks how things are."""


class Enter(msgspec.Struct, frozen=True, tag=True):
    """Asks for the site's network namespace; its descriptor comes with the reply."""

    site: str


class Down(msgspec.Struct, frozen=True, tag=True):
    """Takes the lab down; the reply comes when nothing of it is left."""


Request = Change | Cut | Show | Enter | Down


class DirectionState(msgspec.Struct, frozen=True):
    """One direction; times are one way, an infinite `rate_bits_per_s` is unlimited."""

    source: str
    target: str
    rate_bits_per_s: float
    delay_s: float
    jitter_s: float
    loss: float
    is_cut: bool
    counters: Counters


class Reply(msgspec.Struct, frozen=True):
    """`error` is empty when the request was done. `addresses` are by site."""

    error: str = ""
    addresses: dict[str, str] = {}
    directions: tuple[DirectionState, ...] = ()


_plans = msgspec.msgpack.Decoder(Plan)
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def apply_plan(lab: Lab, plan: Plan) -> None:
    """Sets every link of a lab that is up."""
    for i, first in enumerate(plan.sites):
        for second in plan.sites[i + 1 :]:
            _change(lab, Change(first, second, one_way=False, setting=plan.setting))


def bring_up(name: str, plan: Plan) -> Reply:
    """Starts a holder in the background; returns when its lab is up. Raises `LabError`."""
    holder = subprocess.Popen(
        [sys.executable, "-m", "farfill.testing.lab", "hold", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    # It writes only what went wrong, and closes its output when it is up or has given up; each of its steps until
    # then has a deadline.
    with holder.stdin as plan_file, holder.stdout as complaints:
        plan_file.write(msgspec.msgpack.encode(plan))
        plan_file.close()
        complaint = complaints.read().decode().strip().removeprefix("lab: ")
    if complaint:
        raise LabError(complaint)
    return ask(name, Show())[0]


def ask(name: str, request: Request) -> tuple[Reply, int | None]:
    """The holder's reply, and the descriptor that came with it. Raises `LabError` for its refusal or absence."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(_REPLY_DEADLINE_S)
        try:
            peer.connect(_address(name))
            peer.send(msgspec.msgpack.encode(request))
            data, fds, _, _ = socket.recv_fds(peer, _MESSAGE_BYTES, 1)
        except ConnectionRefusedError as error:
            raise LabError(f"no lab named {name} is up") from error
        except OSError as error:
            raise LabError(f"the lab named {name} does not answer: {error}") from error
    if not data:
        raise LabError(f"the lab named {name} ended")
    reply = _replies.decode(data)
    if reply.error:
        raise LabError(reply.error)
    return reply, fds[0] if fds else None


def hold(name: str) -> None:
    """Runs the holder: reads a plan from stdin, brings its lab up, serves requests until one says down."""
    plan = _plans.decode(sys.stdin.buffer.read())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            server.bind(_address(name))
        except OSError as error:
            raise LabError(f"a lab named {name} is up already") from error
        with Lab(plan.sites, seed=plan.seed, congestion_control=plan.congestion_control) as lab:
            apply_plan(lab, plan)
            server.listen()
            _close_output()
            last = _serve_until_down(server, lab)
        with last, contextlib.suppress(OSError):
            last.send(msgspec.msgpack.encode(Reply()))


def _close_output() -> None:
    """Tells `bring_up` that the lab is up, and lets go of its terminal."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


def _serve_until_down(server: socket.socket, lab: Lab) -> socket.socket:
    """Returns the connection that asked for the end and waits for the answer."""
    while True:
        peer, _ = server.accept()
        peer.settimeout(_PEER_DEADLINE_S)
        # A peer that left early or speaks another version gets no answer, which it reports itself.
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if _is_same_user(peer):
                request = _requests.decode(peer.recv(_MESSAGE_BYTES))
                if isinstance(request, Down):
                    return peer
                reply, fds = _answer(lab, request)
                socket.send_fds(peer, [msgspec.msgpack.encode(reply)], fds)
        peer.close()


def _answer(lab: Lab, request: Request) -> tuple[Reply, list[int]]:
    fds: list[int] = []
    try:
        match request:
            case Change():
                _change(lab, request)
            case Cut():
                pick = lab.direction if request.one_way else lab.link
                way = pick(request.first, request.second)
                (way.cut if request.cut else way.heal)()
            case Enter():
                fds = [lab.namespace(request.site)]
            case _:
                pass
        return _state(lab), fds
    except LabError as error:
        return Reply(error=str(error)), []


def _change(lab: Lab, change: Change) -> None:
    setting = change.setting
    if not change.one_way:
        lab.link(change.first, change.second).set(**msgspec.structs.asdict(setting))
        return
    lab.direction(change.first, change.second).set(
        rate_bits_per_s=setting.rate_bits_per_s,
        delay_s=None if setting.rtt_s is None else setting.rtt_s / 2,
        jitter_s=None if setting.jitter_s is None else setting.jitter_s / 2,
        loss=setting.loss,
        queue_bytes=setting.queue_bytes,
    )


def _state(lab: Lab) -> Reply:
    pairs = [(source, target) for source in lab.sites for target in lab.sites if source != target]
    states: list[DirectionState] = []
    for source, target in pairs:
        direction = lab.direction(source, target)
        wire = direction.wire
        states.append(
            DirectionState(
                source=source,
                target=target,
                rate_bits_per_s=wire.rate_bits_per_s,
                delay_s=wire.delay_s,
                jitter_s=wire.jitter_s,
                loss=wire.loss,
                is_cut=direction.is_cut,
                counters=direction.counters(),
            )
        )
    return Reply(addresses={site: lab.address(site) for site in lab.sites}, directions=tuple(states))


def _is_same_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.geteuid()


def _address(name: str) -> str:
    return f"\0farfill-lab-{name}"
