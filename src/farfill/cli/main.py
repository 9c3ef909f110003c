"""The `farfill` command: one line registers one command; errors become one line and an exit code.

0: done. 1: it failed. 2: the call or the cluster file is wrong.
"""

from __future__ import annotations

import sys

import typer

from farfill.cli import config, keys, link, model, pki, plan, rollout
from farfill.cli.autoscale import autoscale
from farfill.cli.decode import decode
from farfill.cli.explain import explain
from farfill.cli.gateway import gateway
from farfill.cli.parity import parity
from farfill.cli.prefill import prefill
from farfill.cli.registry import registry
from farfill.cli.replay import replay
from farfill.cli.simulate import simulate
from farfill.cli.top import top
from farfill.cli.up import up
from farfill.cli.version import version
from farfill.cli.worker import worker
from farfill.core.errors import ConfigError, FarfillError, InvalidRequestError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve LLMs with prefill and decode in different datacenters: prefill far, decode near.",
)
app.command()(gateway)
app.command()(registry)
app.command()(decode)
app.command()(prefill)
app.command()(worker)
app.add_typer(config.app, name="config")
app.add_typer(model.app, name="model")
app.add_typer(pki.app, name="pki")
app.command()(parity)
app.add_typer(link.app, name="link")
app.add_typer(plan.app, name="plan")
app.add_typer(keys.app, name="keys")
app.add_typer(rollout.app, name="rollout")
app.command()(explain)
app.command()(top)
app.command()(replay)
app.command()(simulate)
app.command()(autoscale)
app.command()(up)
app.command()(version)


def main() -> None:
    """Entry point of the `farfill` script."""
    try:
        app()
    except (ConfigError, InvalidRequestError) as error:
        _complain(error, 2)
    except FarfillError as error:
        _complain(error, 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _complain(error: FarfillError, code: int) -> None:
    for line in str(error).splitlines():
        print(f"farfill: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
