"""A vLLM that somebody else started with our connector: found by its URL, used, and left running.

The connector of such a vLLM knows no folder. It learns one from a request of ours (`messages.AttachParams`), takes it
only when it is private to the user that both run as, and then opens its line as one started by `VllmServer` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from farfill.core.errors import CancelledWorkError, ConfigError, EngineError, FarfillError, InvalidRequestError
from farfill.engine.vllm.api import Endpoint, VllmApi
from farfill.engine.vllm.line import ConnectorLine
from farfill.engine.vllm.messages import LINE_SOCKET, AttachParams, Hello, attach_params

_POLL_S = 0.5
_HEALTH_S = 5.0
_HELLO_S = 30.0

_log = structlog.get_logger(__name__)


class AttachedServer:
    """One running vLLM at `endpoint`; its connector's line and shared memory are in our `folder`."""

    def __init__(self, endpoint: Endpoint, folder: Path, *, chunk_tokens: int) -> None:
        self.endpoint = endpoint
        self.line = ConnectorLine(folder / LINE_SOCKET)
        self._params = AttachParams(str(folder), chunk_tokens)

    @property
    def running(self) -> bool:
        """Nobody here knows; the line ends when it does."""
        return True

    def wait_ready(self, timeout_s: float, stopped: Callable[[], bool]) -> list[Hello]:
        """What its cache is made of, once it answers and its connector has found us.

        Raises EngineError otherwise, ConfigError when it is not set up for this, CancelledWorkError when `stopped`
        says so meanwhile.
        """
        asyncio.run(self._attach(timeout_s, stopped))
        end_s = time.monotonic() + _HELLO_S
        while time.monotonic() < end_s:
            _require_wanted(stopped)
            hellos = self.line.wait(_POLL_S)
            if hellos is not None:
                return hellos
        raise ConfigError(
            f"engine.attach: vLLM at {self.endpoint} answers, but its connector did not come. Start it on this host, as"
            ' this user, with the same /dev/shm and --kv-transfer-config \'{"kv_connector": "FarfillConnector",'
            ' "kv_connector_module_path": "farfill.engine.vllm.connector", "kv_role": "kv_both"}\''
        )

    def kill(self) -> None:
        """It is not ours to end."""

    def stop(self) -> None:
        """Leave it alone. Idempotent."""
        self.line.close()

    def tail(self, lines: int = 0) -> str:
        """Its log is where whoever started it sent it."""
        return ""

    async def _attach(self, timeout_s: float, stopped: Callable[[], bool]) -> None:
        api = VllmApi(self.endpoint)
        await api.open()
        try:
            await self._wait_healthy(api, timeout_s, stopped)
            await api.find_dialect()
            await api.once(
                {
                    "token_ids": [0, 0],
                    "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
                    "kv_transfer_params": attach_params(self._params),
                }
            )
        except InvalidRequestError as error:
            raise ConfigError(f"engine.attach: {self.endpoint}: {error}") from error
        except FarfillError as error:
            if isinstance(error, CancelledWorkError | ConfigError):
                raise
            raise EngineError(f"engine.attach: {self.endpoint}: {error}") from error
        finally:
            await api.close()

    async def _wait_healthy(self, api: VllmApi, timeout_s: float, stopped: Callable[[], bool]) -> None:
        end_s = time.monotonic() + timeout_s
        told = False
        while True:
            _require_wanted(stopped)
            try:
                status, problem = await api.health(_HEALTH_S), ""
            except EngineError as error:
                status, problem = 0, str(error)
            if status == 200:
                return
            if not told:
                _log.info("waiting_for_vllm", url=str(self.endpoint), detail=problem or f"/health answers {status}")
                told = True
            if time.monotonic() > end_s:
                raise EngineError(f"not ready after {timeout_s:.0f} s: {problem or f'/health answers {status}'}")
            await asyncio.sleep(_POLL_S)


def _require_wanted(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise CancelledWorkError("told to stop while waiting for vLLM")
