"""What the processes of one gateway (`--workers N`) tell of each other on /metrics.

Each listens on a Unix socket in a folder that only they share. Whichever is asked for metrics asks the others, and
answers with those of all: every sample gets the label `process`. One that does not answer is left out and said to be.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import aiohttp
import structlog
from aiohttp import web

log = structlog.get_logger("farfill.gateway")

Exposition = tuple[bytes, str]

ANSWER_S = 1.0
UP = "farfill_gateway_process_up"
SUPERVISOR = "supervisor"
"""The name under which the process that started the others tells its metrics, in a file."""


class Siblings:
    """The processes of this gateway as process `own` of `count` sees them; `folder` has their sockets."""

    def __init__(self, folder: Path, own: int, count: int, metrics: Callable[[], Exposition]) -> None:
        self._folder = folder
        self._own = own
        self._count = count
        self._metrics = metrics

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Answer the others."""
        app = web.Application()
        app.router.add_get("/metrics", self._tell)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        path = _socket(self._folder, self._own)
        path.unlink(missing_ok=True)  # of the life before
        await web.UnixSite(runner, str(path)).start()
        try:
            yield
        finally:
            await runner.cleanup()

    async def metrics(self) -> Exposition:
        """Of all processes, and of the one that started them."""
        own, content_type = self._metrics()
        others = [i for i in range(self._count) if i != self._own]
        found = dict(zip(others, await asyncio.gather(*map(self._ask, others)), strict=True))
        found[self._own] = own
        texts = [(str(i), text.decode()) for i, text in sorted(found.items()) if text is not None]
        with contextlib.suppress(FileNotFoundError):
            texts.append((SUPERVISOR, (self._folder / SUPERVISOR).read_text("utf-8")))
        return (merged(texts) + _up(found)).encode(), content_type

    async def _tell(self, _: web.Request) -> web.Response:
        body, content_type = self._metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _ask(self, other: int) -> bytes | None:
        path = str(_socket(self._folder, other))
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
                session.get("http://process/metrics") as response,
            ):
                return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            log.warning("process_not_asked", process=other, error=repr(error))
            return None


def merged(expositions: Iterable[tuple[str, str]]) -> str:
    """One exposition of those of several processes: (name, text). A family is told once, with the samples of all."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for process, text in expositions:
        label = f'process="{process}"'
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, label))
    return "".join(f"{line}\n" for family, head in heads.items() for line in [*head, *samples.get(family, ())])


def _labelled(sample: str, label: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label}{rest if rest.startswith('}') else ',' + rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"


def _up(found: dict[int, bytes | None]) -> str:
    lines = [f'{UP}{{process="{i}"}} {0 if text is None else 1}\n' for i, text in sorted(found.items())]
    return f"# HELP {UP} 1 while this process of the gateway answers.\n# TYPE {UP} gauge\n" + "".join(lines)


def _socket(folder: Path, index: int) -> Path:
    return folder / f"{index}.sock"
