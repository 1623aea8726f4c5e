"""Batch lines: what a chat or a completion becomes, and the sentence for each fault of a line or a parameter."""

from __future__ import annotations

from typing import Any

from tests.data.conftest import USER, batch, fault, good
from tests.effort import table


def completion(**body: object) -> dict[str, Any]:
    """A batch line for a completion."""
    return batch(body, url="/v1/completions")


def test_a_batch_chat_keeps_its_custom_id_and_its_parameters() -> None:
    """The body's parameters override the flags for this request alone."""
    body = {
        "model": "any", "messages": [USER], "max_tokens": 5, "max_completion_tokens": 7, "temperature": 0, "top_p": 0.5,
        "seed": 11, "logprobs": True, "ignore_eos": True, "stream": False, "n": 1, "stop": None, "user": "me",
        "tool_choice": "auto", "response_format": {"type": "text"}, "frequency_penalty": 0.0,
    }  # fmt: skip
    record = good(batch(body))
    assert (record.id, record.custom_id, record.request_id(1)) == ("b-1", "b-1", "b-1")
    assert record.params == {
        "max_tokens": 7, "temperature": 0.0, "top_p": 0.5, "seed": 11, "logprobs": True, "ignore_eos": True, "n": 1,
        "frequency_penalty": 0.0,
    }  # fmt: skip
    assert good(batch({"messages": [USER], "max_tokens": 5, "seed": None})).params == {"max_tokens": 5}


@table("given, prompt", [("once", "once"), ([5, 0, 7], [5, 0, 7]), (["once"], "once"), ([[5, 0]], [5, 0]), ([5], [5])])
def test_a_batch_completion_has_a_prompt(given: object, prompt: object) -> None:
    """Fault: a text, token ids, or the list of one of these, as lm-eval writes it, is refused."""
    record = good(completion(prompt=given, max_tokens=2, logprobs=1))
    assert (record.prompt, record.messages, record.params) == (
        prompt,
        [],
        {"max_tokens": 2, "logprobs": True, "top_logprobs": 1},
    )


BATCH_FAULTS = [
    (batch(custom_id=...), "custom_id is missing; expected a string that is not empty"),
    (batch(custom_id=5), "custom_id is 5; expected a string that is not empty"),
    (batch(custom_id=""), 'custom_id is ""; expected a string that is not empty'),
    (batch(method="GET"), 'method is "GET"; expected POST'),
    (batch(url="/v1/embeddings"), 'url is "/v1/embeddings"; expected /v1/chat/completions or /v1/completions'),
    (batch(body=...), "body is missing; expected an object with messages or a prompt"),
    (batch([]), "body is a list; expected an object with messages or a prompt"),
    (batch({}), "body.messages is missing; expected a list of messages"),
    (batch({"messages": []}), "body.messages is empty; expected at least one message"),
    (
        batch({"messages": [{"role": "bot", "content": ""}]}),
        'body.messages[0].role is "bot"; expected system, user, assistant or tool',
    ),
    (batch({"messages": [USER], "tools": 1}), "body.tools is 1; expected a list of tool schemas"),
    (completion(), "body.prompt is missing; expected a string or a list of token ids"),
    (completion(prompt=None), "body.prompt is null; expected a string or a list of token ids"),
    (completion(prompt=""), "body.prompt is empty; expected at least one token"),
    (completion(prompt=[]), "body.prompt is empty; expected at least one token"),
    (completion(prompt=["a", "b"]), 'body.prompt[0] is "a"; expected a token id; one line asks for one completion'),
    (completion(prompt=[[1], [2]]), "body.prompt[0] is a list; expected a token id; one line asks for one completion"),
    (completion(prompt=[1, -2]), "body.prompt[1] is -2; expected a token id; one line asks for one completion"),
    (completion(prompt=[True]), "body.prompt[0] is true; expected a token id; one line asks for one completion"),
    (completion(prompt="a", logprobs=21), "body.logprobs is 21; expected an integer from 0 to 20"),
]


@table("record, sentence", BATCH_FAULTS)
def test_each_fault_has_its_sentence(record: object, sentence: str) -> None:
    """A user finds the fault in a line of 100 kB by the sentence alone: where, what came, what was due."""
    assert fault(record) == sentence


BODY_FAULTS = [
    (
        "stream",
        True,
        "body.stream is true, which is not supported; leave it out or give false: a batch is answered in one piece",
    ),
    ("n", 0, "body.n is 0; expected an integer from 1 to 128"),
    ("n", 129, "body.n is 129; expected an integer from 1 to 128"),
    ("best_of", 3, "body.best_of is 3; expected the number of answers, n: all of them are given, and none is chosen"),
    ("prompt_logprobs", 21, "body.prompt_logprobs is 21; expected an integer from 0 to 20"),
    ("max_tokens", 1.5, "body.max_tokens is 1.5; expected an integer of at least 1"),
    ("max_completion_tokens", True, "body.max_completion_tokens is true; expected an integer of at least 1"),
    ("temperature", 2.5, "body.temperature is 2.5; expected a number from 0 to 2"),
    ("top_p", 1.1, "body.top_p is 1.1; expected a number above 0 and up to 1"),
    ("seed", "x", 'body.seed is "x"; expected an integer'),
    ("logprobs", 1, "body.logprobs is 1; expected true or false"),
    ("ignore_eos", 1, "body.ignore_eos is 1; expected true or false"),
    ("stop", 5, "body.stop is 5; expected a text or a list of texts"),
    ("stop", ["\n", 5], "body.stop[1] is 5; expected a text that is not empty"),
    ("stop", ["\n", ""], 'body.stop[1] is ""; expected a text that is not empty'),
    ("stop", ["x"] * 65, "body.stop has 65 texts; at most 64 are looked for"),
    ("stop", "x" * 1025, "body.stop has 1,025 characters; at most 1,024 are looked for"),
    ("stop", ["x", "x" * 1025], "body.stop[1] has 1,025 characters; at most 1,024 are looked for"),
    ("stop_token_ids", 5, "body.stop_token_ids is 5; expected a list of token ids"),
    ("stop_token_ids", [5, -1], "body.stop_token_ids[1] is -1; expected a token id"),
    ("stop_token_ids", [2**31], "body.stop_token_ids[0] is 2147483648; expected a token id"),
    ("allowed_token_ids", [], "body.allowed_token_ids is empty; expected a list of token ids, one at least"),
    ("allowed_token_ids", [True], "body.allowed_token_ids[0] is true; expected a token id"),
    ("include_stop_str_in_output", 1, "body.include_stop_str_in_output is 1; expected true or false"),
    ("min_tokens", -1, "body.min_tokens is -1; expected an integer of at least 0"),
    ("logit_bias", [5], "body.logit_bias is a list; expected an object of token ids and numbers"),
    ("logit_bias", {"x": 2}, 'body.logit_bias has the key "x"; expected token ids'),
    ("logit_bias", {"21474836470": 2}, 'body.logit_bias has the key "21474836470"; expected token ids'),
    ("logit_bias", {"-1": 2}, 'body.logit_bias has the key "-1"; expected token ids'),
    ("logit_bias", {"\u0661": 2}, 'body.logit_bias has the key "\u0661"; expected token ids'),
    ("logit_bias", {"9" * 5000: 2}, f'body.logit_bias has the key "{"9" * 37}..."; expected token ids'),
    ("logit_bias", {"1": 101}, 'body.logit_bias["1"] is 101; expected a number from -100 to 100'),
    ("logit_bias", {"1": None}, 'body.logit_bias["1"] is null; expected a number from -100 to 100'),
    ("presence_penalty", 2.5, "body.presence_penalty is 2.5; expected a number from -2 to 2"),
    ("frequency_penalty", "x", 'body.frequency_penalty is "x"; expected a number from -2 to 2'),
    ("repetition_penalty", 0, "body.repetition_penalty is 0; expected a number from 0.01 to 100"),
    ("min_p", 1.5, "body.min_p is 1.5; expected a number from 0 to 1"),
    ("top_k", -2, "body.top_k is -2; expected an integer of at least 1, or 0 or -1 for all tokens"),
    ("top_k", 1.5, "body.top_k is 1.5; expected an integer of at least 1, or 0 or -1 for all tokens"),
    ("top_logprobs", 21, "body.top_logprobs is 21; expected an integer from 0 to 20"),
    ("top_logprobs", True, "body.top_logprobs is true; expected an integer from 0 to 20"),
    ("echo", True, "body.echo is true, which is not supported; leave it out or give false"),
]


@table("key, value, sentence", BODY_FAULTS)
def test_each_parameter_that_cannot_be_honoured_is_refused(key: str, value: object, sentence: str) -> None:
    """A parameter that is dropped in silence gives an answer that nobody asked for."""
    assert fault(batch({"messages": [USER], key: value})) == sentence


def test_what_a_body_may_hold_at_most_is_taken() -> None:
    """Catches a bound that refuses its own value."""
    params = good(batch({
        "messages": [USER], "stop": ["x" * 1024, *map(str, range(63))], "stop_token_ids": [0, 2**31 - 1],
        "allowed_token_ids": [7], "logit_bias": {"2147483647": -100, "0": 100}, "n": 128, "temperature": 2, "top_p": 1,
        "logprobs": True, "top_logprobs": 20, "seed": -1, "best_of": 128, "min_p": 1, "repetition_penalty": 100,
    })).params  # fmt: skip
    assert len(params["stop"]) == 64 and params["stop_token_ids"] == (0, 2**31 - 1)
    assert list(params["logit_bias"].items()) == [(0, 100.0), (2**31 - 1, -100.0)]
    assert params["seed"] == 2**64 - 1
    assert fault(batch({"messages": [USER], "logit_bias": {"2147483648": 1}})).endswith("expected token ids")
    assert fault(batch({"messages": [USER], "best_of": 2})).startswith("body.best_of is 2; expected")
    assert good(batch({"messages": [USER], "prompt_logprobs": 0, "max_tokens": 0})).params["max_tokens"] == 0
