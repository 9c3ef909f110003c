"""Far and near prefill give the same tokens with the same log-probabilities, bit for bit."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.system.cluster import DECODE, PREFILL, Cluster

from farfill.cli.local_ports import free_ports
from farfill.verify.parity import Verdict, run_parity
from farfill.verify.prompts import corpus_cases, load_corpus


async def test_parity_command_on_a_hybrid_in_float32_is_exact(hybrid_cluster: Cluster, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "My own prompt.", "max_tokens": 5}\n')
    code, out, _ = await _farfill(
        "parity", "--config", str(hybrid_cluster.config_path), "--prompts", str(prompts), "--json"
    )
    told = json.loads(out)
    assert (code, told["ok"]) == (0, True)
    assert [(row["prompt_tokens"], row["mode"]) for row in told["rows"]] == [
        (length, mode) for length in (14, 16, 300, 2_000, 6_000) for mode in ("greedy", "seeded")
    ]
    for row in told["rows"]:
        assert row["verdict"] == "equal"
        assert row["equal_tokens"] == row["output_tokens"] == (5 if row["source"] == "prompts.jsonl:1" else 64)
        assert row["max_logprob_delta"] == 0
        assert row["kv_raw_bytes"] > 0
    # Sliding layers send their window only: 2 of 6 layers grow with the prompt.
    sizes = {row["prompt_tokens"]: row["kv_raw_bytes"] for row in told["rows"]}
    row_bytes = 2 * 16 * 4
    assert sizes[2_000] == row_bytes * (2 * 1_999 + 4 * 47)


async def test_parity_on_the_real_model_in_bfloat16_is_exact(real_cluster: Cluster) -> None:
    async with real_cluster.client() as client:
        context = (await client.model()).context_tokens
        corpus = await load_corpus(client)
        cases = list(corpus_cases(corpus, (16, 300, 2_000), repeat=1, max_tokens=16, context_tokens=context))
        result = await run_parity(client, cases)
    assert [(row.verdict, row.detail) for row in result.rows] == [(Verdict.EQUAL, "")] * 6
    assert all(row.output_tokens == 16 and row.max_logprob_delta == 0 for row in result.rows)


async def test_parity_command_without_a_cluster_exits_2_and_says_how_to_start_one() -> None:
    (port,) = free_ports(1)
    code, _, err = await _farfill("parity", "--gateway", f"http://127.0.0.1:{port}")
    assert code == 2
    assert "farfill up" in err


async def test_parity_command_where_placements_may_not_be_forced_says_the_key(hybrid_cluster: Cluster) -> None:
    config = hybrid_cluster.write_config("closed.yaml", {"routing": {"allow_placement_override": False}})
    code, _, err = await _farfill("parity", "--config", str(config))
    assert code == 2
    assert "allow_placement_override" in err


async def test_parity_command_where_kv_travels_lossy_is_refused_unless_allowed(hybrid_cluster: Cluster) -> None:
    config = hybrid_cluster.write_config("lossy.yaml", {"kv_transfer": {"lossy": "int8"}})
    code, _, err = await _farfill("parity", "--config", str(config))
    assert code == 2
    assert "kv_transfer.lossy" in err
    assert "--allow-lossy" in err
    code, _, _ = await _farfill("parity", "--config", str(config), "--lengths", "16", "--allow-lossy")
    assert code == 0, "the cluster that runs does not have it"


async def test_workers_that_send_lossy_mark_their_answers_and_parity_refuses_them(hybrid_cluster: Cluster) -> None:
    cluster = hybrid_cluster
    lossy = cluster.write_config("lossy.yaml", {"kv_transfer": {"lossy": "int8"}})
    try:
        _restart_workers(cluster, lossy)
        parity = ("parity", "--gateway", cluster.url, "--lengths", "300", "--tokens", "4", "--json")
        code, out, _ = await _farfill(*parity)
        assert code == 1
        assert [row["verdict"] for row in json.loads(out)["rows"]] == ["invalid"] * 2
        assert "--allow-lossy" in out
        _, out, _ = await _farfill(*parity, "--allow-lossy")
        rows = json.loads(out)["rows"]
        assert {row["verdict"] for row in rows} <= {"equal", "differs"}
        assert all(row["kv_wire_bytes"] < 0.4 * row["kv_raw_bytes"] for row in rows), "float32 as bytes"
    finally:
        _restart_workers(cluster, cluster.config_path)


def _restart_workers(cluster: Cluster, config: Path) -> None:
    for name in (PREFILL, DECODE):
        cluster.stop(name)
        cluster.spawn(name, config=config)
    cluster.wait_known({PREFILL, DECODE})


async def _farfill(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "farfill.cli.main",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()
