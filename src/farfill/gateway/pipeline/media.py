"""Prompts with images: the files are loaded here; a worker, which has the processor, says which tokens result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog

from farfill.core.cluster import Instance, InstanceState, Role
from farfill.core.errors import FarfillError, InvalidRequestError, UnavailableError
from farfill.engine.media import MediaItem, material_of
from farfill.gateway.loads import OutstandingWork
from farfill.gateway.media import MEDIA_REASONS, ImageRef, MediaLoader
from farfill.gateway.observe import MediaObserver
from farfill.gateway.pipeline.place import Membership
from farfill.gateway.pipeline.prompt import Prompt
from farfill.gateway.workers import WorkerAnswerError, WorkerClient, WorkerConnectionError
from farfill.kv.hashing import KeyMaterial
from farfill.wire.control import MediaMessage, RenderCommand, RenderReply

log = structlog.get_logger("farfill.gateway")

_TRIES = 2


class PromptTokens(msgspec.Struct, frozen=True):
    """A prompt as workers get it. `media` and `position_offset` as in `wire.control.DecodeCommand`."""

    prompt: Prompt
    media: tuple[MediaMessage, ...] = ()
    position_offset: int = 0

    @property
    def material(self) -> tuple[KeyMaterial, ...]:
        """What prefix keys need to know of the images."""
        if not self.media:
            return ()
        return material_of([MediaItem(m.start_token, m.end_token, m.data) for m in self.media])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRenderer:
    """Turns text with placeholders, and the images they stand for, into tokens."""

    loader: MediaLoader
    client: WorkerClient
    membership: Membership
    work: OutstandingWork
    model: str
    observer: MediaObserver

    async def render(self, text: str, images: Sequence[ImageRef], *, add_special_tokens: bool) -> PromptTokens:
        """Raises InvalidRequestError for what is wrong with the images, UnavailableError without a worker."""
        files = await self.loader.load(images)
        command = RenderCommand(text=text, images=files, add_special_tokens=add_special_tokens)
        reply = await self._ask(command)
        media = [MediaMessage(start, end, data) for (start, end), data in zip(reply.spans, files, strict=True)]
        return PromptTokens(Prompt(reply.token_ids), tuple(media), reply.position_offset)

    def refused(self, error: FarfillError) -> None:
        """Count a request that ended because of its images."""
        if isinstance(error, InvalidRequestError) and error.reason in MEDIA_REASONS:
            self.observer.media_refused(error.reason)

    async def _ask(self, command: RenderCommand) -> RenderReply:
        """The answer of the least busy worker, or of the next one when that cannot be reached."""
        workers = sorted(self._workers(), key=self.work.tokens)
        for instance in workers[:_TRIES]:
            try:
                return await self.client.render(instance, command)
            except WorkerConnectionError as error:
                log.warning("render_retried", instance=instance.name, error=str(error))
            except WorkerAnswerError as error:
                raise error.as_request_error() from error
        raise UnavailableError(
            f"no worker of {self.model} can be asked for its image tokens", reason="no_render_instance"
        )

    def _workers(self) -> list[Instance]:
        ready = [i for i in self.membership.instances() if i.model == self.model and i.state is InstanceState.READY]
        near = [i for i in ready if i.role is not Role.PREFILL]
        return near or ready
