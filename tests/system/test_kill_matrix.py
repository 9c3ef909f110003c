"""Every kind of process killed and every link cut under load: no wrong token, no hang, no error but of streams that
died with their process or connection; served as before within two leases; nothing left behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from tests.system.cluster import PREFILL
from tests.system.kill_plane import DECODES, FAR, GATEWAYS, LEASE_S, KillPlane, running_plane
from tests.system.load import Load, Outcome, Prompt, make_prompts, steady_load

from farfill.testing.relay import Relay

CLIENTS = 2  # of each gateway
RECOVERY_S = 2 * LEASE_S
DEADLINE_S = 120.0  # of what depends on how busy the machine is, as the start of a process does


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillPlane]:
    with running_plane(tmp_path_factory.mktemp("kill")) as started:
        yield started


@pytest.fixture(scope="module")
def prompts(plane: KillPlane) -> list[Prompt]:
    return asyncio.run(make_prompts(plane.cluster.url, 4))


@asynccontextmanager
async def under_load(plane: KillPlane, prompts: list[Prompt]) -> AsyncIterator[Load]:
    """Everything serves when the block begins, and again, with nothing left behind, when it has ended."""
    async with steady_load(plane.urls, "full", prompts, CLIENTS) as load:
        await load.until(_all_serve, "all serve", DEADLINE_S)
        yield load
        await load.until(_all_serve, "all serve again", DEADLINE_S)
    await plane.check_nothing_left(DEADLINE_S)
    slowest_s = max(each.ended_s - each.began_s for each in load.outcomes)
    print(f"{len(load.outcomes)} requests, {len(load.errors())} errors, the slowest took {slowest_s:.2f} s")
    print(Counter((each.error, each.decode) for each in load.errors()))


def _all_serve(outcomes: list[Outcome]) -> bool:
    good = [each for each in outcomes if not each.error]
    return (
        {each.gateway for each in good} == set(GATEWAYS)
        and {each.decode for each in good} == set(DECODES)
        and {each.prefill for each in good if each.placement == "remote"} == set(FAR.values())
    )


async def test_gateway_killed(plane: KillPlane, prompts: list[Prompt]) -> None:
    name = "gateway-1"
    async with under_load(plane, prompts) as load:
        plane.cluster.kill(name)
        await load.until(lambda seen: any(each.gateway == name for each in seen), "it is missed", DEADLINE_S)
        plane.spawn(name)
        await plane.until_listening(name, 2, DEADLINE_S)
        await load.until(lambda seen: any(o.gateway == name and not o.error for o in seen), "it serves", RECOVERY_S)
    # Neither the others' clients nor its own, once it listens, notice anything.
    assert {(each.gateway, each.error.partition(":")[0]) for each in load.errors()} == {(name, "connection")}


@pytest.mark.parametrize("name", [PREFILL, DECODES[0]])
async def test_worker_killed(plane: KillPlane, prompts: list[Prompt], name: str) -> None:
    async with under_load(plane, prompts) as load:
        former, killed_s = await plane.known(name), load.now_s()
        plane.cluster.kill(name)
        await _until_gone(plane, load, name)
        plane.spawn(name)
        await load.until(lambda _: _is_another(plane, name, former), "a new life is known", DEADLINE_S)
        took_s = await load.until(
            lambda seen: any(name in (o.decode, o.prefill) for o in seen), "it serves", RECOVERY_S
        )
        print(f"{name} serves {took_s:.2f} s after it is known")
    _check_only_streams_of(load, name if name in DECODES else "", killed_s)


async def test_decode_frozen(plane: KillPlane, prompts: list[Prompt]) -> None:
    """A host without power says nothing: its streams end all the same."""
    name = DECODES[0]
    async with under_load(plane, prompts) as load:
        frozen_s = load.now_s()
        plane.cluster.signal(name, signal.SIGSTOP)
        try:
            await _until_gone(plane, load, name)
            await load.until(lambda _: load.oldest_s() > frozen_s, "all that ran have ended", RECOVERY_S)
        finally:
            plane.cluster.signal(name, signal.SIGCONT)
    _check_only_streams_of(load, name, frozen_s)


@pytest.mark.parametrize("name", ["registry", "etcd"])
async def test_state_killed(plane: KillPlane, prompts: list[Prompt], name: str) -> None:
    async with under_load(plane, prompts) as load:
        await asyncio.to_thread(plane.etcd.kill if name == "etcd" else lambda: plane.cluster.kill(name))
        await _until_registry(plane, load, "away", DEADLINE_S)
        await _served_for(load, 1.5 * LEASE_S, "all serve from what they know, though nobody could renew")
        if name == "etcd":
            await asyncio.to_thread(plane.etcd.start)
        else:
            plane.spawn(name)
            await plane.until_listening(name, 2, DEADLINE_S)
        back_s = load.now_s()
        await _until_registry(plane, load, "ok", RECOVERY_S)
        print(f"{name}: all gateways hear of it {load.now_s() - back_s:.2f} s after it is back")
    assert not load.errors()


@pytest.mark.parametrize("link", ["kv", "control", "registry", "etcd", "all"])
async def test_link_cut(plane: KillPlane, prompts: list[Prompt], link: str) -> None:
    """Of one far site, or the registry's to etcd. A router that fails swallows packets; a host that is gone resets."""
    site = plane.sites["far"]
    cut: tuple[Relay, ...] = {
        "kv": (site.kv,),
        "control": (site.control,),
        "registry": (site.registry,),
        "etcd": (plane.etcd_link,),
        "all": site.all,
    }[link]
    async with under_load(plane, prompts) as load:
        try:
            for relay in cut:
                (relay.blackhole if link in ("all", "etcd") else relay.cut)()
            if site.registry in cut:
                await _until_gone(plane, load, PREFILL)
            await _served_for(load, 1.5 * LEASE_S, "others prefill")
        finally:
            for relay in cut:
                relay.heal()
        took_s = await load.until(lambda seen: any(o.prefill == PREFILL for o in seen), "it serves again", RECOVERY_S)
        print(f"{link}: {PREFILL} serves {took_s:.2f} s after the link is whole")
    assert not load.errors()


async def test_both_far_sites_without_kv(plane: KillPlane, prompts: list[Prompt]) -> None:
    async with under_load(plane, prompts) as load:
        try:
            for site in plane.sites.values():
                site.kv.cut()
            await load.until(lambda seen: sum(o.long and o.placement == "local" for o in seen) >= 6, "near", DEADLINE_S)
        finally:
            for site in plane.sites.values():
                site.kv.heal()
    assert not load.errors()
    near = Counter((each.reason, each.fallback) for each in load.outcomes if each.long and each.placement == "local")
    print(near)
    assert all(fallback or reason == "breaker_open" for reason, fallback in near), near


async def test_gateway_stopped_at_once(plane: KillPlane, prompts: list[Prompt]) -> None:
    """The second SIGTERM does not wait for streams, and tells them."""
    name = "gateway-2"
    async with under_load(plane, prompts) as load:
        lives = len(plane.cluster.events(name, "listening"))
        for event in ("stopping", "stopped_at_once"):
            plane.cluster.signal(name, signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                while not plane.cluster.events(name, event):
                    await asyncio.sleep(0.01)
        await asyncio.to_thread(plane.cluster.ended, name)
        plane.spawn(name)
        await plane.until_listening(name, lives + 1, DEADLINE_S)
    assert {each.gateway for each in load.errors()} == {name}
    for each in load.errors():
        told = each.error in ("event gateway_stopping", "503 gateway_stopping")
        assert told or (each.tokens == 0 and each.error.startswith("connection")), each


async def test_way_to_one_decode_worker_cut(plane: KillPlane, prompts: list[Prompt]) -> None:
    async with under_load(plane, prompts) as load:
        cut_s = load.now_s()
        try:
            plane.decode_link.cut()
            await load.until(lambda seen: sum(o.decode == DECODES[0] for o in seen) >= 6, "the other", DEADLINE_S)
        finally:
            plane.decode_link.heal()
    _check_only_streams_of(load, DECODES[1], cut_s)


async def test_cluster_file_changed_under_load(plane: KillPlane, prompts: list[Prompt]) -> None:
    async with under_load(plane, prompts) as load:
        for threshold, wanted in ((100_000, "local"), (256, "remote")):
            await plane.reload({"routing": {"remote_prefill_threshold_tokens": threshold}}, DEADLINE_S)
            first = len(load.outcomes) + len(load.running)  # those may have been placed before
            await load.until(
                lambda _, first=first, wanted=wanted: any(
                    each.long and each.placement == wanted for each in load.outcomes[first:]
                ),
                f"long prompts go {wanted}",
                DEADLINE_S,
            )
    assert not load.errors()


def test_every_decision_of_all_that_is_made_again_identically(plane: KillPlane) -> None:
    """By `farfill replay`, from the logs of all gateways that ran here, the killed ones' too."""
    logs = sorted((plane.cluster.folder / "decisions").glob("*.jsonl"))
    assert len(logs) >= len(GATEWAYS)
    decisions = 0
    for log in logs:
        command = [sys.executable, "-m", "farfill.cli.main", "replay", str(log)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.rstrip().endswith("; 0 differ")
        decisions += int(done.stdout.split()[0])
    assert decisions > 200


def _check_only_streams_of(load: Load, name: str, struck_s: float) -> None:
    """Errors came to streams of `name` only that had begun before, and soon."""
    for each in load.errors():
        assert (each.decode, each.error) == (name, "event worker_lost"), each
        assert each.tokens > 0, each
        assert each.began_s < struck_s, each
        assert each.ended_s - struck_s < RECOVERY_S, each


async def _served_for(load: Load, seconds: float, what: str) -> None:
    """Everybody answers, and some long prompts go far, for so long."""
    end_s = load.now_s() + seconds

    def served(seen: list[Outcome]) -> bool:
        good = [each for each in seen if not each.error]
        far = sum(each.placement == "remote" for each in good)
        return load.now_s() > end_s and {each.gateway for each in good} == set(GATEWAYS) and far >= 3

    await load.until(served, what, DEADLINE_S)


async def _until_registry(plane: KillPlane, load: Load, wanted: str, deadline_s: float) -> None:
    async def told() -> bool:
        return all(state.startswith(wanted) for state in (await plane.registry_state()).values())

    await load.until(lambda _: told(), f"all gateways say that the registry is {wanted}", deadline_s)


async def _until_gone(plane: KillPlane, load: Load, name: str) -> None:
    async def gone() -> bool:
        return not await plane.known(name)

    await load.until(lambda _: gone(), f"{name} has left", RECOVERY_S)


async def _is_another(plane: KillPlane, name: str, former: str) -> bool:
    return await plane.known(name) not in ("", former)
