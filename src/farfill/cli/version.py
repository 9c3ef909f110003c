"""`farfill version`."""

from __future__ import annotations

import platform

import typer

import farfill
from farfill.wire.control import PROTOCOL_VERSION


def version() -> None:
    """Print the version of Farfill, of its protocol, and of Python."""
    typer.echo(f"farfill {farfill.__version__}, protocol {PROTOCOL_VERSION}, Python {platform.python_version()}")
