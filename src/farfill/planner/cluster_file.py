"""A cluster file from a plan: sites, workers and threshold filled in, addresses and keys to be made one's own."""

from __future__ import annotations

from pathlib import Path

import yaml

from farfill.config.load import load_config
from farfill.config.routing import RoutingConfig
from farfill.core.errors import ConfigError
from farfill.planner.answer import Answer
from farfill.planner.problem import Problem

_CONTROL_PORT, _TRANSFER_PORT = 7500, 7501
_HEAD = """\
# Made by `farfill plan capacity` for {model}: {rate:.2f} requests/s planned, {capacity:.2f} possible.
# Before use: put your own addresses, model folder and keys. `farfill config check` checks it, `farfill pki init` makes
# certificates for the names below. Every key: docs/configuration.md.
#
# Of the {near} decode workers the plan counts {prefill} for the prefill of prompts below the threshold: decode workers
# prefill those themselves, so that the work is shared by all of them.
"""


def write_cluster_file(path: Path, problem: Problem, answer: Answer) -> None:
    """Raises ConfigError when it cannot be written; what was written is valid (`farfill config check --no-files`)."""
    plan = answer.plan
    near = _name(problem.near.name)
    workers: dict[str, dict[str, object]] = {}
    for i in range(plan.near_prefill + plan.near_decode):
        host = f"decode-{i + 1}.{near}.example"
        workers[f"{near}-decode-{i + 1}"] = {
            "role": "decode",
            "site": near,
            "listen": f"0.0.0.0:{_CONTROL_PORT}",
            "advertise": f"{host}:{_CONTROL_PORT}",
            "transfer_listen": f"0.0.0.0:{_TRANSFER_PORT}",
            "transfer_advertise": f"{host}:{_TRANSFER_PORT}",
        }
    for part in plan.far:
        site = _name(part.site)
        for i in range(part.instances):
            workers[f"{site}-prefill-{i + 1}"] = {
                "role": "prefill",
                "site": site,
                "listen": f"0.0.0.0:{_CONTROL_PORT}",
                "advertise": f"prefill-{i + 1}.{site}.example:{_CONTROL_PORT}",
            }
    file: dict[str, object] = {
        "version": 1,
        "cluster": "farfill",
        "model": {"name": problem.name, "path": str(problem.model_dir or f"models/{_name(problem.name)}")},
        "gateway": {"site": near, "listen": "0.0.0.0:8000"},
        "registry": {"site": near, "listen": "0.0.0.0:7400", "advertise": f"registry.{near}.example:7400"},
        "workers": workers,
        "prefill": {"chunked_prefill_tokens": problem.chunk_tokens},
        "tls": {"ca": "file:pki/ca.pem", "cert": "file:pki/{name}.pem", "key": "file:pki/{name}.key"},
        "tickets": {"signing_key": "file:pki/ticket.key", "public_key": "file:pki/ticket.pub"},
    }
    if plan.threshold_tokens is not None:
        limit = RoutingConfig().link_utilisation_limit
        file["routing"] = {
            "remote_prefill_threshold_tokens": plan.threshold_tokens,
            "link_utilisation_target": problem.link_utilisation,
            "link_utilisation_limit": max(limit, problem.link_utilisation),
        }
    head = _HEAD.format(
        model=problem.name,
        rate=answer.rate_per_s,
        capacity=plan.capacity_per_s,
        near=plan.near_prefill + plan.near_decode,
        prefill=plan.near_prefill,
    )
    try:
        path.write_text(head + "\n" + yaml.safe_dump(file, sort_keys=False, allow_unicode=True), "utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    load_config(path)


def _name(text: str) -> str:
    """`text` as the names of a cluster file may be."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower()).strip("-")
    return kept[:40].strip("-") or "site"
