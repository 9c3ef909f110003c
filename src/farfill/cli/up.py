"""`farfill up`: a complete two-site cluster on this machine, tried with a long and a short prompt."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from farfill.cli import demo_prompts
from farfill.cli.demo import DemoAnswer, DemoPrompt, ask
from farfill.cli.demo_report import report as demo_report
from farfill.cli.local_cluster import ChildDiedError, LocalCluster, LocalPlan, prepare_logs_folder
from farfill.cli.local_ports import free_ports, port_is_free
from farfill.cli.local_ready import until_ready
from farfill.cli.model_catalog import ModelSource
from farfill.cli.model_store import fetch, find_source
from farfill.cli.progress import progress
from farfill.cli.stoppable import run_stoppable
from farfill.core.errors import ConfigError, FarfillError

DEFAULT_PORT = 8000
POLL_S = 0.2

console = Console(highlight=False)


def up(  # noqa: PLR0917 - options, never positional
    once: Annotated[bool, typer.Option("--once", help="Stop after the two prompts.")] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the API; 8000 if it is free.")] = None,
    model: Annotated[str, typer.Option(help="smollm2 or gemma3.")] = "smollm2",
    threshold: Annotated[int, typer.Option(min=1, help="Prompts with this many tokens are prefilled far.")] = 512,
    keep_logs: Annotated[Path | None, typer.Option(help="Copy the logs of all roles here at the end.")] = None,
    accept_gemma_terms: Annotated[
        bool, typer.Option("--accept-gemma-terms", help="You accept the Gemma Terms of Use.")
    ] = False,
) -> None:
    """Start a two-site cluster here, send a long and a short prompt, and show what happened."""
    if keep_logs is not None:
        prepare_logs_folder(keep_logs)
    source = find_source(model)
    with progress(console) as report:
        folder = fetch(source, accept_terms=accept_gemma_terms, report=report)
    plan = LocalPlan(model_name=source.folder, model_dir=folder, port=_choose_port(port), threshold_tokens=threshold)
    try:
        good = run_stoppable(_run(plan, source, once=once, keep_logs=keep_logs))
    except ChildDiedError as error:
        for line in error.tail:
            console.print(f"[dim]{error.name}:[/] ", end="")
            console.print(line, markup=False, soft_wrap=True)
        raise
    if not good:
        raise FarfillError("a prompt was not served as placed", reason="not_as_placed")


def _choose_port(wanted: int | None) -> int:
    """The port of the API. Raises ConfigError when the one asked for is taken."""
    if wanted is not None:
        if not port_is_free(wanted):
            raise ConfigError(f"port {wanted} is taken; choose another with --port, or leave --port out")
        return wanted
    if port_is_free(DEFAULT_PORT):
        return DEFAULT_PORT
    (other,) = free_ports(1)
    console.print(f"Port {DEFAULT_PORT} is taken; using {other}.")
    return other


async def _run(plan: LocalPlan, source: ModelSource, *, once: bool, keep_logs: Path | None) -> bool:
    """Returns whether both prompts were served as placed. The cluster is gone when it returns or raises."""
    staying = False
    try:
        with LocalCluster(plan, keep_logs=keep_logs) as cluster:
            cluster.start()
            with progress(console) as report:
                await until_ready(cluster, report)
            good = await _demonstrate(cluster, source)
            if once or not good:
                return good
            _print_usage(cluster, source)
            staying = True
            await _watch(cluster)
    except asyncio.CancelledError:
        if not staying:
            raise
        console.print("Stopped. Nothing is left running.")
    return True


async def _demonstrate(cluster: LocalCluster, source: ModelSource) -> bool:
    """Send both prompts and print a report for each; whether both were served as placed."""
    long_text = demo_prompts.long_chat_prompt() if source.chat else demo_prompts.long_base_prompt()
    prompts = (
        DemoPrompt(title="Long prompt", text=long_text, max_tokens=64, expected="remote"),
        DemoPrompt(title="Short prompt", text=demo_prompts.SHORT, max_tokens=48, expected="local"),
    )
    good = True
    for prompt in prompts:
        with console.status(f"{prompt.title}: waiting for the answer"):
            asking = asyncio.create_task(ask(cluster.url, source.folder, prompt, chat=source.chat))
            answer = await _while_alive(cluster, asking)
        console.print(demo_report(answer))
        good = good and answer.as_placed
    return good


async def _while_alive(cluster: LocalCluster, work: asyncio.Task[DemoAnswer]) -> DemoAnswer:
    """The result of `work`. Raises ChildDiedError when a role ends meanwhile."""
    try:
        while not work.done():
            cluster.check()
            await asyncio.wait([work], timeout=POLL_S)
        return work.result()
    finally:
        work.cancel()


async def _watch(cluster: LocalCluster) -> None:
    """Until cancelled. Raises ChildDiedError when a role ends."""
    while True:
        cluster.check()
        await asyncio.sleep(POLL_S)


def _print_usage(cluster: LocalCluster, source: ModelSource) -> None:
    url, model = cluster.url, source.folder
    if source.chat:
        path, body = "chat/completions", f'"messages": [{{"role": "user", "content": "{demo_prompts.SHORT}"}}]'
        call = f'client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])'
        text = "choices[0].message.content"
    else:
        path, body = "completions", '"prompt": "The capital of France is"'
        call = f'client.completions.create(model="{model}", prompt="The capital of France is")'
        text = "choices[0].text"
    curl = f"curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{{\"model\": \"{model}\", {body}}}'"
    snippet = [
        f"{sys.executable} - <<'END'",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key="none")',
        f"print({call}.{text})",
        "END",
    ]
    if importlib.util.find_spec("openai") is None:
        snippet.insert(0, f"{sys.executable} -m pip install openai")
    console.print(f"\nThe cluster is up at [bold]{url}[/]. Try it from another terminal:\n")
    for line in (curl, "", *snippet):
        console.print(line, markup=False, soft_wrap=True)
    console.print("\nCtrl-C stops everything.")
