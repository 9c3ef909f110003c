"""`farfill plan`: KV sizes, profiles and capacity, before anything is bought."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from farfill.cli.gateway_access import ApiKey, GatewayCa, RecordsAt, gateway_access
from farfill.cli.keys import AdminCa, AdminKey
from farfill.cli.parity import checked_url
from farfill.cli.progress import progress
from farfill.core.errors import ConfigError
from farfill.planner.accelerators import ACCELERATORS, find_accelerator
from farfill.planner.aiconfigurator import import_profile
from farfill.planner.answer import write_answer
from farfill.planner.capacity import plan_capacity
from farfill.planner.capacity_report import draw_answer, print_answer
from farfill.planner.cluster_file import write_cluster_file
from farfill.planner.estimates import estimate_file
from farfill.planner.geometry import Geometry, derive_geometry
from farfill.planner.kv_report import draw_kv, print_kv
from farfill.planner.kv_size import REPORT_LENGTHS, KVReport, report_kv
from farfill.planner.model_config import Json, read_model_config
from farfill.planner.paged import vllm_geometry
from farfill.planner.plot import check_plot_path
from farfill.planner.problem import read_problem
from farfill.planner.profile import Profile
from farfill.planner.profile_file import ProfileFile, read_profile, write_profile
from farfill.planner.roofline import Efficiency, estimate_profile
from farfill.verify.client import GatewayAccess, gateway_client
from farfill.verify.profile import ProfilePlan, measure_profile

app = typer.Typer(no_args_is_help=True, help="Plan before you buy: KV sizes, profiles, capacity.")

_DIGITS = 10
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of tables.")]
Plot = Annotated[Path | None, typer.Option(help="Draw there: .png, .svg or .pdf.")]
Like = Annotated[str | None, typer.Option(help="Read an unknown model type as this known one.")]
KvDtype = Annotated[str | None, typer.Option(help="Type of the cache; unset: the config's, or bfloat16.")]
WeightBytes = Annotated[float, typer.Option(min=0.1, max=4, help="Bytes of one weight, for estimates.")]


@app.command("kv")
def kv(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="config.json, its folder, or a cached hub id.")],
    *,
    kv_dtype: KvDtype = None,
    state_dtype: Annotated[
        str | None, typer.Option(help="Type of recurrent states; unset: float32, or vLLM's choice.")
    ] = None,
    engine: Annotated[str, typer.Option(help="Whose cache: torch, the embedded engine; or vllm, in blocks.")] = "torch",
    block_tokens: Annotated[
        int, typer.Option(min=1, help="With --engine vllm: tokens of a block (--block-size).")
    ] = 16,
    tp: Annotated[int, typer.Option(min=1, max=1024, help="Tensor-parallel ranks.")] = 1,
    like: Like = None,
    lengths: Annotated[str | None, typer.Option(help="Prompt lengths, with commas; unset: 1K to 1M.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Profile whose prefill times give KV throughput.")] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="Estimate prefill times for this, instead of --profile.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="With --accelerator: how many make an instance.")] = 8,
    weight_bytes: WeightBytes = 2.0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """How large a model's KV is at any length, and how much of it an instance makes."""
    if profile is not None and accelerator is not None:
        raise ConfigError("--profile and --accelerator contradict each other; say one of them")
    if engine not in ("torch", "vllm"):
        raise ConfigError(f"--engine is torch or vllm, not {engine!r}")
    if plot is not None:
        check_plot_path(plot)
    asked = REPORT_LENGTHS if lengths is None else _lengths(lengths, "--lengths")
    reports: list[KVReport] = []
    for model in models:
        config, path = read_model_config(model)
        geometry = derive_geometry(config, kv_dtype=kv_dtype, state_dtype=state_dtype or "float32", like=like)
        if engine == "vllm":
            geometry = vllm_geometry(geometry, block_tokens, state_dtype=state_dtype)
        times = None if profile is None else read_profile(profile)
        if accelerator is not None:
            times = _estimate(config, geometry, accelerator, gpus, weight_bytes)
        name = _model_name(model, path)
        reports.append(report_kv(name, geometry, lengths=asked, tensor_parallel=tp, prefill=times))
    if as_json:
        typer.echo(msgspec.json.encode(reports if len(reports) > 1 else reports[0]).decode())
    else:
        for report in reports:
            print_kv(Console(), report)
    if plot is not None:
        draw_kv(reports, plot)


@app.command("profile")
def profile(
    out: Annotated[Path, typer.Argument(help="Profile file to write.")],
    *,
    gateway: Annotated[str | None, typer.Option(help="Measure through this running gateway.")] = None,
    where: Annotated[
        str, typer.Option(help="With --gateway: prefill local, or remote without the link's share.")
    ] = "local",
    estimate: Annotated[str | None, typer.Option("--estimate", metavar="MODEL", help="Roofline of this model.")] = None,
    aiconfigurator: Annotated[str | None, typer.Option(metavar="HF_ID", help="From aiconfigurator's database.")] = None,
    accelerator: Annotated[str, typer.Option(help="What it runs on; of estimates and imports.")] = "",
    gpus: Annotated[int, typer.Option(min=1, help="Accelerators of one instance.")] = 1,
    backend: Annotated[str, typer.Option(help="With --aiconfigurator: vllm, sglang or trtllm.")] = "vllm",
    weight_bytes: WeightBytes = 2.0,
    name: Annotated[str | None, typer.Option(help="Name of the profile; unset: the file's.")] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths, with commas.")] = "256,512,1024,2048,4096",
    batches: Annotated[str, typer.Option(help="Sequences decoded together, with commas.")] = "1,2,4,8",
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each decode measurement.")] = 32,
    repeat: Annotated[int, typer.Option(min=1, max=100, help="Measurements of each figure; the median counts.")] = 3,
    like: Like = None,
    model: Annotated[str, typer.Option(help="With --gateway: one it offers (the first).")] = "",
    api_key: ApiKey = "",
    ca: GatewayCa = "",
    admin: RecordsAt = "",
    admin_key: AdminKey = "",
    admin_ca: AdminCa = "",
) -> None:
    """Write how fast an instance is: measured, estimated, or imported."""
    said = [
        option
        for option, value in (("--gateway", gateway), ("--estimate", estimate), ("--aiconfigurator", aiconfigurator))
        if value
    ]
    if len(said) != 1:
        raise ConfigError(
            f"say exactly one of --gateway, --estimate and --aiconfigurator, not {' and '.join(said) or 'none'}"
        )
    if gateway is None and not accelerator:
        raise ConfigError(
            f"{said[0]} needs --accelerator, what an instance runs on; known are: {', '.join(ACCELERATORS)}"
        )
    name = name or out.stem
    asked, wanted = _lengths(lengths, "--lengths"), _lengths(batches, "--batches")
    if gateway is not None:
        if where not in ("local", "remote"):
            raise ConfigError(f"--where is local or remote, not {where!r}")
        plan = ProfilePlan(
            name=name,
            accelerator=accelerator,
            gpus=gpus,
            remote=where == "remote",
            lengths=asked,
            batches=wanted,
            output_tokens=tokens,
            repeat=repeat,
        )
        access = gateway_access(
            checked_url(gateway),
            model=model,
            api_key=api_key,
            ca=ca,
            admin=admin,
            admin_key=admin_key,
            admin_ca=admin_ca,
        )
        file = asyncio.run(_measure(access, plan))
    elif estimate is not None:
        config, _ = read_model_config(estimate)
        profile = _estimate(config, derive_geometry(config, like=like), accelerator, gpus, weight_bytes)
        file = estimate_file(name, profile)
    else:
        assert aiconfigurator is not None
        file = import_profile(name, aiconfigurator, accelerator, gpus, backend=backend, lengths=asked, batches=wanted)
    write_profile(out, file)
    prefill = f"{len(file.prefill)} prefill" if file.prefill else "a formula of prefill"
    typer.echo(f"{out}: {prefill} and {len(file.decode)} decode figures; {file.source}")


@app.command("capacity")
def capacity(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file: docs/planning.md.")],
    *,
    baseline: Annotated[
        Path | None, typer.Option(help="Write the answer there, for later tools to compare with.")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="Write a cluster file there.")] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """What to run where, what that serves and costs, and whether cross-site prefill pays."""
    if plot is not None:
        check_plot_path(plot)
    problem = read_problem(file)
    with progress() as report:
        report("searching")
        answer = plan_capacity(problem)
    if as_json:
        typer.echo(msgspec.json.encode(answer).decode())
    else:
        print_answer(Console(), answer)
    if baseline is not None:
        write_answer(baseline, answer)
    if cluster is not None:
        write_cluster_file(cluster, problem, answer)
    if plot is not None:
        draw_answer(answer, plot)


def _model_name(model: str, path: Path) -> str:
    """The folder's name of a config.json, the stem of another file, or the hub id."""
    if not Path(model).exists():
        return model
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _estimate(config: Json, geometry: Geometry, accelerator: str, gpus: int, weight_bytes: float) -> Profile:
    efficiency = Efficiency(weight_bytes=weight_bytes)
    return estimate_profile(config, geometry, find_accelerator(accelerator), gpus, efficiency=efficiency)


async def _measure(access: GatewayAccess, plan: ProfilePlan) -> ProfileFile:
    with progress() as report:
        async with gateway_client(access) as client:
            return await measure_profile(client, plan, report)


def _lengths(text: str, option: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and len(part) < _DIGITS and int(part) >= 1 for part in parts):
        raise ConfigError(
            f"{option} takes whole numbers from 1 to {10 ** (_DIGITS - 1) - 1:,}, with commas between, not {text!r}"
        )
    return tuple(sorted({int(part) for part in parts}))
