"""An embedded engine of several ranks: processes started, a part of the model in each, all ended with the first."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.config.paths import cache_dir
from farfill.core.errors import ConfigError, EngineError
from farfill.engine.fingerprint import fingerprint
from farfill.engine.local import LocalEngine
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import EngineInfo, EngineLoad
from farfill.engine.torch import loader
from farfill.engine.torch.layout import require_known
from farfill.engine.torch.linear import pack_linears
from farfill.engine.torch.norms import compile_norms
from farfill.engine.torch.ranks.cutting import load_cut
from farfill.engine.torch.ranks.group import Lost
from farfill.engine.torch.ranks.lead import LeadExecutor
from farfill.engine.torch.ranks.messages import Load, Pack
from farfill.engine.torch.ranks.plan import require_cuttable
from farfill.engine.torch.ranks.processes import Ranks, is_supported
from farfill.engine.torch.selfcheck import CheckMemory, ModelCheck
from farfill.engine.torch.weights import open_config, open_tokenizer


class RankedEngine(LocalEngine):
    """A `LocalEngine` whose executor is spread over `ranks`, which it owns."""

    def __init__(self, ranks: Ranks, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks

    def load(self) -> EngineLoad:
        """Raises EngineError once a rank is gone."""
        executor = self._executor
        assert isinstance(executor, LeadExecutor)
        if self._ranks.lost is not None:
            raise EngineError(f"the engine's ranks are lost: {self._ranks.lost}", reason="engine_dead")
        return replace(super().load(), ranks=executor.loads())

    def close(self) -> None:
        """Also end the other ranks."""
        super().close()
        self._ranks.close()


def load(model: ModelConfig, engine: EngineConfig, prefill: PrefillConfig, base_dir: Path) -> LocalEngine:
    """As `loader.load`, with `engine.ranks` processes."""
    if engine.device != "cpu":
        raise ConfigError("engine.ranks: more than 1 needs engine.device: cpu")
    if not is_supported():
        raise ConfigError("engine.ranks: more than 1 needs memory that processes share without a name, as on Linux")
    folder = base_dir / model.path
    loader.require_files(folder)
    require_cuttable(open_config(folder))
    threads = max(1, (engine.threads or os.cpu_count() or 1) // engine.ranks)
    try:
        ranks = Ranks(engine.ranks, engine.rank_timeout_s, threads=threads)
        try:
            return loader.load(
                model,
                engine.model_copy(update={"threads": threads}),
                prefill,
                base_dir,
                open_model=partial(load_model, ranks=ranks),
                make_engine=partial(RankedEngine, ranks),
            )
        except BaseException:
            ranks.close()
            raise
    except Lost as error:
        raise EngineError(f"the engine's ranks are lost: {error}", reason="engine_dead") from error


def load_model(
    folder: Path,
    model: ModelConfig,
    prefill_chunk_tokens: int,
    options: loader.LoadOptions | None = None,
    *,
    ranks: Ranks,
) -> loader.LoadedModel:
    """As `loader.load_model`, over `ranks`."""
    options = options or loader.LoadOptions()
    require_known(open_config(folder).get_text_config())
    ranks.send(Load(str(folder.absolute()), model.dtype, options.attention, prefill_chunk_tokens))
    cut = load_cut(
        folder,
        model.dtype,
        options.attention,
        prefill_chunk_tokens,
        ranks.group,
        checkpoint_every_chunks=options.checkpoint_every_chunks,
    )
    ranks.collect()
    executor = LeadExecutor(cut.net, cut.spec, ranks, cut.experts)
    mark = fingerprint(folder, loader.ENGINE_VERSION, model.dtype, cut.shape.layout)
    settings = (options.device, options.attention, f"{ranks.size} ranks")
    memory = CheckMemory(cache_dir() / "model-checks", mark, settings)
    found = memory.recall()
    ranks.send(Pack(found is None))
    check = ModelCheck(cut.net) if found is None else None
    pack_linears(cut.net, cut.called)
    compile_norms(cut.net)
    ranks.collect()
    if check is not None:
        memory.remember(check.run(executor))
    elif found is not None:
        executor.capabilities = found
    executor.pin(options.cpus)
    info = EngineInfo(
        engine="torch",
        model=model.name,
        fingerprint=mark,
        layout=cut.shape.layout,
        max_context_tokens=cut.net.config.max_position_embeddings,
        vocab_size=cut.net.get_output_embeddings().weight.shape[0],
        kv_total_bytes=0,
    )
    tokenizer = open_tokenizer(folder)
    return loader.LoadedModel(info, executor, Vocabulary.of(tokenizer, loader.eos_ids(cut.net), info.vocab_size))
