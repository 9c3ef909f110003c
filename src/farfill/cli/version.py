"""`farfill version`."""

from __future__ import annotations

import importlib.metadata
import platform

import typer

from farfill.wire.control import PROTOCOL_VERSION


def version() -> None:
    """Print the version of Farfill, of its protocol, and of Python."""
    own = importlib.metadata.version("farfill")
    typer.echo(f"farfill {own}, protocol {PROTOCOL_VERSION}, Python {platform.python_version()}")
