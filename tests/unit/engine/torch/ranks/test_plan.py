"""How a model is cut: what transformers is told, and which models are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from farfill.core.errors import ModelUnsupportedError
from farfill.engine.torch.ranks.plan import KNOWN, plan
from support.architectures import make_config

ATTENTION = "model.layers.*.self_attn."


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "kept"),
    [
        (4, 2, 2, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (4, 2, 4, {"q_proj", "o_proj"}),
        (4, 1, 2, {"q_proj", "o_proj"}),
        (6, 3, 2, set()),
        (6, 3, 4, set()),
    ],
)
def test_attention_is_cut_where_heads_divide(heads: int, kv_heads: int, ranks: int, kept: set[str]) -> None:
    config = make_config("llama", hidden_size=96, num_attention_heads=heads, num_key_value_heads=kv_heads)
    cuts = [plan(config, rank, ranks) for rank in range(ranks)]
    rules = cuts[0].config.tp_plan
    assert isinstance(rules, dict)
    whole = {name.removeprefix(ATTENTION) for name, style in rules.items() if style == "replicate"}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} - whole == kept
    assert cuts[0].kv_heads == (kv_heads if kept else 0)
    few = kept and kv_heads < ranks
    assert [cut.kv_head for cut in cuts] == [rank * kv_heads // ranks if few else None for rank in range(ranks)]


def test_experts_go_whole_to_ranks_where_they_divide() -> None:
    by_number = {experts: plan(make_config("qwen3_moe", num_experts=experts), 0, 4) for experts in (4, 6, 8)}
    assert {experts: cut.config.ep_size for experts, cut in by_number.items()} == {4: 4, 6: 1, 8: 4}


def test_a_tied_head_is_on_every_rank_and_only_the_first_computes_it() -> None:
    assert plan(make_config("llama", tie_word_embeddings=True), 1, 2).head_everywhere
    assert not plan(make_config("llama"), 1, 2).head_everywhere


@pytest.mark.parametrize("name", ["gemma4", "mamba2", "falcon_h1"])
def test_models_not_known_to_work_are_refused_by_name(name: str) -> None:
    config = make_config(name)
    with pytest.raises(ModelUnsupportedError, match=f"model_type {config.model_type} is not known.*engine.ranks: 1"):
        plan(config, 0, 2)


def test_what_is_known_is_documented() -> None:
    page = (Path(__file__).parents[5] / "docs" / "parallel.md").read_text()
    assert not [known for known in KNOWN if f"`{known.removesuffix('_text')}`" not in page]
