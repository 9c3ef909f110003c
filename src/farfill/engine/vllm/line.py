"""The Unix socket on which the connectors inside vLLM's worker processes speak to the engine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from threading import Condition, Thread

import structlog

from farfill.core.errors import EngineError
from farfill.engine.vllm.messages import CACHE_VERSION, Hello, Inbox, Message

_log = structlog.get_logger(__name__)


class ConnectorLine:
    """Listens from construction on. `on_message` is called on a thread of its own per connector, after its hello."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_message: Callable[[Message], None] = lambda _: None
        self.on_end: Callable[[], None] = lambda: None
        self._changed = Condition()
        self._hellos: dict[int, Hello] = {}
        self._sockets: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(path))
        self._server.listen()
        self._thread = Thread(target=self._accept, name="farfill-vllm-line", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> list[Hello] | None:
        """What all ranks said, in order; None when they have not all spoken within `timeout_s`."""
        with self._changed:
            self._changed.wait_for(self._complete, timeout_s)
            return [self._hellos[rank] for rank in sorted(self._hellos)] if self._complete() else None

    def close(self) -> None:
        """Idempotent."""
        for sock in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _complete(self) -> bool:
        return bool(self._hellos) and len(self._hellos) == next(iter(self._hellos.values())).ranks

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            self._sockets.append(sock)
            Thread(target=self._read, args=(sock,), name="farfill-vllm-line", daemon=True).start()

    def _read(self, sock: socket.socket) -> None:
        inbox = Inbox()
        try:
            while data := sock.recv(65536):
                for message in inbox.feed(data):
                    self._take(message)
        except (OSError, ValueError, EngineError) as error:
            _log.warning("vllm_line_broken", detail=str(error))
        finally:
            sock.close()
            self.on_end()

    def _take(self, message: Message) -> None:
        if not isinstance(message, Hello):
            self.on_message(message)
            return
        if message.cache_version != CACHE_VERSION:
            raise EngineError(f"the connector inside vLLM is of cache version {message.cache_version}")
        with self._changed:
            self._hellos[message.rank] = message
            self._changed.notify_all()
