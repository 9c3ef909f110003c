"""Comparing two forced runs, and refusing to compare what was not served as forced."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.verify.fake_gateway import FakeGateway

from farfill.verify.client import GatewayClient, GatewayUnreachableError, gateway_client
from farfill.verify.parity import ParityResult, Verdict, run_parity
from farfill.verify.parity_report import print_report, to_json
from farfill.verify.prompts import ParityCase, SamplingMode

CASE = ParityCase(source="test", token_ids=(3, 4, 5), max_tokens=10, mode=SamplingMode.SEEDED, seed=7)


async def test_parity_of_equal_outputs_holds_and_reports_what_was_measured(
    client: GatewayClient, gateway: FakeGateway
) -> None:
    result = await run_parity(client, [CASE])
    (row,) = result.rows
    assert result.ok
    assert (row.verdict, row.equal_tokens, row.output_tokens) == (Verdict.EQUAL, 10, 10)
    assert row.max_logprob_delta == 0.25
    assert (row.kv_raw_bytes, row.kv_wire_bytes, row.remote_ttft_s, row.local_ttft_s) == (4096, 2048, 0.75, 1.5)
    assert row.divergence is None
    remote, local = gateway.seen
    assert (remote["forced"], local["forced"]) == ("remote", "local")
    assert remote["cache_salt"] != local["cache_salt"]
    for body in (remote, local):
        assert (body["temperature"], body["top_p"], body["seed"]) == (0.8, 0.95, 7)
        assert body["ignore_eos"]
        assert body["logprobs"] == 5


async def test_parity_greedy_sends_no_seed(client: GatewayClient, gateway: FakeGateway) -> None:
    await run_parity(client, [replace(CASE, mode=SamplingMode.GREEDY)])
    assert all(body["temperature"] == 0 and "seed" not in body for body in gateway.seen)


async def test_parity_refuses_lossy_kv_unless_it_is_allowed(client: GatewayClient, gateway: FakeGateway) -> None:
    gateway.lossy = "int8"
    (row,) = (await run_parity(client, [CASE])).rows
    assert row.verdict is Verdict.INVALID
    assert "int8" in row.detail
    assert "--allow-lossy" in row.detail
    assert (await run_parity(client, [CASE], allow_lossy=True)).ok


async def test_parity_of_a_different_token_fails_at_its_position_with_both_tops(
    client: GatewayClient, gateway: FakeGateway
) -> None:
    gateway.differ_at = 4
    result = await run_parity(client, [CASE])
    (row,) = result.rows
    assert not result.ok
    assert (row.verdict, row.equal_tokens) == (Verdict.DIFFERS, 4)
    assert row.divergence is not None
    assert row.divergence.position == 4
    assert (row.divergence.remote_token, row.divergence.local_token) == (17, 16)
    assert row.divergence.remote_top == (("t17", -0.5), ("low", -3.0))
    assert row.divergence.local_top == (("t16", -0.5), ("low", -3.0))
    text = _report(result)
    assert "output token 4: remote chose 17, local 16" in text
    assert "'t17'" in text
    assert "FAILED" in text


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"served_as": "local"}, "forced remote but served local"),
        ({"served_as": "remote"}, "forced local but served remote"),
        ({"fallback": "link_lost"}, "fell back (link_lost)"),
        ({"refuse": True}, "kv_memory"),
    ],
)
async def test_parity_not_served_as_forced_is_invalid_and_fails(
    client: GatewayClient, gateway: FakeGateway, fault: dict[str, object], told: str
) -> None:
    for name, value in fault.items():
        setattr(gateway, name, value)
    result = await run_parity(client, [CASE])
    assert not result.ok
    assert result.rows[0].verdict is Verdict.INVALID
    assert told in result.rows[0].detail
    assert told in _report(result)


async def test_parity_skips_visibly_and_fails_when_nothing_was_compared(client: GatewayClient) -> None:
    skipped = replace(CASE, skip="does not fit")
    assert not (await run_parity(client, [skipped])).ok
    assert not (await run_parity(client, [])).ok
    both = await run_parity(client, [skipped, CASE])
    assert both.ok
    assert "does not fit" in _report(both)


async def test_parity_concurrent_cases_keep_their_order(client: GatewayClient) -> None:
    cases = [replace(CASE, source=str(i), max_tokens=1 + i) for i in range(6)]
    done: list[str] = []
    result = await run_parity(client, cases, concurrency=3, progress=lambda row: done.append(row.source))
    assert [row.output_tokens for row in result.rows] == [1, 2, 3, 4, 5, 6]
    assert sorted(done) == ["0", "1", "2", "3", "4", "5"]


async def test_parity_without_a_gateway_says_it_is_unreachable(unused_tcp_port: int) -> None:
    async with gateway_client(f"http://127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(GatewayUnreachableError, match=str(unused_tcp_port)):
            await run_parity(client, [CASE])


async def test_to_json_has_every_row_with_its_divergence(client: GatewayClient, gateway: FakeGateway) -> None:
    gateway.differ_at = 2
    told = json.loads(to_json(await run_parity(client, [CASE])))
    assert told["ok"] is False
    assert told["rows"][0]["verdict"] == "differs"
    assert told["rows"][0]["divergence"]["position"] == 2


def _report(result: ParityResult) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_report(console, result)
    return console.file.getvalue()  # type: ignore[attr-defined]
