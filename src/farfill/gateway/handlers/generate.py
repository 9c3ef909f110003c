"""/v1/chat/completions and /v1/completions: one request through all steps of the pipeline."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web

from farfill.core.cluster import FallbackReason
from farfill.core.errors import FarfillError, InvalidRequestError
from farfill.core.priority import check_priority
from farfill.core.sampling import SamplingParams
from farfill.gateway.answer import Answer
from farfill.gateway.errors import DeadlineError, StoppingError, error_response, internal_error
from farfill.gateway.handlers.body import read_body
from farfill.gateway.handlers.conversation import Conversations
from farfill.gateway.handlers.enter import principal_of
from farfill.gateway.handlers.request_id import REQUEST_ID, adopt_request_id
from farfill.gateway.handlers.track import Endpoint, RequestTracker
from farfill.gateway.models import ServedModel
from farfill.gateway.openai.assistant import AssistantParser, NewParser
from farfill.gateway.openai.chat import ChatRenderer
from farfill.gateway.openai.completions import CompletionRenderer
from farfill.gateway.openai.render import Renderer, Rendering
from farfill.gateway.openai.requests import ChatBody, CompletionBody, parse, parse_prompts
from farfill.gateway.openai.sampling import COMPLETION_MAX_TOKENS, check_token_ids
from farfill.gateway.pipeline.admit import Turn
from farfill.gateway.pipeline.authenticate import Caller, authenticate
from farfill.gateway.pipeline.generation import Generation
from farfill.gateway.pipeline.hash import hash_prompt
from farfill.gateway.pipeline.job import Job
from farfill.gateway.pipeline.media import PromptTokens
from farfill.gateway.pipeline.place import FORCE_HEADER, forced_placement
from farfill.gateway.pipeline.prompt import Prompt
from farfill.gateway.pipeline.stream import collect, open_all, send_events, send_failure
from farfill.gateway.pipeline.tokenize import detokenize, ensure_counted, fit_context, text_prompt
from farfill.gateway.principal import Principal
from farfill.gateway.service import GatewayService
from farfill.policy.offload import Forced
from farfill.wire.control import MAX_TEXT_BYTES

MAX_PROMPTS = 128
MAX_CHOICES = 128
"""Of one request: its prompts times `n`. Each is a sequence in a worker's batch, but the request counts as one."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """Each prompt, its text where it is echoed, how to sample, and how to read the answer of a chat, which alone may be
    `pictured`."""

    prompts: list[Prompt]
    echo_texts: list[str]
    sampling: SamplingParams
    demanded_tokens: int | None
    default_tokens: int | None
    new_parser: NewParser = AssistantParser
    pictured: PromptTokens | None = None


class GenerateHandler:
    """Serves both generation endpoints."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._config = service.deps.config
        self._model = service.deps.model
        self._others: dict[str, GenerateHandler] = {}
        self._conversations = Conversations(
            service.pool, service.deps.model, service.deps.config.model, service.renderer
        )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._tracked(request, "chat")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._tracked(request, "completions")

    async def _tracked(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """Serve and account for it. Errors before the first byte become an answer, later ones an event."""
        tracker = RequestTracker(self._service, endpoint, request[REQUEST_ID])
        exchange = _Exchange(request)
        failure: FarfillError | None = None
        cancelled = True  # unless something else is known by the end
        try:
            try:
                async with asyncio.timeout(None) as limit:
                    self._service.open_requests.begin(limit, self._config.gateway.request_timeout_s)
                    try:
                        response = await self._serve(request, exchange, endpoint, tracker)
                    finally:
                        self._service.open_requests.over(limit)
                cancelled = False
                return response
            except TimeoutError:
                failure = self._late()
            except web.HTTPException as error:
                failure, cancelled = InvalidRequestError(error.reason, reason=_body_reason(error)), False
                raise
            except FarfillError as error:
                failure = error
            except ConnectionError:
                raise
            except Exception as error:
                failure = internal_error(error)
            response = await exchange.fail(failure)
            cancelled = False
            return response
        except ConnectionError:
            # The client went away while it was written to; there is nobody to answer.
            return exchange.abandoned()
        finally:
            # A client that hangs up once it has everything cancels nothing.
            tracker.finish(failure, cancelled=cancelled and not exchange.delivered)

    def _late(self) -> FarfillError:
        """Why a request ran out of time."""
        if self._service.open_requests.ended:
            return StoppingError("this gateway stops; try again")
        return DeadlineError(f"not done after {self._config.gateway.request_timeout_s:g} s")

    async def _serve(
        self, request: web.Request, exchange: _Exchange, endpoint: Endpoint, tracker: RequestTracker
    ) -> web.StreamResponse:
        forced = forced_placement(
            request.headers.get(FORCE_HEADER), allowed=self._config.routing.allow_placement_override
        )
        data = await read_body(request)
        body = parse(data, ChatBody if endpoint == "chat" else CompletionBody)
        del data
        tracker.request_id = adopt_request_id(request, body.request_id)
        tracker.stream = bool(body.stream)
        principal = principal_of(request)
        served = self._service.models.find(body.model, principal, required=True)
        tracker.of_model(served.service)
        with served.slot():
            return await self._of(served)._generate(request, exchange, body, forced, tracker, principal)

    def _of(self, served: ServedModel) -> GenerateHandler:
        """The handler of that model."""
        if served.service is self._service:
            return self
        if served.key not in self._others:
            self._others[served.key] = GenerateHandler(served.service)
        return self._others[served.key]

    async def _generate(  # noqa: PLR0917 (what `_serve` found out)
        self,
        request: web.Request,
        exchange: _Exchange,
        body: ChatBody | CompletionBody,
        forced: Forced | None,
        tracker: RequestTracker,
        principal: Principal,
    ) -> web.StreamResponse:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        caller = authenticate(
            body.cache_salt, request.headers, self._config.admission.tenant_header, body.user, principal
        )
        priority = max(check_priority(body.priority or 0), principal.best_priority)
        tracker.tenant = caller.tenant
        with self._service.admission.slot():
            with tracker.stage("tokenize"):
                prompts = await self._tokenize(body, self._text_below(body, forced))
            tracker.prompts([prompt.length for prompt in prompts.prompts])
            jobs = await self._jobs(prompts, caller, priority, forced, _traceparent(request), tracker)
            renderer, include_usage = self._renderer(body, tracker, prompts)
            kv_tokens = sum(job.prompt.length + job.sampling.n * job.sampling.max_tokens for job in jobs)
            with self._service.gate.meter.tokens(principal, caller.tenant, kv_tokens) as spent:
                turn = self._turn(jobs, kv_tokens, tracker)
                with tracker.stage("queue"):
                    await turn.begin()
                try:
                    with tracker.stage("dispatch"):
                        generations = await open_all(self._service.dispatcher, jobs, tracker.placed)
                    turn.sent()
                    try:
                        return await self._answer(exchange, renderer, generations, tracker, include_usage)
                    finally:
                        turn.used_tokens = spent.used = sum(g.prompt_tokens + g.timing.tokens for g in generations)
                        for generation in generations:
                            generation.close()
                finally:
                    turn.end()

    async def _answer(
        self,
        exchange: _Exchange,
        renderer: Renderer,
        generations: list[Generation],
        tracker: RequestTracker,
        include_usage: bool,
    ) -> web.StreamResponse:
        tracker.started(generations)
        with tracker.stage("stream"):
            response = await exchange.answer(renderer, generations, stream=tracker.stream, include_usage=include_usage)
        for generation in generations:
            await generation.finish()
        return response

    def _turn(self, jobs: Sequence[Job], kv_tokens: int, tracker: RequestTracker) -> Turn:
        """The request's turn to run; all its prompts count together."""
        service, first, threshold = self._service, jobs[0], self._service.threshold.tokens
        far_tokens = sum(job.prompt.length for job in jobs if job.prompt.length > threshold)
        return service.admission.turn(
            tenant=first.tenant,
            kv_tokens=kv_tokens,
            link_bytes=int(far_tokens * service.links.bytes_per_token),
            priority=first.priority,
            deadline_s=tracker.accepted_s + self._config.gateway.request_timeout_s,
        )

    async def _jobs(  # noqa: PLR0917 (what `_generate` found out)
        self,
        prompts: Prompts,
        caller: Caller,
        priority: int,
        forced: Forced | None,
        traceparent: str,
        tracker: RequestTracker,
    ) -> list[Job]:
        """One job a prompt, its output cut to the context. Raises when one cannot fit."""
        context = self._service.placer.context_tokens(self._model.context_tokens)
        chunk_tokens = self._config.prefill.chunked_prefill_tokens
        pictured = prompts.pictured
        jobs: list[Job] = []
        for i, prompt in enumerate(prompts.prompts):
            limits = prompts.sampling, prompts.demanded_tokens, prompts.default_tokens, context
            ensure_counted(prompt, *limits)
            sampling = fit_context(prompt.length, *limits)
            with tracker.stage("hash"):
                keys: Sequence[bytes] = ()
                if prompt.length > chunk_tokens:  # others have no whole block
                    # The last prompt token is decode's: only the KV before it is kept for reuse.
                    material = () if pictured is None else pictured.material
                    keys = await hash_prompt(self._service.pool, prompt.ids[:-1], chunk_tokens, caller.salt, material)
            jobs.append(
                Job(
                    request_id=tracker.request_id if i == 0 else f"{tracker.request_id}-{i}",
                    prompt=prompt,
                    keys=keys,
                    salt=caller.salt,
                    tenant=caller.tenant,
                    session=caller.session,
                    priority=priority,
                    sampling=sampling,
                    forced=forced,
                    traceparent=traceparent,
                    accepted_s=tracker.accepted_s,
                    media=() if pictured is None else pictured.media,
                    position_offset=0 if pictured is None else pictured.position_offset,
                )
            )
        return jobs

    def _text_below(self, body: ChatBody | CompletionBody, forced: Forced | None) -> int:
        """Prompts of certainly fewer tokens than this may go to decode as text, not tokenized here: they are placed
        near, and have no whole block for the prefix index. 0 where ids or exact lengths are needed: by the client, by a
        forced placement, and by a threshold that is searched on the prompts' lengths."""
        config = self._config
        if forced is not None or body.return_token_ids or config.routing.threshold == "auto":
            return 0
        if isinstance(body, CompletionBody) and body.echo:
            return 0
        return min(self._service.threshold.tokens, config.prefill.chunked_prefill_tokens, MAX_TEXT_BYTES)

    async def _tokenize(self, body: ChatBody | CompletionBody, text_below: int) -> Prompts:
        pool, model = self._service.pool, self._model
        if isinstance(body, ChatBody):
            chat = await self._conversations.chat(body, text_below)
            return Prompts(
                prompts=[chat.prompt.prompt],
                pictured=chat.prompt,
                echo_texts=[],
                sampling=chat.sampling,
                demanded_tokens=chat.demanded_tokens,
                default_tokens=None,
                new_parser=chat.new_parser,
            )
        sampling, demanded = await self._conversations.completion_sampling(body)
        given = parse_prompts(body.prompt)
        if len(given) > MAX_PROMPTS:
            raise InvalidRequestError(f"{len(given)} prompts in one request, at most {MAX_PROMPTS}", param="prompt")
        choices = len(given) * sampling.n
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(given)} prompts times n: {sampling.n} are {choices} choices in one request, at most"
                f" {MAX_CHOICES}; lower n or send fewer prompts",
                param="n",
            )
        prompts: list[Prompt] = []
        texts: list[str] = []
        for prompt in given:
            if isinstance(prompt, str):
                special = body.add_special_tokens is not False
                prompts.append(
                    await text_prompt(pool, model, prompt, add_special_tokens=special, text_below=text_below)
                )
            else:
                check_token_ids("prompt", prompt, model.vocab_size)
                prompts.append(Prompt(prompt))
            if body.echo:
                texts.append(prompt if isinstance(prompt, str) else await detokenize(pool, model, "prompt", prompt))
        return Prompts(
            prompts=prompts,
            echo_texts=texts,
            sampling=sampling,
            demanded_tokens=demanded,
            default_tokens=COMPLETION_MAX_TOKENS,
        )

    def _renderer(
        self, body: ChatBody | CompletionBody, tracker: RequestTracker, prompts: Prompts
    ) -> tuple[Renderer, bool]:
        include_usage = bool(body.stream_options is not None and body.stream_options.include_usage)
        rendering = Rendering(
            request_id=tracker.request_id,
            created=int(tracker.accepted_unix_s),
            model=self._config.model.name,
            choices_per_prompt=prompts.sampling.n,
            prompt_token_ids=tuple(p.ids for p in prompts.prompts) if body.return_token_ids else (),
            return_token_ids=bool(body.return_token_ids),
            logprobs=prompts.sampling.logprobs is not None,
            include_usage=include_usage,
            echo_texts=tuple(prompts.echo_texts),
        )
        if isinstance(body, ChatBody):
            return ChatRenderer(rendering, prompts.new_parser), include_usage
        return CompletionRenderer(rendering), include_usage


class _Exchange:
    """The answer to one request: whole or streamed, and how it fails in either state."""

    def __init__(self, request: web.Request) -> None:
        self._answer = Answer(request)
        self.delivered = False

    async def answer(
        self, renderer: Renderer, generations: list[Generation], *, stream: bool, include_usage: bool
    ) -> web.StreamResponse:
        headers = {**placement_headers(generations[0]), **lossy_header(generations)}
        if stream:
            self._answer.begin(headers)
            await send_events(self._answer, renderer, generations, include_usage=include_usage)
        else:
            await self._answer.whole(await collect(renderer, generations), headers)
        self.delivered = True
        return self._answer

    async def fail(self, error: FarfillError) -> web.StreamResponse:
        if not self._answer.begun:
            return error_response(error)
        await send_failure(self._answer, error)
        return self._answer

    def abandoned(self) -> web.StreamResponse:
        """What aiohttp wants back although nobody listens."""
        return self._answer


def placement_headers(generation: Generation) -> Mapping[str, str]:
    """What really happened to the (first) prompt."""
    placement = generation.placement
    headers = {
        "x-farfill-placement": "remote" if generation.remote else "local",
        "x-farfill-reason": str(placement.reason),
        "x-farfill-decode-instance": placement.decode.name,
    }
    if generation.fallback is not FallbackReason.NONE:
        headers["x-farfill-fallback"] = str(generation.fallback)
    if placement.prefill is not None:
        headers["x-farfill-prefill-instance"] = placement.prefill.name
    if generation.leg is not None and generation.leg.continuations:
        headers["x-farfill-continued"] = ", ".join(step.reason for step in generation.leg.continuations)
    return headers


def lossy_header(generations: Sequence[Generation]) -> Mapping[str, str]:
    """Whether any prompt's KV travelled in a lossy form (`kv_transfer.lossy`), so that output may differ."""
    forms = sorted({generation.start.lossy for generation in generations if generation.start.lossy})
    return {"x-farfill-kv-lossy": ", ".join(forms)} if forms else {}


def _body_reason(error: web.HTTPException) -> str:
    return "body_too_large" if isinstance(error, web.HTTPRequestEntityTooLarge) else "bad_request"


def _traceparent(request: web.Request) -> str:
    header = request.headers.get("traceparent", "")
    return header if _TRACEPARENT.fullmatch(header) else ""
