"""`LLM`: the same answers as `apcbatch run`, with names on their parts, and errors where programs expect them."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from apcbatch import LLM, Answer
from apcbatch.answer import answer_of
from apcbatch.cli.program import main
from apcbatch.errors import ModelError, RequestError, UsageError
from tests.chats import conversation, read_records, write_lines
from tests.effort import table

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = [json.loads(line) for line in (ROOT / "examples" / "agents.jsonl").read_text().splitlines()]
USER = {"role": "user", "content": "Where is my order A-7?"}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", max_tokens=6) as made:
        yield made


def lasting(record: dict[str, Any]) -> dict[str, Any]:
    """A record without times and without what depends on what ran before it."""
    kept = json.loads(json.dumps(record))
    for name in ("cached_from", "cached_tokens", "computed_tokens", "ideal_cached_tokens", "boundary", "miss_reason",
                 "prefill_ms", "decode_ms", "begin_s", "end_s", "drafted_tokens", "accepted_tokens"):  # fmt: skip
        kept["apcbatch"].pop(name, None)
    if kept["response"]:
        del kept["response"]["body"]["created"], kept["response"]["body"]["usage"]["prompt_tokens_details"]
    return kept


def batch_line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def varied_lines() -> list[Any]:
    """Lines of every format, with settings, and lines that fail."""
    long = next(one for one in EXAMPLES if one["id"].startswith("search"))
    return [
        conversation(1),
        conversation(2, turns=3) | {"temperature": 1.2, "seed": 4, "logprobs": True},
        {"id": "s", "conversations": [{"from": "human", "value": "Hi"}], "max_tokens": 3},
        batch_line("b", "/v1/chat/completions", messages=[USER], tools=long["tools"], temperature=0.9),
        batch_line("p", "/v1/completions", prompt="Once upon", logprobs=1, max_tokens=5),
        batch_line("i", "/v1/completions", prompt=[5, 6, 7], max_tokens=2),
        conversation(2),
        {"messages": []},
        batch_line("t", "/v1/chat/completions", messages=[USER], temprature=0.9),
        long,
    ]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("turns", ["last", "each", "rollout"])
def test_the_answers_are_those_of_the_command(turns: Any, llm: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    """Fault: a second way of making prompts, settings or answers, which parts from the command line's."""
    monkeypatch.chdir(tmp_path)
    lines = varied_lines()
    write_lines(tmp_path / "in.jsonl", lines)
    main(["run", "in.jsonl", "--turns", turns, "--max-tokens", "6", "--device", "cpu", "-q"])
    by_command = {one["id"]: lasting(one) for one in read_records(tmp_path / "in.answers.jsonl")}
    by_program = {one.record["id"]: lasting(one.record) for one in llm.run(lines, turns=turns)}
    assert by_program.keys() == by_command.keys() and len(by_command) >= len(lines)
    for name, record in by_command.items():  # digests tell lines apart that are spelt differently
        for one in (record, by_program[name]):
            one["apcbatch"].pop("line_digest")
        assert by_program[name] == record


def test_live_episodes_are_those_of_the_command(llm: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    """Fault: a second loop for programs, which parts from the command line's; a factory that workers cannot import."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools_of_llm.py").write_text(
        "class Asks:\n    def __init__(self, row):\n        self.more = row['more']\n"
        "    def call(self, name, arguments):\n        return 'x'\n"
        "    def next(self, messages):\n"
        "        return {'role': 'user', 'content': 'More?'} if len(messages) < self.more else None\n"
    )
    lines = [{"id": f"a{more}", "messages": [USER], "more": more} for more in range(5)] + [conversation(1)]
    write_lines(tmp_path / "in.jsonl", lines)
    options = ("--turns", "live", "--tools", "tools_of_llm:Asks")
    assert main(["run", "in.jsonl", *options, "--max-tokens", "6", "--device", "cpu", "-q"]) == 3
    by_command = {one["id"]: lasting(one) for one in read_records(tmp_path / "in.answers.jsonl")}
    by_program = {one.record["id"]: lasting(one.record) for one in llm.run(lines, tools="tools_of_llm:Asks")}
    assert len(by_command) > len(lines) and by_program.keys() == by_command.keys()
    for name, record in by_command.items():
        for one in (record, by_program[name]):
            one["apcbatch"].pop("line_digest")
        assert by_program[name] == record
    for tools, words in ((lambda row: None, "define it at the top of a module"), ("tools_of_llm:No", "AttributeError")):
        with pytest.raises(UsageError, match=words):
            list(llm.run(lines, tools=tools))
    with pytest.raises(UsageError, match="give tools=FACTORY"):
        llm.run(lines, turns="live")


def test_one_conversation_is_one_line_of_a_batch_file(llm: LLM, tmp_path: Path, monkeypatch: Any) -> None:
    """Fault: `chat` and `complete` drop a setting, the tools, or the end of the conversation."""
    monkeypatch.chdir(tmp_path)
    tools = EXAMPLES[0]["tools"]
    settings = {"temperature": 1.5, "seed": random.randrange(1 << 32), "max_tokens": 9, "logprobs": True}
    messages = [*conversation(5)["messages"], USER]
    write_lines(tmp_path / "in.jsonl", [
        batch_line("request-1", "/v1/chat/completions", messages=messages, tools=tools, **settings),
    ])  # fmt: skip
    main(["run", "in.jsonl", "--device", "cpu", "-q"])
    [record] = read_records(tmp_path / "in.answers.jsonl")
    answer = llm.chat(messages, tools, **settings)
    assert lasting(answer.record)["response"] == lasting(record)["response"], settings
    assert answer.token_ids == record["apcbatch"]["completion_token_ids"]
    assert 0 < len(answer.logprobs or []) == len(answer.token_ids) <= 9  # fewer if the end of the answer is drawn
    completion = llm.complete("Once upon a time", max_tokens=4, ignore_eos=True)
    assert completion.record["response"]["body"]["object"] == "text_completion"
    assert completion.text and completion.message == {} and len(completion.token_ids) == 4


def test_a_conversation_goes_on_from_its_answer(llm: LLM) -> None:
    """Fault: the state that an answer left is not kept, or is resumed beyond where the tokens are the same; or what is
    resumed from it is not what a cold run gives."""
    reached, seed = 0, random.randrange(1 << 32)
    questions = [one for one in EXAMPLES if not one["id"].startswith("support")]
    random.Random(seed).shuffle(questions)
    with LLM("demo", device="cpu", policy="none") as cold:
        for number, one in enumerate(questions):
            if number >= 8 and reached:
                break
            messages = one["messages"][:2]
            first = llm.chat(messages, one["tools"], max_tokens=100)
            messages = [*messages, first.message, {"role": "user", "content": f"And the others? ({number})"}]
            second = llm.chat(messages, one["tools"], max_tokens=4, logprobs=True)
            held = [*prompt_of(one, 2), *first.token_ids[:-1]]
            prompt = prompt_of(one | {"messages": messages}, 4)
            assert len(prompt) == second.prompt_tokens
            differ = (at for at, pair in enumerate(zip(held, prompt, strict=False)) if pair[0] != pair[1])
            shared = next(differ, min(len(held), len(prompt) - 1))
            assert second.cached_tokens >= shared // 64 * 64 > 0, f"seed {seed}, {one['id']}: {shared} are shared"
            reached += second.cached_tokens > first.prompt_tokens
            again = cold.chat(messages, one["tools"], max_tokens=4, logprobs=True)
            assert (again.token_ids, again.logprobs) == (second.token_ids, second.logprobs)
            assert (again.cached_tokens, again.cached_from) == (0, "none")
    assert reached, f"seed {seed}: in no conversation a state in the answer was resumed from"


def prompt_of(line: dict[str, Any], count: int) -> list[int]:
    """The prompt after `count` messages of a line."""
    from apcbatch.data.chat.render import Renderer
    from apcbatch.data.conversation import Conversation
    from apcbatch.data.input.messages import check_messages
    from apcbatch.model.locate import DEMO_DIR

    made = Conversation("x", 1, check_messages(line["messages"][:count]), line["tools"], "batch", "x")
    return Renderer.load(DEMO_DIR).render(made).prompts[0].token_ids.tolist()


def test_one_bad_conversation_ends_nothing(llm: LLM) -> None:
    """Fault: an exception out of the middle of a batch, or a conversation that comes back as no answer at all."""
    loop: list[Any] = []
    loop.append(loop)
    bad = [{"messages": "no"}, "text", 7, None, {}, [{"role": "user"}], {"messages": [USER], "tools": {"a": object()}},
           loop, {"messages": [USER], "temperature": float("nan")}, [], {"messages": [USER], "max_tokens": 10**400},
           [{"role": "user", "content": "\ud800"}], {"messages": [USER], "stop": object()}]  # fmt: skip
    mixed = [one for pair in itertools.zip_longest(bad, [[USER]] * 4) for one in pair][: len(bad) + 4]
    answers = {answer.line: answer for answer in llm.run(mixed)}
    assert sorted(answers) == list(range(1, len(mixed) + 1))
    for line, one in enumerate(mixed, start=1):
        assert (answers[line].error is None) == (one == [USER]), (one, answers[line].error)
        if answers[line].error is not None:
            assert answers[line].error.code in ("invalid_request", "invalid_json") and answers[line].error.line == line


def test_a_single_conversation_raises_its_error(llm: LLM) -> None:
    """Fault: an empty text for a conversation that was never answered."""
    with pytest.raises(RequestError, match=r'unknown field "temprature"; did you mean temperature\?'):
        llm.chat([USER], temprature=1)
    with pytest.raises(RequestError, match="messages is empty; expected at least one message"):
        llm.chat([])
    with pytest.raises(RequestError, match="the model has the ids 0 to"):
        llm.complete([10**9])
    assert llm.chat([USER]).error is None


def test_what_programs_hold_is_taken(llm: LLM) -> None:
    """Fault: tuples, read-only mappings, arrays and the package's own objects, which programs have, are refused."""
    plain = llm.chat([USER], max_tokens=4)
    reply = ChatCompletionMessage(role="assistant", content="It is on its way.")
    written = {"role": "assistant", "content": "It is on its way."}
    assert llm.chat((MappingProxyType(USER),), max_tokens=4).token_ids == plain.token_ids
    assert llm.chat([USER, reply, USER]).token_ids == llm.chat([USER, written, USER]).token_ids  # type: ignore[list-item]
    with pytest.raises(RequestError, match="cannot be written as JSON: it holds a set"):
        llm.chat([{**USER, "content": {"a"}}])
    ids = [5, 6, 7, 8]
    assert llm.complete(np.array(ids)).token_ids == llm.complete(ids).token_ids  # type: ignore[arg-type]


def test_conversations_are_pulled_as_they_are_wanted(llm: LLM) -> None:
    """Fault: an endless source is read to its end before the first answer, be its lines good or bad."""
    for one in ([USER], {"messages": []}):
        pulled: list[Any] = []

        def endless(one: Any = one, pulled: list[Any] = pulled) -> Iterator[Any]:
            while True:
                pulled.append(one)
                yield one

        lines = [answer.line for answer in itertools.islice(llm.run(endless()), 5)]
        assert len(set(lines)) == 5 and 1 <= min(lines) <= max(lines) <= len(pulled) < 1000
    assert llm.chat([USER]).error is None, "what was left is dropped"


def test_only_one_run_at_a_time(llm: LLM) -> None:
    """Fault: two runs on one engine take each other's answers."""
    first = llm.run([[USER], [USER]])
    next(first)
    with pytest.raises(UsageError, match="another run of this LLM is not finished"):
        llm.chat([USER])
    first.close()  # type: ignore[attr-defined]
    assert llm.chat([USER]).error is None


@table("options, sentence", [
    ({"blocksize": 4}, "LLM: blocksize is not an option; did you mean block_size"),
    ({"block_size": 0}, "LLM: block_size is 0; expected"),
    ({"policy": "some"}, "LLM: policy is 'some'; expected one of"),
    ({"draft": "lookup,histroy"}, "LLM: draft has 'histroy'; .*; did you mean history"),
    ({"draft": "none", "draft_from": "old.jsonl"}, "LLM: draft_from is a source of drafts, and LLM: draft none takes"),
    ({"overwrite": True}, "LLM: overwrite is no option of an LLM: it is of the command line alone; leave it out"),
    ({"format": "batch"}, "LLM: format is no option of an LLM: each conversation says by its keys what it is"),
    ({"turns": "each"}, "LLM: turns is no option of an LLM: give it to `run`"),
    ({"ray": "local"}, "LLM: ray is no option of an LLM: an LLM computes in this process"),
    ({"shard": "1/2"}, "LLM: shard is no option of an LLM: it divides the INPUT of `apcbatch run`"),
    ({"workers": 2}, "LLM: workers is no option of an LLM: an LLM computes in this process"),
    ({"temperature": 3}, "LLM: temperature is 3; expected a number from 0 up to 2"),
    ({"store": 3}, "LLM: store is 3"),
])  # fmt: skip
def test_a_bad_option_is_refused_before_anything_is_loaded(options: dict[str, Any], sentence: str) -> None:
    """Fault: an option that does nothing is taken in silence."""
    with pytest.raises(UsageError, match=sentence):
        LLM("no/such-model", **options)


def test_a_stop_token_that_the_model_does_not_have_is_refused(monkeypatch: Any) -> None:
    """Fault: every request is an error record, after the weights were read."""
    monkeypatch.setattr("apcbatch.llm.make_engine", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(UsageError, match="stop_token_id is 4096; the model demo has the token ids 0 to 4095"):
        LLM("demo", stop_token_id=[3, 4096])


def test_a_model_that_is_not_there_is_an_error() -> None:
    """Fault: something else than the package's own errors."""
    with pytest.raises(ModelError, match="neither a folder nor in the Hugging Face cache"):
        LLM("no/such-model")


def test_a_closed_one_says_so(tmp_path: Path) -> None:
    """Fault: an attribute error; or a store that is not finished, so that the next process restores nothing."""
    messages = EXAMPLES[0]["messages"][:2]
    with LLM("demo", device="cpu", store=tmp_path / "states", max_tokens=2) as one:
        assert one.chat(messages).cached_from == "none"
    one.close()
    with pytest.raises(UsageError, match="this LLM is closed"):
        one.chat(messages)
    with LLM("demo", device="cpu", store=str(tmp_path / "states"), max_tokens=2) as other:
        answer = other.chat(messages)
    assert answer.cached_from == "disk" and answer.cached_tokens > 0


def test_warnings_are_told_as_python_does(tmp_path: Path, recwarn: pytest.WarningsRecorder, llm: LLM) -> None:
    """Fault: another model's name, a column that takes no part, or drafts that fit no request, is passed over in
    silence."""
    told: list[str] = []
    drafts = write_lines(tmp_path / "other.jsonl", [{"custom_id": "elsewhere#1", "apcbatch": {"text": "x"}}])
    with LLM("demo", device="cpu", max_tokens=1, warn=told.append, draft_from=drafts) as one:
        list(one.run([{"messages": [USER], "model": "gpt-9", "reward": 1}]))
    assert "so that no draft was made from them" in told.pop()
    assert any("gpt-9" in sentence for sentence in told) and any("reward" in sentence for sentence in told)
    list(llm.run([{"messages": [USER], "model": "gpt-9", "reward": 1}]))
    assert {sentence.replace("line 1: ", "") for sentence in told} <= {
        str(one.message).replace("line 1: ", "") for one in recwarn.list
    }


def test_the_parts_are_those_of_the_record() -> None:
    """Fault: calls, their message, or the log-probabilities are not where programs look for them."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"order": "A-7"}'}}
    message = {
        "role": "assistant",
        "content": "Wait.",
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": [call],
    }
    logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}], "refusal": None}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": message, "logprobs": logprobs}
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    record = {
        "custom_id": "c#1", "line": 4, "turn": 1, "error": None,
        "response": {"body": {"choices": [choice], "usage": usage}},
        "apcbatch": {"completion_token_ids": [7], "cached_tokens": 8, "cached_from": "memory", "miss_reason": None,
                     "warnings": ["w"]},
    }  # fmt: skip
    answer = answer_of(record)
    assert answer == Answer(
        "c#1", 4, 1, "Wait.", "Hm.", [call],
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": [call]}, "tool_calls",
        [7], [-0.5], 9, 8, "memory", None, ["w"], record=record,
    )  # fmt: skip


def test_every_body_is_read_by_the_package(llm: LLM) -> None:
    """Fault: a record that only looks like one."""
    for answer in llm.run([[USER], conversation(4)]):
        read = ChatCompletion.model_validate_json(json.dumps(answer.record["response"]["body"]), strict=True)
        assert read.choices[0].message.content == answer.text


@table(
    "call",
    [
        lambda llm: llm.chat("hi"),
        lambda llm: llm.chat(USER),
        lambda llm: llm.chat([USER], tools={"name": "f"}),
        lambda llm: llm.run({"messages": [USER]}),
        lambda llm: llm.run(b"in.jsonl"),
    ],
)
def test_a_text_or_a_mapping_in_place_of_a_list_is_a_type_error(llm: LLM, call: Any) -> None:
    """Fault: the letters of a text, or the keys of a mapping, are taken for messages or conversations."""
    with pytest.raises(TypeError, match="is a (str|dict|bytes); expected a list"):
        call(llm)


def test_a_file_is_run_with_a_bar_in_notebooks(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: the letters of a file's name are conversations; a notebook shows nothing for hours."""
    path = write_lines(tmp_path / "in.jsonl", [{"id": "a", "messages": [USER]}, {"id": "b", "messages": []}])
    assert {one.custom_id: one.error is None for one in llm.run(path)} == {"a#1": True, "b#1": False}
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    assert len(list(llm.run(str(path)))) == 2
    assert "2/2" in capsys.readouterr().err
    with pytest.raises(UsageError, match="missing.jsonl"):
        llm.run("missing.jsonl")


def test_an_llm_shows_what_it_is() -> None:
    """Fault: `<apcbatch.llm.LLM object at 0x7f...>`."""
    with LLM("demo", device="cpu", dtype="float32") as made:
        assert repr(made) == "LLM('demo', dtype='float32', device='cpu', store=None)"
    assert repr(made) == "LLM('demo', closed)"
