"""Every decision comes with its inputs, and replays to the same answer from the record and from the log."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farfill.core.cluster import InstanceState, Role
from farfill.policy.replay import replay
from farfill.wire.control import ErrorBody
from support.gateway_harness import running_gateway
from support.stub_worker import StubWorker

COMPLETIONS = "/v1/completions"


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2, **more}


async def test_record_has_all_decisions_and_each_replays_the_same(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        await gateway.post(COMPLETIONS, body("x" * 100), **{"X-Request-Id": "far", "X-Session-ID": "s1"})
        record = await gateway.record("far")
    assert [d["policy"] for d in record["decisions"]] == ["placement", "offload", "placement"]
    assert record["decisions"][0]["inputs"]["request"]["session"].startswith("default:")
    for decision in record["decisions"]:
        assert decision["request"] == "far"
        assert replay(msgspec.json.encode(decision)).same


async def test_decision_log_replays_to_identical_decisions(tmp_path: Path) -> None:
    log = tmp_path / "log" / "decisions.jsonl"
    async with running_gateway(tmp_path, gateway={"decision_log": log}) as gateway:
        for i in range(20):
            prompt = f"{i}" * (10 if i % 3 else 200)
            await gateway.post(COMPLETIONS, body(prompt, user=f"u{i % 4}"), **{"X-Request-Id": f"r{i}"})
        await gateway.post(COMPLETIONS, body("0" * 200), **{"X-Request-Id": "again"})
    lines = log.read_bytes().splitlines()
    replayed = [replay(line) for line in lines]
    assert {r.request for r in replayed} == {*(f"r{i}" for i in range(20)), "again"}
    assert {r.policy for r in replayed} == {"placement", "offload"}
    assert all(r.same for r in replayed)
    changed = msgspec.json.decode(lines[1])
    changed["inputs"]["threshold_tokens"] += 10_000
    assert changed["policy"] == "offload"
    assert changed["output"]["reason"] == "above_threshold"
    assert not replay(msgspec.json.encode(changed)).same


async def test_decisions_about_a_prompt_that_went_nowhere_are_kept_too(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    routing = {"fallback_budget": {"tokens_per_s": 0.1, "burst_s": 500.0}}  # 50 tokens
    async with running_gateway(tmp_path, gateway={"decision_log": log}, routing=routing) as gateway:
        gateway.prefill.state = InstanceState.DRAINING
        assert (await gateway.post(COMPLETIONS, body("x" * 60)))[0] == 200  # leaves a debt
        status, answer, _ = await gateway.post(COMPLETIONS, body("y" * 60), **{"X-Request-Id": "refused"})
        assert (status, answer["error"]["code"]) == (503, "fallback_tokens")
        record = await gateway.record("refused")
    assert [d["policy"] for d in record["decisions"]] == ["placement", "placement", "offload", "fallback_budget"]
    logged = [found for found in map(replay, log.read_bytes().splitlines()) if found.request == "refused"]
    assert [found.policy for found in logged] == [d["policy"] for d in record["decisions"]]
    assert all(found.same for found in logged)


async def test_choice_of_who_continues_a_transfer_is_a_decision_too(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        other = StubWorker("prefill-other", Role.PREFILL, gateway.decode.transfers, site="other")
        await other.start()
        gateway.membership.workers.append(other)
        gateway.prefill.refuse = (500, ErrorBody(reason="engine_error", message="broke", retryable=True))
        try:
            headers = {"X-Request-Id": "continued"}
            for prompt in ("x", "y"):  # whoever is asked first, one of them fails
                assert (await gateway.post(COMPLETIONS, body(prompt * 100), **headers))[0] == 200
                record = await gateway.record("continued")
                if record["continuations"]:
                    break
        finally:
            await other.stop()
    assert record["continuations"][0]["prefill_instance"] == "prefill-other"
    last = record["decisions"][-1]
    assert last["policy"] == "placement"
    assert [c[0]["name"] for c in last["inputs"]["candidates"]] == ["prefill-other"]
    assert all(replay(msgspec.json.encode(decision)).same for decision in record["decisions"])


async def test_full_decision_log_begins_anew_and_keeps_the_former(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    async with running_gateway(tmp_path, gateway={"decision_log": log, "decision_log_max_mb": 1}) as gateway:
        decision_log = gateway.service.decision_log
        assert decision_log is not None
        decision_log._max_bytes = 8000
        for i in range(12):
            await gateway.post(COMPLETIONS, body(f"{i}" * 200))
    assert log.stat().st_size <= 8000
    former = log.with_name("decisions.jsonl.1")
    assert all(replay(line).same for line in former.read_bytes().splitlines())


async def test_session_stays_at_its_instance_and_user_is_a_session_too(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engine={"prefix_cache_mb": 0}) as gateway:
        second = StubWorker("decode-two", Role.DECODE, gateway.decode.transfers)
        await second.start()
        gateway.membership.workers.append(second)
        try:
            for by_header in (True, False):
                seen: dict[str, set[str]] = {}
                for i in range(24):
                    session = f"s{i % 8}"
                    more = {} if by_header else {"user": session}
                    headers = {"X-Session-ID": session} if by_header else {}
                    status, _, response = await gateway.post(COMPLETIONS, body("hi", **more), **headers)
                    assert status == 200
                    seen.setdefault(session, set()).add(response.headers["x-farfill-decode-instance"])
                assert all(len(instances) == 1 for instances in seen.values())
                assert set().union(*seen.values()) == {"decode-near", "decode-two"}
        finally:
            await second.stop()
