"""`farfill parity`: does far prefill change a single token? Asks a running cluster, or one it starts for it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from farfill.cli.gateway_access import ApiKey, GatewayCa, RecordsAt, gateway_access
from farfill.cli.keys import AdminCa, AdminKey
from farfill.cli.local_cluster import LocalCluster, LocalPlan
from farfill.cli.local_ports import free_ports
from farfill.cli.local_ready import until_ready
from farfill.cli.model_store import fetch, find_source
from farfill.cli.progress import progress
from farfill.cli.stoppable import run_stoppable
from farfill.config.load import load_config
from farfill.core.errors import ConfigError
from farfill.verify.client import GatewayAccess, GatewayUnreachableError, gateway_client
from farfill.verify.parity import ParityResult, run_parity
from farfill.verify.parity_report import describe, print_report, to_json
from farfill.verify.prompts import (
    DEFAULT_LENGTHS,
    DEFAULT_OUTPUT_TOKENS,
    corpus_cases,
    file_cases,
    load_corpus,
)

_LENGTHS = ",".join(str(length) for length in DEFAULT_LENGTHS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityPlan:
    """What to compare, wherever the gateway is."""

    lengths: tuple[int, ...]
    prompts: Path | None
    max_tokens: int
    repeat: int
    concurrency: int
    allow_lossy: bool = False


def parity(
    *,
    config: Annotated[Path | None, typer.Option(help="Cluster file of the running cluster.")] = None,
    gateway: Annotated[str | None, typer.Option(help="URL of the gateway, instead of --config.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL of {"prompt"} or {"token_ids"}, with "max_tokens" if wanted.')
    ] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, from the built-in prose.")] = _LENGTHS,
    tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each run.")] = DEFAULT_OUTPUT_TOKENS,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds over the lengths, each with other text.")] = 1,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1,
            help="Prompts compared at the same time; from 2 on, decode is batched. On the CPU that changes no bit as"
            " long as layers have at most 4096 inputs.",
        ),
    ] = 1,
    allow_lossy: Annotated[
        bool, typer.Option("--allow-lossy", help="Compare although KV travels in a lossy form (kv_transfer.lossy).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
    start: Annotated[bool, typer.Option("--up", help="Start a cluster for this run, and stop it.")] = False,
    model: Annotated[
        str | None,
        typer.Option(help="With --up: smollm2 (default) or gemma3. Else one the gateway offers (the first)."),
    ] = None,
    api_key: ApiKey = "",
    ca: GatewayCa = "",
    admin: RecordsAt = "",
    admin_key: AdminKey = "",
    admin_ca: AdminCa = "",
    dtype: Annotated[str | None, typer.Option(help="With --up: float32 (default) or bfloat16.")] = None,
    accept_gemma_terms: Annotated[
        bool, typer.Option("--accept-gemma-terms", help="You accept the Gemma Terms of Use.")
    ] = False,
) -> None:
    """Compare far-prefilled with local output, token id by token id. 1: not equal. 2: no cluster to ask."""
    refuse_contradictions(
        {"--up": start, "--gateway": gateway, "--config": config},
        {"--dtype": dtype, "--accept-gemma-terms": accept_gemma_terms},
    )
    plan = ParityPlan(
        lengths=_parse_lengths(lengths),
        prompts=prompts,
        max_tokens=tokens,
        repeat=repeat,
        concurrency=concurrency,
        allow_lossy=allow_lossy,
    )
    console = Console(stderr=True)
    if start:
        cluster_plan = local_plan(model or "smollm2", dtype or "float32", console, accept_gemma_terms)
        result = run_stoppable(_compare_once(cluster_plan, plan, console))
    else:
        try:
            if config is not None and not allow_lossy:
                refuse_lossy(config)
            access = gateway_access(
                gateway_url(config, gateway),
                model=model or "",
                api_key=api_key,
                ca=ca,
                admin=admin,
                admin_key=admin_key,
                admin_ca=admin_ca,
            )
            result = asyncio.run(compare(access, plan, console))
        except GatewayUnreachableError as error:
            raise ConfigError(f"{error}\nstart a cluster first (farfill up), or say --up") from error
    if as_json:
        typer.echo(to_json(result))
    else:
        print_report(Console(), result)
    if not result.ok:
        sys.exit(1)


def refuse_contradictions(clusters: Mapping[str, object], of_up: Mapping[str, object]) -> None:
    """Raises ConfigError when more than one cluster is said, or options `of_up` without --up."""
    said = [name for name, value in clusters.items() if value]
    if len(said) > 1:
        raise ConfigError(f"{' and '.join(said)} contradict each other; say one of them")
    stray = [name for name, value in of_up.items() if value]
    if stray and "--up" not in said:
        raise ConfigError(f"without --up there is no use for {', '.join(stray)}; leave it out, or say --up")


def local_plan(model: str, dtype: str, console: Console, accept_gemma_terms: bool) -> LocalPlan:
    """A throw-away cluster with room for the longest prompts. Fetches the model when it is not there."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype is float32 or bfloat16, not {dtype!r}")
    source = find_source(model)
    with progress(console) as report:
        folder = fetch(source, accept_terms=accept_gemma_terms, report=report)
    return LocalPlan(
        model_name=source.folder,
        model_dir=folder,
        port=free_ports(1)[0],
        threshold_tokens=512,
        dtype=dtype,
        timeout_ms=60_000,
    )


async def _compare_once(cluster_plan: LocalPlan, plan: ParityPlan, console: Console) -> ParityResult:
    with LocalCluster(cluster_plan) as cluster:
        cluster.start()
        with progress(console) as report:
            await until_ready(cluster, report)
        return await compare(cluster.url, plan, console)


async def compare(access: GatewayAccess | str, plan: ParityPlan, console: Console) -> ParityResult:
    """Run `plan` against that gateway, telling `console` of each row."""
    async with gateway_client(access) as client:
        model = await client.model()
        cases = []
        if plan.prompts is not None:
            cases += await file_cases(
                client, plan.prompts, max_tokens=plan.max_tokens, context_tokens=model.context_tokens
            )
        if plan.lengths:
            corpus = await load_corpus(client)
            cases += corpus_cases(
                corpus,
                plan.lengths,
                repeat=plan.repeat,
                max_tokens=plan.max_tokens,
                context_tokens=model.context_tokens,
            )
        return await run_parity(
            client,
            cases,
            concurrency=plan.concurrency,
            allow_lossy=plan.allow_lossy,
            progress=lambda row: console.print(describe(row), highlight=False),
        )


def gateway_url(config: Path | None, gateway: str | None) -> str:
    """Where the gateway is. Raises ConfigError when it is not said, no URL, or the file forbids to force placements."""
    if gateway is not None:
        return checked_url(gateway)
    if config is None:
        raise ConfigError("say which cluster: --config FILE or --gateway URL, or --up to start one for this run")
    loaded = load_config(config)
    if not loaded.config.routing.allow_placement_override:
        raise ConfigError(
            f"{config}: parity forces placements; set routing.allow_placement_override: true and restart the gateway"
        )
    scheme = "https" if loaded.config.gateway.tls_cert is not None else "http"
    return f"{scheme}://{loaded.config.gateway.listen}"


def refuse_lossy(config: Path) -> None:
    """Raises ConfigError when the cluster sends KV in a lossy form: outputs would differ, and rightly so."""
    form = load_config(config).config.kv_transfer.lossy
    if form != "none":
        raise ConfigError(
            f"{config}: kv_transfer.lossy is {form}, so outputs may differ; set it to none, or say --allow-lossy"
        )


def checked_url(url: str) -> str:
    """`url`. Raises ConfigError when it is not one of an HTTP server."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bad port or IPv6 address
        good = False
    if not good:
        raise ConfigError(f"--gateway takes a URL such as http://127.0.0.1:8000, not {url!r}")
    return url


def _parse_lengths(text: str) -> tuple[int, ...]:
    parts: Sequence[str] = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) >= 2 for part in parts):
        raise ConfigError(f"--lengths takes numbers from 2 up, with commas between, not {text!r}")
    return tuple(int(part) for part in parts)
