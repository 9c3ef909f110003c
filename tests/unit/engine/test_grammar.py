"""Grammars in the engine: valid output always, seeds, hostile grammars, and requests beside them."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
from llguidance import LLMatcher
from tests.unit.engine.conftest import DEADLINE_S, Generated, Harness

from farfill.core.errors import EngineError, InvalidRequestError
from farfill.engine.fake import EOS_ID, VOCAB_SIZE, FakeEngine, byte_tokenizer
from farfill.engine.grammar import Grammars, check_grammar
from farfill.engine.protocol import GenerateWork

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "kind": {"enum": ["é", "b"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
PROMPT = Harness.prompt(20)


def json_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})


def regex_grammar(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def run(engine: FakeEngine, grammar: str, n: int = 1, **sampling: Any) -> Generated:
    work = Harness.work(PROMPT, grammar=grammar, n=n, **{"max_tokens": 200, "ignore_eos": False, **sampling})
    return run_work(engine, work)


def run_work(engine: FakeEngine, work: GenerateWork) -> Generated:
    engine.prepare(work.sampling).result(DEADLINE_S)
    sink = Generated(work.sampling.n)
    engine.generate(work, sink)
    return sink.wait()


@pytest.fixture
def engine() -> Any:
    engine = FakeEngine()
    engine.start()
    yield engine
    engine.close()
    engine.check_integrity()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_choice_follows_the_schema(engine: FakeEngine, temperature: float) -> None:
    sink = run(engine, json_grammar(SCHEMA), n=4, temperature=temperature, seed=7)
    for index in range(4):
        value = json.loads(sink.text(index))
        assert list(value) == ["name", "sizes", "kind"]
        assert len(value["name"]) <= 12
        assert value["kind"] in ("é", "b")
    assert all(event.finish_reason in (None, "stop") for event in sink.events)


def test_same_seed_gives_the_same_text_beside_others(engine: FakeEngine) -> None:
    alone = run(engine, json_grammar(SCHEMA), temperature=1.0, seed=11).text()
    others = [Generated() for _ in range(3)]
    for i, sink in enumerate(others):
        engine.generate(Harness.work(Harness.prompt(30, i), max_tokens=60, temperature=1.0), sink)
    assert run(engine, json_grammar(SCHEMA), temperature=1.0, seed=11).text() == alone
    for sink in others:
        sink.wait()


def test_output_ends_when_nothing_may_follow(engine: FakeEngine) -> None:
    for ignore_eos in (False, True):
        sink = run(engine, regex_grammar("[a-c]{5}"), ignore_eos=ignore_eos)
        assert re.fullmatch("[a-c]{5}", sink.text())
        assert (len(sink.tokens()), sink.last.finish_reason) == (5, "stop")


def test_min_tokens_counts_while_the_grammar_has_more_to_say(engine: FakeEngine) -> None:
    assert len(run(engine, regex_grammar("[a-c]{1,9}"), min_tokens=6, temperature=1.0, seed=1).tokens()) >= 6
    assert run(engine, regex_grammar("[a-c]{2}"), min_tokens=50).last.finish_reason == "stop"


def test_max_tokens_cuts_and_stop_strings_end(engine: FakeEngine) -> None:
    cut = run(engine, regex_grammar("[ab]{30}"), max_tokens=7)
    assert (len(cut.tokens()), cut.last.finish_reason) == (7, "length")
    stopped = run(engine, regex_grammar("[0-9]{3}-[0-9]{3}"), stop=("-",))
    assert re.fullmatch("[0-9]{3}", stopped.text())
    assert stopped.last.stop_reason == "-"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (json_grammar({"type": "no-such-type"}), "no-such-type"),
        (json_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (json_grammar({"$ref": "https://example.org/schema"}), "registry"),
        (json_grammar({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (json_grammar({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}), "no text"),
        (json_grammar({"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}), "too big"),
        (regex_grammar("a{1,9}" * 50_000), "characters"),
        ("start: nowhere", "nowhere"),
        ("", "Empty"),
    ],
)
def test_impossible_grammar_is_refused_before_it_runs(engine: FakeEngine, grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        check_grammar(grammar)
    assert refused.value.reason == "grammar"
    if grammar:
        with pytest.raises(InvalidRequestError, match=message):
            engine.prepare(Harness.work(PROMPT, grammar=grammar).sampling).result(DEADLINE_S)


def test_nested_beyond_all_reason_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(150):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidRequestError, match="recursion"):
        check_grammar(json_grammar(schema))


def test_token_against_the_grammar_ends_only_its_own_request(engine: FakeEngine) -> None:
    beside = Generated()
    engine.generate(Harness.work(Harness.prompt(30), max_tokens=100), beside)
    work = Harness.work(PROMPT, grammar=regex_grammar("[ab]{90}"), max_tokens=90)
    engine.prepare(work.sampling).result(DEADLINE_S)
    constraint = engine.vocabulary.grammars.constraint(work.sampling.grammar)
    assert not constraint.allowed()[ord("c")]
    with pytest.raises(EngineError) as refused:
        constraint.advance(ord("c"))
    assert refused.value.reason == "grammar_refused"
    assert len(beside.wait().tokens()) == 100


def wide_rule(count: int) -> str:
    return "start: " + " | ".join(f'"{i:05}"' for i in range(count))


def test_grammar_that_cannot_take_its_first_token_is_refused_before_it_runs() -> None:
    check_grammar(wide_rule(1500))
    with pytest.raises(InvalidRequestError, match="max is 2000") as refused:
        check_grammar(wide_rule(2500))
    assert refused.value.reason == "grammar"


@pytest.mark.parametrize("grammar", [wide_rule(2500), "start: a\na: /[^z]{8}/ (" + wide_rule(2500)[7:] + ")"])
def test_grammar_over_a_bound_of_a_step_is_the_fault_of_its_client(engine: FakeEngine, grammar: str) -> None:
    beside, over = Generated(), Generated()
    engine.generate(Harness.work(Harness.prompt(30), max_tokens=100), beside)
    work = Harness.work(PROMPT, grammar=grammar, max_tokens=20)
    engine.prepare(work.sampling).result(DEADLINE_S)
    engine.generate(work, over)
    error = over.wait().error
    assert isinstance(error, InvalidRequestError), error
    assert error.reason == "grammar_limit"
    assert "too complex" in str(error)
    assert len(beside.wait().tokens()) == 100


def test_mask_is_computed_on_another_thread_while_the_choice_is_looked_at(engine: FakeEngine) -> None:
    grammars = engine.vocabulary.grammars
    constraint = grammars.constraint(regex_grammar("(.*(a|b).{8})+"))
    for _ in range(300):
        assert constraint.allowed()[ord("a")]
        constraint.advance(ord("a"))
        assert not constraint.complete


def test_logits_of_another_width_than_the_tokenizer(engine: FakeEngine) -> None:
    grammars = Grammars(byte_tokenizer().to_str, VOCAB_SIZE + 50, [EOS_ID])
    allowed = grammars.constraint(regex_grammar("[ab]")).allowed()
    assert allowed.shape == (VOCAB_SIZE + 50,)
    assert [int(i) for i in allowed.nonzero()[0]] == [97, 98]


def test_tokenizer_without_bytes_is_refused_as_unsupported() -> None:
    grammars = Grammars(lambda: "{}", 10, [])
    with pytest.raises(InvalidRequestError) as refused:
        grammars.prepare(regex_grammar("a")).result(DEADLINE_S)
    assert refused.value.reason == "unsupported"


def test_many_threads_may_ask_for_one_grammar() -> None:
    grammars = Grammars(byte_tokenizer().to_str, VOCAB_SIZE, [EOS_ID])
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(grammars.prepare(regex_grammar("x+")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(future) for future in found}) == 1
    first, second = grammars.constraint(regex_grammar("x+")), grammars.constraint(regex_grammar("x+"))
    first.advance(ord("x"))
    assert first.allowed()[EOS_ID]
    assert not second.allowed()[EOS_ID]
