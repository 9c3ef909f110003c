"""`farfill replay`: decide recorded decisions again, with the policies of this version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
    """Decide everything in FILE again, after FILE.1 if there is one. Exit code 1: any decision differs."""
    counts: Counter[str] = Counter()
    differing: list[Replayed] = []
    differ = 0
    for each in _parts(file):
        for found in _replayed(each):
            counts[found.policy] += 1
            if not found.same:
                differ += 1
                if len(differing) < show:
                    differing.append(found)
    for found in differing:
        typer.echo(f"{found.policy} of {found.request or '-'}")
        typer.echo(f"  recorded {msgspec.json.encode(found.recorded).decode()}")
        typer.echo(f"  again    {msgspec.json.encode(found.again).decode()}")
    told = ", ".join(f"{policy} {count}" for policy, count in sorted(counts.items()))
    typer.echo(f"{counts.total()} decisions ({told or 'none'}); {differ} differ")
    if differ:
        raise typer.Exit(1)


def _parts(file: Path) -> list[Path]:
    """What a full log was kept as, then the log."""
    former = file.with_name(file.name + ".1")
    return [former, file] if former.exists() else [file]


def _replayed(file: Path) -> Iterator[Replayed]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                # Without its end: the process was killed, or is still writing it.
                if line.endswith(b"\n") and line.strip():
                    yield _again(line, f"{file}:{number}")
    except OSError as error:
        raise InvalidRequestError(f"{file}: cannot be read: {error.strerror}") from error


def _again(line: bytes, where: str) -> Replayed:
    """Exit code 1 says that a decision differs, so a line that is none is told as a wrong call."""
    try:
        return replay_line(line)
    except ProtocolError as error:
        raise InvalidRequestError(f"{where}: {error}") from error
