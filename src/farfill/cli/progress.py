"""Progress for people: a spinner with the step and its seconds on a terminal, a line a step elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def progress(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yields `report(step)`; each call ends the step before."""
    console = console if console is not None else Console(stderr=True)
    if not console.is_terminal:
        yield lambda step: console.print(f"· {step}", highlight=False, soft_wrap=True)
        return
    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        current = None

        def report(step: str) -> None:
            nonlocal current
            if current is not None:
                bar.update(current, total=1, completed=1)
            current = bar.add_task(step, total=None)

        yield report
        if current is not None:
            bar.update(current, total=1, completed=1)
