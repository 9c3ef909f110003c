"""The part that runs inside vLLM: copies whole blocks between vLLM's cache and files of shared memory.

`vllm serve --kv-transfer-config '{"kv_connector": "FarfillConnector", "kv_connector_module_path":
"farfill.engine.vllm.connector", "kv_role": "kv_both", ...}'`. vLLM makes one in its scheduler process, which decides,
and one in each worker process, which copies. Everything else (network, TLS, tickets, resume, budgets, fallback) is the
engine's that runs beside vLLM: vLLM hears of a request only when its KV has landed on this host, so it never waits.

Started by a worker, it finds the worker's folder among its settings; otherwise a worker tells it with a request
(`engine.vllm.attached`), and until then it does nothing.

A file that is missing, too short or for other tokens counts as no KV at all: vLLM then computes the prompt itself, or
fails the request where `kv_load_failure_policy` is `fail`. With one group of layers vLLM is told which blocks are
without; with several it has no way to know whose they are, so such a request waits, for one step, until its KV is
there or not.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from farfill.engine.vllm.blocks import BlockCopier, Export, Import, describe_cache, rank_file
from farfill.engine.vllm.files import folder_problem
from farfill.engine.vllm.messages import (
    PARAMS_KEY,
    AttachParams,
    ExportParams,
    ImportParams,
    Params,
    WatchParams,
    prompt_digest,
    read_params,
)

_log = structlog.get_logger(__name__)


@dataclass
class _Plan(KVConnectorMetadata):
    """What the workers are to copy in one step, and to tell: `refused` are keys of requests whose files are not used,
    and why; `begun` of those whose prompts begin, and how many tokens vLLM has itself."""

    exports: list[Export] = field(default_factory=list[Export])
    imports: list[Import] = field(default_factory=list[Import])
    refused: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    begun: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    attach: AttachParams | None = None


@dataclass
class _Exporting:
    """A request whose prompt is being computed for export; `exported_tokens` left in whole blocks so far."""

    request: Any
    params: ExportParams
    exported_tokens: int = 0


@dataclass
class _Importing:
    """A request whose file is kept, under names beginning with `kept`, until the ranks have read it."""

    params: ImportParams
    kept: str
    local_tokens: int = 0


class FarfillConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module."""

    @property
    def requires_kv_delivery(self) -> bool:
        """Blocks are copied within the step that computed them: nothing is handed over later."""
        return False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        option = self._kv_transfer_config.get_from_extra_config
        # Empty until a worker attaches, unless a worker started this vLLM.
        folder = str(option("folder", ""))
        self._folder = os.path.realpath(folder) if folder else ""
        self._chunk_tokens = int(option("prefill_chunk_tokens", 512))
        self._ranks = range(vllm_config.parallel_config.world_size)
        self._fails = self._kv_transfer_config.kv_load_failure_policy == "fail"
        self._waits = len(kv_cache_config.kv_cache_groups) > 1
        self._exporting: dict[str, _Exporting] = {}
        self._importing: dict[str, _Importing] = {}
        self._beginning: dict[str, tuple[str, int]] = {}
        self._kept = 0
        self._plan = _Plan()
        self._copier: BlockCopier | None = None
        self._failed_blocks: set[int] = set()
        self._loads = KVConnectorTransferResults()

    # In the scheduler's process.

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A request's own blocks of all groups, states included."""
        return self._kv_cache_config.transfer_group_ids

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that lie in the request's file beyond what vLLM has itself, and whether it waits for them."""
        params = self._params_of(request)
        if isinstance(params, AttachParams):
            self._attach(request, params)
            return 0, False
        if isinstance(params, ImportParams | WatchParams):
            self._beginning[request.request_id] = (params.key, num_computed_tokens)
        if not isinstance(params, ImportParams) or params.valid_tokens <= num_computed_tokens:
            return 0, False
        problem = self._keep_file(request, params)
        tokens = min(params.valid_tokens, request.num_prompt_tokens - 1) - num_computed_tokens
        if problem:
            _log.warning("kv_file_unusable", request_id=request.request_id, key=params.key, detail=problem)
            if not self._fails or tokens <= 0:
                self._plan.refused.append((params.key, problem))
                request.kv_transfer_params[PARAMS_KEY] = None
                return 0, False
            # Nobody finds a file of that name, and vLLM hears of a load that failed.
            self._importing[request.request_id] = _Importing(params, f"{params.file}.unusable")
        self._importing[request.request_id].local_tokens = num_computed_tokens
        return tokens, self._waits

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Where the tokens of the file are to go."""
        params = self._params_of(request)
        begun = self._beginning.pop(request.request_id, None)
        if begun is not None:
            self._plan.begun.append(begun)
        if isinstance(params, WatchParams):
            # Once: what it has after a preemption is another matter.
            request.kv_transfer_params[PARAMS_KEY] = None
        if isinstance(params, ExportParams):
            # What left before a preemption is in the file for good.
            self._exporting.setdefault(request.request_id, _Exporting(request, params))
        importing = self._importing.get(request.request_id)
        if importing is None:
            return
        if num_external_tokens > 0:
            params = importing.params
            self._plan.imports.append(
                Import(
                    params.key,
                    importing.kept,
                    params.num_tokens,
                    importing.local_tokens,
                    params.valid_tokens,
                    _ids(blocks.get_block_ids()),
                    waits=request.request_id if self._waits else "",
                )
            )
            del self._importing[request.request_id]
        else:
            self._forget_file(request.request_id)
        # Once: a request that was preempted computes its prompt itself, as vLLM knows it then.
        request.kv_transfer_params[PARAMS_KEY] = None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Imports decided on since the last step, and the blocks that prefills fill in this one."""
        plan, self._plan = self._plan, _Plan()
        state = scheduler_output.kv_connector_block_state
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            exporting = self._exporting.get(request_id)
            if exporting is None or state is None:
                continue
            end = min(exporting.request.num_computed_tokens + scheduled, exporting.params.num_tokens)
            if end <= exporting.exported_tokens:
                continue
            params = exporting.params
            plan.exports.append(
                Export(
                    params.key,
                    params.file,
                    params.num_tokens,
                    exporting.exported_tokens,
                    end,
                    _ids(state.resolve_block_ids(request_id)),
                )
            )
            exporting.exported_tokens = end
        return plan

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing holds blocks of a finished request."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Nothing holds blocks of a finished request."""
        self._exporting.pop(request.request_id, None)
        self._beginning.pop(request.request_id, None)
        self._forget_file(request.request_id)
        return False, None

    def _attach(self, request: Any, params: AttachParams) -> None:
        request.kv_transfer_params[PARAMS_KEY] = None
        problem = folder_problem(params.folder)
        if problem:
            _log.warning("attach_refused", folder=params.folder, detail=problem)
            return
        _log.info("attached", folder=params.folder)
        self._folder = params.folder
        self._plan.attach = params

    def _params_of(self, request: Any) -> Params | None:
        try:
            params = read_params(request.kv_transfer_params)
        except msgspec.ValidationError as error:
            _log.warning("kv_transfer_params_refused", request_id=request.request_id, detail=str(error))
            return None
        if params is None or isinstance(params, AttachParams | WatchParams):
            return params
        # Paths come with requests: none may lead out of the folder that the engine made.
        if not self._folder or os.path.dirname(os.path.realpath(params.file)) != self._folder:
            _log.warning("kv_transfer_params_refused", request_id=request.request_id, detail="file elsewhere")
            return None
        if isinstance(params, ExportParams) and params.num_tokens != request.num_prompt_tokens:
            _log.warning("kv_transfer_params_refused", request_id=request.request_id, detail="other length")
            return None
        return params

    def _keep_file(self, request: Any, params: ImportParams) -> str:
        """Keep the request's file for every rank, whatever the engine does; otherwise what is wrong with it."""
        if request.request_id in self._importing:
            return ""
        if params.num_tokens != request.num_prompt_tokens - 1 or params.valid_tokens > params.num_tokens:
            return f"for {params.num_tokens} tokens, {params.valid_tokens} valid, of a prompt of other length"
        if params.digest and params.digest != prompt_digest(request.prompt_token_ids):
            return "for another prompt of the same length"
        self._kept += 1  # choices of one request bring the same file
        importing = _Importing(params, f"{params.file}.{self._kept}")
        self._importing[request.request_id] = importing
        try:
            if os.path.basename(params.file) != params.key:
                raise OSError("another request's file")
            found = os.stat(params.file).st_size
            if found != params.file_bytes:
                raise OSError(f"{found} bytes instead of {params.file_bytes}")
            for rank in self._ranks:
                os.link(params.file, rank_file(importing.kept, rank))
        except OSError as error:
            self._forget_file(request.request_id)
            return str(error)
        return ""

    def _forget_file(self, request_id: str) -> None:
        importing = self._importing.pop(request_id, None)
        if importing is None:
            return
        for rank in self._ranks:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(rank_file(importing.kept, rank))

    # In a worker's process.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Tell the engine what this cache is made of."""
        hello = describe_cache(self._vllm_config, self._kv_cache_config, kv_caches)
        self._copier = BlockCopier(self._kv_cache_config, kv_caches, hello)
        if self._folder:
            self._copier.attach(self._folder, self._chunk_tokens)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """First thing of a step: the engine hears of what begins, and of files that are not used, before the first
        token comes of it."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, _Plan)
        assert self._copier is not None
        for key, detail in connector_metadata.refused:
            self._copier.refused(key, detail)
        for key, cached_tokens in connector_metadata.begun:
            self._copier.begun(key, cached_tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy what this step's requests bring along, before the model reads it."""
        plan = self._get_connector_metadata()
        assert self._copier is not None
        assert isinstance(plan, _Plan)
        if plan.attach is not None:
            self._copier.attach(plan.attach.folder, plan.attach.chunk_tokens)
        for item in plan.imports:
            loaded = self._copier.load(item)
            if item.waits:
                self._loads.finished_recving.add(item.waits)
            if not loaded and item.waits:
                self._loads.failed_recving.add(item.waits)
            elif not loaded:
                self._failed_blocks |= self._copier.blocks_of(item)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests that waited for this step's loads, and those of them that are without."""
        loads, self._loads = self._loads, KVConnectorTransferResults()
        return loads

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of this step without KV, of requests that did not wait."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was loaded before the step began."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are copied when the step is over: states have no such moment of their own."""

    def wait_for_save(self) -> None:
        """Copy the blocks that this step completed."""
        plan = self._get_connector_metadata()
        assert self._copier is not None
        assert isinstance(plan, _Plan)
        for item in plan.exports:
            self._copier.save(item)
        self._copier.alive()

    def shutdown(self) -> None:
        """The engine sees the end of the stream."""
        if self._copier is not None:
            self._copier.close()


def _ids(groups: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(block) for block in group) for group in groups)
