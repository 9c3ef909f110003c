"""`/v1/completions` says what the endpoint for token ids says, in other words."""

from __future__ import annotations

from farfill.engine.vllm.completions import from_completion, to_completion


def test_a_request_keeps_all_it_says() -> None:
    body = {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 3, "detokenize": False, "logprobs": 2},
        "cache_salt": "s",
        "kv_transfer_params": {"farfill": {}},
        "stream": True,
    }
    asked = to_completion(body, "m")
    assert (asked["prompt"], asked["model"], asked["max_tokens"], asked["logprobs"]) == ([1, 2], "m", 3, 2)
    assert (asked["cache_salt"], asked["kv_transfer_params"], asked["stream"]) == ("s", {"farfill": {}}, True)
    assert asked["return_token_ids"] is asked["return_tokens_as_token_ids"] is True
    assert not {"token_ids", "sampling_params", "detokenize"} & set(asked)


def test_an_answer_has_token_ids_and_logprobs_by_token() -> None:
    choice = {
        "index": 0,
        "text": "x",
        "token_ids": [7, 8],
        "finish_reason": "length",
        "logprobs": {
            "tokens": ["token_id:7", "token_id:8"],
            "token_logprobs": [-0.5, -1.0],
            "top_logprobs": [{"token_id:7": -0.5, "token_id:3": -2.0}, None],
        },
    }
    found = from_completion({"choices": [choice, {"index": 1, "token_ids": [9], "logprobs": None}], "usage": {"a": 1}})
    first, second = found["choices"]
    assert first["token_ids"] == [7, 8]
    assert [item["token_id"] for item in first["logprobs"]["content"]] == [7, 8]
    assert first["logprobs"]["content"][0]["top_logprobs"] == [
        {"token_id": 7, "logprob": -0.5},
        {"token_id": 3, "logprob": -2.0},
    ]
    assert first["logprobs"]["content"][1]["top_logprobs"] == []
    assert second["logprobs"] is None
    assert found["usage"] == {"a": 1}


def test_errors_and_parts_without_choices_stay_as_they_are() -> None:
    assert from_completion({"error": {"message": "no"}}) == {"error": {"message": "no"}}
    assert from_completion({"usage": {}})["choices"] == []
