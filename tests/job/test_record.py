"""The record of one request, number by number, from a result and a renderer that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from apcbatch.data.output.parser import OutputParser
from apcbatch.data.output.tool_parsers import tool_parsers
from apcbatch.errors import RequestError
from apcbatch.job.logprobs import PromptFields
from apcbatch.job.record import Ticket, answers_of, error_record, is_stopped, line_of, read_record, result_record
from apcbatch.prefix import as_token_array
from apcbatch.types import Result, Scores

TEXTS = {1: "Hi", 2: " \u00e9", 3: "\ufffd", 4: "!", 9: "\ufffd"}


RENDERER: Any = SimpleNamespace(
    tokenizer=SimpleNamespace(
        decode=lambda ids: "".join(TEXTS[one] for one in ids), decode_all=lambda ids: TEXTS[ids[0]]
    ),
)
RESULT = Result(
    "r", 40, [1, 2, 3, 4], [-0.1, -0.2, -0.3, -0.4], "stop", cached_tokens=30, computed_tokens=10, cached_from="disk",
    ideal_cached_tokens=35, boundary=30, miss_reason="below_grid", prefill_ms=1.23456, decode_ms=6.54321,
    drafted_tokens=7, accepted_tokens=3,
)  # fmt: skip


def written(record: dict[str, Any]) -> dict[str, Any]:
    line = line_of(record)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    read: dict[str, Any] = json.loads(line)
    return read


def test_each_number_of_a_chat_record_is_its_own() -> None:
    """Catches a count of another field, a token without its bytes, and bytes that only a whole character would have."""
    record = written(result_record(Ticket(17, 9, 3, "c-9#3", "c-9"), RESULT, RENDERER, "m", 1_795_219_200))
    assert (record["id"], record["custom_id"], record["line"], record["turn"]) == ("apc-000017", "c-9#3", 9, 3)
    assert list(record) == ["id", "custom_id", "line", "turn", "response", "error", "apcbatch"]
    assert (record["response"]["status_code"], record["response"]["request_id"]) == (200, "apc-000017")
    body = record["response"]["body"]
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert (body["id"], body["created"], body["object"]) == ("apc-000017", 1_795_219_200, "chat.completion")
    [choice] = body["choices"]
    assert choice["logprobs"]["refusal"] is None and choice["logprobs"]["content"] == [
        {"token": "Hi", "logprob": -0.1, "bytes": [72, 105], "top_logprobs": []},
        {"token": " \u00e9", "logprob": -0.2, "bytes": [32, 195, 169], "top_logprobs": []},
        {"token": "\ufffd", "logprob": -0.3, "bytes": None, "top_logprobs": []},
        {"token": "!", "logprob": -0.4, "bytes": [33], "top_logprobs": []},
    ]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hi \u00e9\ufffd!", "stop")
    assert body["usage"] == {
        "prompt_tokens": 40, "completion_tokens": 4, "total_tokens": 44, "prompt_tokens_details": {"cached_tokens": 30}
    }  # fmt: skip
    reuse = record["apcbatch"]
    assert (reuse["cached_tokens"], reuse["computed_tokens"], reuse["ideal_cached_tokens"]) == (30, 10, 35)
    assert (reuse["cached_from"], reuse["boundary"], reuse["miss_reason"]) == ("disk", 30, "below_grid")
    assert (reuse["prefill_ms"], reuse["decode_ms"], reuse["conversation"]) == (1.235, 6.543, "c-9")
    assert (reuse["drafted_tokens"], reuse["accepted_tokens"]) == (7, 3)
    assert reuse["completion_token_ids"] == [1, 2, 3, 4] and record["error"] is None
    assert reuse["finish_reason"] == "stop"


def test_a_completion_says_where_each_token_begins() -> None:
    """Catches offsets that are off by a token, or counted in bytes."""
    record = written(result_record(Ticket(0, 1, None, "t", None, completion=True), RESULT, RENDERER, "m", 0))
    [choice] = record["response"]["body"]["choices"]
    assert choice["text"] == "Hi \u00e9\ufffd!"
    assert choice["logprobs"] == {
        "tokens": ["Hi", " \u00e9", "\ufffd", "!"], "token_logprobs": [-0.1, -0.2, -0.3, -0.4], "top_logprobs": None,
        "text_offset": [0, 2, 4, 5],
    }  # fmt: skip


LIKELY = [[(1, -0.1), (4, -2.0)], [(4, -0.15), (2, -0.2)], [(9, -0.2), (3, -0.3)], [(4, -0.4), (1, -3.0)]]


def test_the_likeliest_tokens_come_with_each_one() -> None:
    """Catches entries of another token, a text that two tokens share and one of them loses, and the chosen token that
    is missing because others are likelier."""
    result = replace(RESULT, top_logprobs=LIKELY)
    [choice] = written(result_record(Ticket(0, 1, 1, "c", "c"), result, RENDERER, "m", 0))["response"]["body"][
        "choices"
    ]
    first, second, *_ = choice["logprobs"]["content"]
    assert first["top_logprobs"] == [
        {"token": "Hi", "logprob": -0.1, "bytes": [72, 105]}, {"token": "!", "logprob": -2.0, "bytes": [33]},
    ]  # fmt: skip
    assert [one["token"] for one in second["top_logprobs"]] == ["!", " \u00e9"]
    result = replace(result, top_logprobs=[*LIKELY[:3], [(1, -0.01)]])
    ticket = Ticket(0, 1, None, "t", None, completion=True)
    [choice] = written(result_record(ticket, result, RENDERER, "m", 0))["response"]["body"]["choices"]
    assert choice["logprobs"]["top_logprobs"] == [
        {"Hi": -0.1, "!": -2.0}, {"!": -0.15, " \u00e9": -0.2}, {"\ufffd": -0.2, "token_id:3": -0.3},
        {"Hi": -0.01, "!": -0.4},
    ]  # fmt: skip


def test_a_recorded_answer_ends_as_it_was_recorded() -> None:
    """Fault: the tokens of the prompt are the answer's, or an answer that was cut off counts as ended."""
    for last, reason in [(9, "stop"), (4, "length")]:
        scored = Result("r", 5, scores=Scores(3, [-0.5, -0.25], [1, 1]))
        prompt = PromptFields(as_token_array([9, 9, 1, 2, last]), answer_begin=3)
        found = prompt.recorded_answer(scored, {9})
        assert (found.token_ids, found.logprobs, found.finish_reason) == ([2, last], [-0.5, -0.25], reason)
        for ranks, matches, is_exact in (([1, 1], 2, True), ([1, 2], 1, False), ([2, 3], 0, False)):
            fields = prompt.record_fields(replace(scored, scores=Scores(3, [-0.5, -0.25], ranks)), RENDERER)
            assert fields == {
                "score": {
                    "tokens": 2, "logprob_sum": -0.75, "greedy_matches": matches, "exact_match": is_exact,
                    "token_ids": [2, last], "token_logprobs": [-0.5, -0.25], "token_ranks": ranks,
                }
            }  # fmt: skip


def test_each_prompt_token_has_its_own_entry_and_the_likeliest() -> None:
    """Fault: a rank that counts from 0, likelier tokens than were asked for, or the entry of another position."""
    for count, top, expected in [
        (0, [], [{"1": (-0.5, 7)}, {"4": (-0.25, 1)}]),
        (0, [[(2, -0.1)], [(4, -0.25)]], [{"1": (-0.5, 7)}, {"4": (-0.25, 1)}]),
        (1, [[(2, -0.1), (3, -0.2)], [(4, -0.25), (2, -2.0)]], [{"1": (-0.5, 7), "2": (-0.1, 1)}, {"4": (-0.25, 1)}]),
        (
            2,
            [[(2, -0.1), (3, -0.2)], [(4, -0.25), (2, -2.0)]],
            [{"1": (-0.5, 7), "2": (-0.1, 1), "3": (-0.2, 2)}, {"4": (-0.25, 1), "2": (-2.0, 2)}],
        ),
    ]:
        prompt = PromptFields(as_token_array([9, 1, 4]), prompt_logprobs=count)
        scored = replace(RESULT, scores=Scores(1, [-0.5, -0.25], [7, 1], top))
        [first, *others] = prompt.record_fields(scored, RENDERER)["prompt_logprobs"]
        told = [{name: (one["logprob"], one["rank"]) for name, one in entries.items()} for entries in others]
        assert first is None and told == expected
        assert others[0]["1"]["decoded_token"] == "Hi"
        assert (
            prompt.record_fields(RESULT, RENDERER)
            == PromptFields(prompt.token_ids).record_fields(scored, RENDERER)
            == {}
        )


def test_what_ended_the_answer_is_cut_off() -> None:
    """Catches a stop text that stays, or goes though it is to be kept, and log-probabilities of tokens beyond it."""
    for reason, keeps, text, count in [
        ("i", False, "H", 1),
        ("i", True, "Hi", 1),
        ("\u00e9", False, "Hi ", 2),
        (2, False, "Hi", 1),
        (2, True, "Hi \u00e9", 2),
    ]:
        num_tokens = 1 if reason == "i" else 2
        result = replace(RESULT, token_ids=[1, 2][:num_tokens], logprobs=[-0.1, -0.2][:num_tokens], stop_reason=reason)
        ticket = Ticket(0, 1, None, "t", None, completion=True, keeps_stop=keeps)
        record = written(result_record(ticket, result, RENDERER, "m", 0))
        [choice] = record["response"]["body"]["choices"]
        assert (choice["text"], len(choice["logprobs"]["tokens"])) == (text, count)
        assert (
            record["apcbatch"]["stop_reason"] == reason
            and record["apcbatch"]["completion_token_ids"] == result.token_ids
        )


def test_an_error_names_its_own_line_first() -> None:
    """Catches an error without its line, and a request that is called by nothing."""
    ticket = Ticket(3, 7, None, None, None)
    found = [written(error_record(ticket, RequestError("internal", "broke", line)))["error"] for line in (None, 12)]
    assert [error["line"] for error in found] == [7, 12]
    assert found[0]["code"] == "internal" and found[0]["retryable"] is RequestError("internal", "").retryable
    assert (ticket.shown, ticket.request_id, Ticket(3, 7, 1, "c#1", "c").shown) == ("line-7", "apc-000003", "c#1")


TOKENS = ["apcbatch", "completion_token_ids"]


def _set(place: Any, *keys: Any, value: Any) -> None:
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value


def test_only_a_whole_answer_is_read_back() -> None:
    """Fault: a record that nobody can have written counts as an answer, and --resume leaves its request out, feeds what
    is no token id back into a rollout, or ends in a KeyError."""
    for keys, value, is_read in [
        (["line"], 1, True),
        (["line"], 0, False),
        (["line"], 2**63 - 1, True),
        (["line"], 2**63, False),
        (["line"], None, False),
        (["turn"], 1, True),
        (["turn"], 0, False),
        (["id"], 5, False),
        (["id"], None, False),
        (["custom_id"], None, True),
        (["custom_id"], 5, False),
        (["apcbatch"], None, False),
        (["response"], {}, False),
        (["response", "body", "choices"], [], False),
        (["response", "body", "choices", 0, "finish_reason"], None, False),
        (["apcbatch", "stop_reason"], 1.5, False),
        (["apcbatch", "finish_reason"], 5, False),
        (["apcbatch", "completion_token_ids"], "3", False),
        *((TOKENS, [3, one, 4], True) for one in (0, 2**31 - 1)),
        *((TOKENS, [3, one, 4], False) for one in (2**31, -1, 1.0, True, "1", None)),
        (["error"], {"code": "internal", "message": "", "retryable": True}, False),
        (["apcbatch", "stop_reason"], "x", True),
        (["apcbatch", "stop_reason"], 5, True),
        (["apcbatch", "choices"], [{"completion_token_ids": [1]}], True),
        (["apcbatch", "choices"], {}, False),
        (["apcbatch", "choices"], [{"completion_token_ids": [1]}, 5], False),
        (["apcbatch", "choices"], [{}], False),
        (["apcbatch", "choices"], [{"completion_token_ids": [1]}, {"completion_token_ids": [-1]}], False),
    ]:
        record = written(result_record(Ticket(1, 1, None, "c", None), RESULT, RENDERER, "m", 0))
        _set(record, *keys, value=value)
        assert read_record(json.dumps(record).encode()) == (record if is_read else None)
    for missing in ["id", "custom_id", "line", "turn", "response", "error", "apcbatch"]:
        record = written(result_record(Ticket(1, 1, None, "c", None), RESULT, RENDERER, "m", 0))
        del record[missing]
        assert read_record(json.dumps(record).encode()) is None


def test_only_a_whole_error_is_read_back() -> None:
    """Fault: a record that is neither answer nor error counts as an error."""
    for keys, value in [
        (["response"], {}),
        (["error"], 5),
        (["error", "code"], 5),
        (["error", "message"], None),
        (["error", "retryable"], 0),
    ]:
        record = written(error_record(Ticket(1, 1, None, "c", None), RequestError("internal", "broke")))
        assert read_record(json.dumps(record).encode()) == record
        _set(record, *keys, value=value)
        assert read_record(json.dumps(record).encode()) is None


def test_what_ended_an_answer_is_what_the_run_wrote() -> None:
    """Fault: an answer with calls, or that ran into its limit, counts as ended by itself, or one of an older version
    does not."""
    record = written(result_record(Ticket(1, 1, None, "c", None), RESULT, RENDERER, "m", 0))
    for own, body, expected in (("stop", "tool_calls", True), ("length", "stop", False), (None, "stop", True),
                                (None, "length", False), (None, "tool_calls", False)):  # fmt: skip
        record["response"]["body"]["choices"][0]["finish_reason"] = body
        record["apcbatch"].pop("finish_reason", None)
        if own is not None:
            record["apcbatch"]["finish_reason"] = own
        assert is_stopped(record) is expected


def test_each_of_several_answers_has_its_tokens() -> None:
    """Fault: the answers of a request are one, or a single one is listed twice."""
    for count, lists in [(1, [[1, 2]]), (2, [[1, 2], [3]])]:
        answers = [replace(RESULT, token_ids=ids, logprobs=None, stop_reason=None) for ids in lists]
        made = replace(answers[0], others=answers[1:])
        record = written(result_record(Ticket(1, 1, None, "c", None), made, RENDERER, "m", 0))
        assert answers_of(record) == lists and ("choices" in record["apcbatch"]) == (count > 1)
        body = record["response"]["body"]
        assert [choice["index"] for choice in body["choices"]] == list(range(count))
        assert body["usage"]["completion_tokens"] == sum(map(len, lists))


def test_calls_of_several_answers_have_ids_of_their_own() -> None:
    """Fault: two choices of one request have calls of the same id."""
    tools = OutputParser(tool_parser=tool_parsers()["hermes"])
    texts = {1: '<tool_call>{"name": "f"}</tool_call>'}
    renderer: Any = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: "".join(texts[one] for one in ids)))
    one = replace(RESULT, token_ids=[1], logprobs=None)
    record = written(result_record(Ticket(0, 1, 1, "c", "c"), replace(one, others=[one]), renderer, "m", 0, tools))
    choices = record["response"]["body"]["choices"]
    assert [call["id"] for choice in choices for call in choice["message"]["tool_calls"]] == ["call_1_1", "call_1_1_1"]
