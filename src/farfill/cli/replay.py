"""`farfill replay`: decide recorded decisions again, with the policies of this version."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from farfill.core.errors import InvalidRequestError, ProtocolError
from farfill.policy.replay import Replayed
from farfill.policy.replay import replay as replay_line

MAX_SHOWN = 20


def replay(
    file: Annotated[Path, typer.Argument(help="A decision log (gateway.decision_log).")],
    show: Annotated[int, typer.Option(min=0, help="How many decisions that differ are shown.")] = MAX_SHOWN,
) -> None:
    """Decide everything in FILE again. Exit code 1 when any decision differs."""
    counts: Counter[str] = Counter()
    differing: list[Replayed] = []
    differ = 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                found = _again(line, f"{file}:{number}")
                counts[found.policy] += 1
                if not found.same:
                    differ += 1
                    if len(differing) < show:
                        differing.append(found)
    except OSError as error:
        raise InvalidRequestError(f"{file}: cannot be read: {error.strerror}") from error
    for found in differing:
        typer.echo(f"{found.policy} of {found.request or '-'}")
        typer.echo(f"  recorded {msgspec.json.encode(found.recorded).decode()}")
        typer.echo(f"  again    {msgspec.json.encode(found.again).decode()}")
    told = ", ".join(f"{policy} {count}" for policy, count in sorted(counts.items()))
    typer.echo(f"{counts.total()} decisions ({told or 'none'}); {differ} differ")
    if differ:
        raise typer.Exit(1)


def _again(line: bytes, where: str) -> Replayed:
    try:
        return replay_line(line)
    except ProtocolError as error:
        raise ProtocolError(f"{where}: {error}") from error
