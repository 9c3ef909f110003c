"""What no single key can tell: whether the parts of a cluster file fit each other."""

from __future__ import annotations

import ipaddress
import string
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from farfill.config.access_checks import access_problems
from farfill.config.model import ClusterConfig
from farfill.config.models import FIRST, model_problems, models_of
from farfill.config.problems import KeyPath, Problem, closest
from farfill.core.cluster import Role

_MODEL_FILES = ("config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One listening address. `reached_at` is where others connect; equal `owner` means one process."""

    path: KeyPath
    owner: str
    listen: str
    reached_at: str


def cross_problems(config: ClusterConfig) -> list[Problem]:
    """Contradictions between keys that are each valid."""
    return [
        *_worker_problems(config),
        *_transfer_problems(config),
        *_peer_problems(config),
        *_address_problems(config),
        *_engine_problems(config),
        *_routing_problems(config),
        *_registry_problems(config),
        *_tls_problems(config),
        *access_problems(config),
        *model_problems(config),
    ]


def model_file_problems(config: ClusterConfig, base_dir: Path) -> list[Problem]:
    """Whether the models' folders have what a worker loads. Separate: a laptop may not hold the models."""
    return [
        problem
        for key, model in models_of(config).items()
        for problem in _folder_problems(
            ("models", key, "path") if key != FIRST else ("model", "path"), base_dir / model.path
        )
    ]


def _folder_problems(path: KeyPath, folder: Path) -> list[Problem]:
    fix = "run `farfill model fetch`, or correct the path (it is relative to this file)"
    if not folder.is_dir():
        return [Problem(path, f"{folder} is not a folder", fix)]
    missing = [name for name in _MODEL_FILES if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return [Problem(path, f"{folder} has no {', '.join(missing)}", fix)] if missing else []


def _worker_problems(config: ClusterConfig) -> Iterator[Problem]:
    decode_sites = sorted({w.site for w in config.workers.values() if w.role is not Role.PREFILL})
    if not decode_sites:
        yield Problem(("workers",), "no worker decodes", "add one with role decode or mixed")
    elif config.gateway.site not in decode_sites:
        near = closest(config.gateway.site, decode_sites)
        yield Problem(
            ("gateway", "site"),
            f"no decode worker at site {config.gateway.site!r}, where the gateway runs",
            f"did you mean {near}?" if near else f"decode workers are at: {', '.join(decode_sites)}",
        )
    for name in sorted({"gateway", "registry"} & set(config.workers)):
        yield Problem(("workers", name), f"{name} is the name of a role", "give the worker another name")


def _transfer_problems(config: ClusterConfig) -> Iterator[Problem]:
    """The side that does not dial KV connections listens, the other does not; mixed workers are on both sides."""
    dials = config.kv_transfer.dial
    listening = Role.DECODE if dials == "sender" else Role.PREFILL
    for name, worker in config.workers.items():
        listens = worker.role in (listening, Role.MIXED)
        if listens and worker.transfer_listen is None:
            yield Problem(
                ("workers", name),
                f"a {worker.role} worker needs transfer_listen, the address for KV connections",
                "add transfer_listen: host:port",
            )
        elif not listens and worker.transfer_listen is not None:
            yield Problem(
                ("workers", name, "transfer_listen"),
                f"a {worker.role} worker dials KV connections and accepts none (kv_transfer.dial: {dials})",
                "remove it",
            )


def _peer_problems(config: ClusterConfig) -> Iterator[Problem]:
    """An entry that fits no worker lets nobody in, and would refuse everybody if it were the only one."""
    transfer = config.kv_transfer
    paths = [f"{worker.site}/{worker.role}/{name}" for name, worker in config.workers.items()]
    for number, pattern in enumerate(transfer.allowed_peers):
        if not any(fnmatchcase(path, pattern) for path in paths):
            yield Problem(
                ("kv_transfer", "allowed_peers", number),
                f"{pattern!r} fits no worker of this file",
                f"write site/role/name with * as a wildcard, such as {paths[0] if paths else 'far/prefill/*'}",
            )
    if transfer.chunk_size_mb > transfer.receive_budget_mb:
        yield Problem(
            ("kv_transfer", "chunk_size_mb"),
            f"{transfer.chunk_size_mb} is more than receive_budget_mb ({transfer.receive_budget_mb})",
            f"give at most {transfer.receive_budget_mb}, or raise receive_budget_mb",
        )


def lets_in_nobody(config: ClusterConfig, name: str) -> bool:
    """Whether `allowed_peers` fits no worker of this file that `name` could exchange KV with, though there are some.

    Not wrong in every file: a site's own may name only the workers that others let in.
    """
    patterns, own = config.kv_transfer.allowed_peers, config.workers[name].role
    paths = [
        f"{worker.site}/{worker.role}/{other}"
        for other, worker in config.workers.items()
        if other != name and (worker.role is not own or own is Role.MIXED)
    ]
    return bool(patterns and paths) and not any(fnmatchcase(path, one) for path in paths for one in patterns)


def _engine_problems(config: ClusterConfig) -> Iterator[Problem]:
    engine = config.engine
    if engine.prefix_cache_mb > engine.kv_cache_mb:
        yield Problem(
            ("engine", "prefix_cache_mb"),
            f"{engine.prefix_cache_mb} is more than kv_cache_mb ({engine.kv_cache_mb}), of which it is a part",
            f"give at most {engine.kv_cache_mb}, or raise kv_cache_mb",
        )
    if engine.type != "vllm" and engine.attach is not None:
        yield Problem(("engine", "attach"), f"engine.type is {engine.type}", "set engine.type: vllm")


def _routing_problems(config: ClusterConfig) -> Iterator[Problem]:
    routing = config.routing
    for low, high in (
        ("threshold_min_tokens", "threshold_max_tokens"),
        ("link_abundant_below", "link_scarce_above"),
        ("link_utilisation_target", "link_utilisation_limit"),
    ):
        if getattr(routing, low) > getattr(routing, high):
            told = f"{getattr(routing, low)} is more than {high} ({getattr(routing, high)})"
            yield Problem(("routing", low), told, f"give at most {getattr(routing, high)}")


def _registry_problems(config: ClusterConfig) -> Iterator[Problem]:
    registry = config.registry
    if registry.store == "etcd" and registry.etcd is None:
        yield Problem(("registry", "store"), "etcd without its address", "add etcd: {endpoints: ['https://host:2379']}")
    etcd = registry.etcd
    if etcd is None:
        return
    if registry.store != "etcd":
        yield Problem(("registry", "etcd"), "is not used by the embedded store", "remove it, or set store: etcd")
    if (etcd.cert is None) != (etcd.key is None):
        given, other = ("cert", "key") if etcd.cert else ("key", "cert")
        yield Problem(("registry", "etcd", given), f"{given} without {other}", f"add {other}, or remove {given}")
    if bool(etcd.user) != (etcd.password is not None):
        given, other = ("user", "password") if etcd.user else ("password", "user")
        yield Problem(("registry", "etcd", given), f"{given} without {other}", f"add {other}, or remove {given}")
    plain = [endpoint for endpoint in etcd.endpoints if endpoint.startswith("http:")]
    if plain and (etcd.password is not None or etcd.ca is not None):
        yield Problem(
            ("registry", "etcd", "endpoints"), f"{plain[0]} would send the password in the clear", "use https://"
        )


def _tls_problems(config: ClusterConfig) -> Iterator[Problem]:
    for key in ("cert", "key"):
        reference: str = getattr(config.tls, key)
        try:
            names = {name for _, name, _, _ in string.Formatter().parse(reference) if name is not None}
        except ValueError:
            names = {"unbalanced braces"}
        if unknown := sorted(names - {"name"}):
            yield Problem(
                ("tls", key), f"cannot fill in {', '.join(unknown) or 'empty braces'}", "only {name} is known here"
            )
        elif reference.startswith("file:") and not names:
            yield Problem(
                ("tls", key),
                "names one file for all roles, but each has its own identity",
                "put {name} into it, such as file:pki/{name}." + ("pem" if key == "cert" else "key"),
            )
    if (config.gateway.tls_cert is None) != (config.gateway.tls_key is None):
        given, other = ("tls_cert", "tls_key") if config.gateway.tls_cert else ("tls_key", "tls_cert")
        yield Problem(("gateway", given), f"{given} without {other}", f"add {other}, or remove {given} for plain HTTP")


def _address_problems(config: ClusterConfig) -> Iterator[Problem]:
    endpoints = list(_endpoints(config))
    usable: list[_Endpoint] = []
    for endpoint in endpoints:
        problem = _endpoint_problem(endpoint)
        if problem is None:
            usable.append(endpoint)
        else:
            yield problem
    for i, second in enumerate(usable):
        for first in usable[:i]:
            if _clash(first, second):
                other = ".".join(str(part) for part in first.path)
                yield Problem(second.path, f"same address as {other} ({first.listen})", "give it another port")
                break


def _endpoints(config: ClusterConfig) -> Iterator[_Endpoint]:
    gateway, registry = config.gateway, config.registry
    yield _Endpoint(("gateway", "listen"), "gateway", gateway.listen, gateway.listen)
    if config.admin is not None:
        reached_at = config.admin.advertise or config.admin.listen
        yield _Endpoint(("admin", "listen"), "gateway", config.admin.listen, reached_at)
    yield _Endpoint(("registry", "listen"), "registry", registry.listen, registry.advertise or registry.listen)
    for name, worker in config.workers.items():
        yield _Endpoint(("workers", name, "listen"), name, worker.listen, worker.advertise or worker.listen)
        if worker.transfer_listen is not None:
            reached_at = worker.transfer_advertise or worker.transfer_listen
            yield _Endpoint(("workers", name, "transfer_listen"), name, worker.transfer_listen, reached_at)
        if worker.vllm_listen is not None:
            yield _Endpoint(("workers", name, "vllm_listen"), name, worker.vllm_listen, worker.vllm_listen)


def _endpoint_problem(endpoint: _Endpoint) -> Problem | None:
    listen_key = str(endpoint.path[-1])
    advertise_key = listen_key.replace("listen", "advertise")
    for key, address in ((listen_key, endpoint.listen), (advertise_key, endpoint.reached_at)):
        port = split_address(address)[1]
        if not 1 <= port <= 65535:
            return Problem((*endpoint.path[:-1], key), f"{port} is not a port", "give a port from 1 to 65535")
    if endpoint.owner != "gateway" and _is_wildcard(split_address(endpoint.reached_at)[0]):
        return Problem(
            endpoint.path,
            f"others cannot connect to {endpoint.reached_at}",
            f"add {advertise_key} with the address they reach it at",
        )
    return None


def _clash(first: _Endpoint, second: _Endpoint) -> bool:
    """Whether the two cannot both exist: one reachable address, or one port of one host."""
    if first.reached_at == second.reached_at:
        return True
    (host_a, port_a), (host_b, port_b) = split_address(first.listen), split_address(second.listen)
    if port_a != port_b or not (host_a == host_b or _is_wildcard(host_a) or _is_wildcard(host_b)):
        return False
    reach_a, reach_b = split_address(first.reached_at)[0], split_address(second.reached_at)[0]
    return first.owner == second.owner or reach_a == reach_b


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port"; an IPv6 host loses its brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
