"""tools/conversations: what the generated conversations promise, whatever the seed."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from jinja2 import Environment
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from conversations import DOMAINS, WEIGHTS, conversation, conversations  # noqa: E402
from conversations.coding.example_projects import PACKAGES, Case, namespace, written  # noqa: E402
from conversations.incidents.systems import SYSTEMS  # noqa: E402
from conversations.words import say  # noqa: E402
from examples_text.coding import TASKS  # noqa: E402
from examples_text.coding_task import Repository  # noqa: E402
from examples_text.script import Script  # noqa: E402
from examples_text.search_incident import INCIDENTS  # noqa: E402

EXAMPLES = ROOT / "examples" / "agents.jsonl"
DEMO = ROOT / "apcbatch" / "demo"
EACH = 60  # conversations of each domain
QUOTES_CODE = {"coding", "data"}  # what is said there may hold braces, bars and ellipses
MOST_MESSAGES = 22
MOST_TOKENS = 6000
MOST_ANSWER_TOKENS = 120


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Script]]:
    """Conversations of each domain, of a seed that no other run has."""
    seed = str(time.time_ns())
    return {domain: list(islice(conversations(f"{domain}-{seed}", [domain]), EACH)) for domain in DOMAINS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The bundled model's."""
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def render() -> Any:
    """The bundled model's template as a function."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string((DEMO / "chat_template.jinja").read_text(encoding="utf-8"))

    def text(record: dict[str, Any], messages: int, prompt: bool) -> str:
        """The first messages of a record, with the start of an answer or without."""
        said = record["messages"][:messages]
        return template.render(messages=said, tools=record["tools"], bos_token="<|bos|>", add_generation_prompt=prompt)

    return text


def answers(script: Script) -> list[dict[str, Any]]:
    """What the assistant says and calls."""
    return [message for message in script.messages if message["role"] == "assistant"]


def calls(script: Script) -> list[dict[str, Any]]:
    """Every call of a conversation."""
    return [call["function"] for message in answers(script) for call in message.get("tool_calls", [])]


def test_a_conversation_depends_on_its_seed_and_index_alone():
    """A draw from a shared stream, or from the order of a set, which differs from process to process."""
    first = [script.record() for script in islice(conversations("one"), 60)]
    assert first == [conversation("one", index).record() for index in range(60)]
    assert conversation("one", 59).record() == first[59]
    assert json.dumps(first[7]) != json.dumps(conversation("two", 7).record())


def test_every_domain_is_drawn_as_often_as_its_weight_says():
    """A domain without a weight, or one that is never reached."""
    assert set(DOMAINS) == set(WEIGHTS) and min(WEIGHTS.values()) > 0
    counts = Counter(script.name.partition("-")[0] for script in islice(conversations("weights"), 2000))
    total = sum(WEIGHTS.values())
    for domain, weight in WEIGHTS.items():
        expected = 2000 * weight / total
        assert abs(counts[domain] - expected) < 5 * expected**0.5, counts


def test_an_unknown_domain_is_refused():
    """A misspelt name that draws from all domains in silence."""
    with pytest.raises(KeyError):
        conversation("seed", 0, ["suport"])


@pytest.mark.parametrize("domain", DOMAINS)
def test_calls_fit_their_schemas(domain, drawn):
    """A renamed parameter that the call still has under its old name, a missing one, a wrong type."""
    for script in drawn[domain]:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in script.tools}
        assert len(schemas) == len(script.tools), script.name
        for schema in schemas.values():
            jsonschema.Draft202012Validator.check_schema(schema)
        for called in calls(script):
            arguments = json.loads(called["arguments"])
            jsonschema.validate(arguments, schemas[called["name"]])
            assert set(arguments) <= set(schemas[called["name"]]["properties"]), script.name


@pytest.mark.parametrize("domain", DOMAINS)
def test_messages_follow_each_other(domain, drawn):
    """A result without its call, two answers in a row, empty text, an end that is no answer."""
    for script in drawn[domain]:
        waiting: list[str] = []
        before = ""
        for index, message in enumerate(script.messages):
            role = message["role"]
            assert role in ("system", "user", "assistant", "tool") and (role != "system" or index == 0)
            if role == "tool":
                assert message["tool_call_id"] == waiting.pop(0), script.name
            else:
                assert not waiting and (role, before) != ("assistant", "assistant"), script.name
                assert (role, before) != ("user", "user"), script.name
                waiting = [call["id"] for call in message.get("tool_calls", [])]
                assert message["content"] or waiting, script.name
            before = role
        assert before == "assistant" and not waiting, script.name
        assert 2 <= len(script.messages) <= MOST_MESSAGES, script.name


@pytest.mark.parametrize("domain", sorted(set(DOMAINS) - QUOTES_CODE))
def test_no_field_is_left_in_a_text(domain, drawn):
    """A {name} that was not filled in, an [alternative|of a phrase], two spaces, a None that is said."""
    for script in drawn[domain]:
        for message in script.messages:
            if message["role"] in ("user", "assistant"):
                text = message["content"] or "-"
                assert not any(mark in text for mark in ("  ", " .", "..", " None", "{", "}", "|")), (script.name, text)


@pytest.mark.parametrize("domain", DOMAINS)
def test_lengths_are_bounded(domain, drawn, tokenizer, render):
    """A conversation that no training sequence takes, or an answer that does not end within 128 tokens."""
    for script in drawn[domain]:
        record = script.record()
        whole = tokenizer.encode(render(record, len(script.messages), False), add_special_tokens=False).ids
        assert len(whole) <= MOST_TOKENS, script.name
        ends = [index for index, token in enumerate(whole) if token == tokenizer.token_to_id("<|end|>")]
        starts = [index for index, token in enumerate(whole) if token == tokenizer.token_to_id("<|assistant|>")]
        assert len(starts) == len(answers(script)), script.name
        for start in starts:
            length = next(end for end in ends if end > start) - start
            assert length <= MOST_ANSWER_TOKENS, (script.name, tokenizer.decode(whole[start : start + length]))


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts_are_prefixes(domain, drawn, tokenizer, render):
    """A text that the template or the tokenizer changes when more is said after it."""
    for script in drawn[domain][:8]:
        record = script.record()
        whole = render(record, len(script.messages), False)
        ids = tokenizer.encode(whole, add_special_tokens=False).ids
        for index, message in enumerate(script.messages):
            if message["role"] == "assistant" and index:
                prompt = render(record, index, True)
                assert whole.startswith(prompt)
                begun = tokenizer.encode(prompt, add_special_tokens=False).ids
                assert ids[: len(begun)] == begun


def test_no_example_is_among_them(drawn):
    """Training on what is evaluated: a conversation of the examples, or a user with the same name and words."""
    held_out = {
        json.dumps(record["messages"][1:6])
        for record in map(json.loads, EXAMPLES.read_text(encoding="utf-8").splitlines())
    }
    for scripts in drawn.values():
        for script in scripts:
            assert json.dumps(script.messages[1:6]) not in held_out


def test_no_incident_of_the_examples_is_told():
    """Training on what is evaluated: an alert, a hypothesis, a finding or a summary of the examples' incidents."""
    held_out = set()
    for incident in INCIDENTS:
        held_out |= {incident.alert, incident.summary, *incident.others}
        for one in incident.hypotheses:
            held_out |= {one.title, one.expect, one.ruled_out, one.finding, *(look.finding for look in one.looks)}
    for script in islice(conversations("train", ["incidents"]), 400):
        said = "\n".join(message["content"] or "" for message in script.messages[1:])
        assert not [text for text in held_out if text in said], script.name


def test_incidents_happen_in_the_systems_of_the_examples():
    """A system or a fault that is never drawn, or drawn so often that the model learns it by heart."""
    scripts = list(islice(conversations("train", ["incidents"]), 400))
    told = ["".join(message["content"] or "" for message in script.messages) for script in scripts]
    begins = [incident.platform.partition(";")[0].partition(" (")[0] for incident in INCIDENTS]
    assert 0.3 * len(told) < sum(any(begin in text for begin in begins) for text in told) < 0.5 * len(told)
    for system in SYSTEMS:
        assert len(system.troubles) >= 5
        for trouble in system.troubles:
            assert system.warnings[trouble.part], "a second look reads the warnings"
            assert any(trouble.measure.name in text for text in told), trouble.title


def test_coding_works_in_the_projects_of_the_examples_but_not_on_their_tasks():
    """Training on a held-out task: what its user writes, or what its edits put in; or a project that is never drawn."""
    asked = {task.ask for task in TASKS} | {task.follow[0] for task in TASKS if task.follow}
    followed = [edit for task in TASKS if task.follow for edit in task.follow[1]]
    attempts = [task.wrong[0] for task in TASKS if task.wrong]
    made = {edit.new for task in TASKS for edit in (task.test, *task.fix)} | {edit.new for edit in followed + attempts}
    projects: Counter[str] = Counter()
    for script in islice(conversations("train", ["coding"]), 300):
        assert asked.isdisjoint(message["content"] for message in script.messages if message["role"] == "user")
        for called in calls(script):
            arguments = json.loads(called["arguments"])
            edits = arguments.get("edits", [{"new": arguments.get("content")}])
            assert made.isdisjoint(edit["new"] for edit in edits), script.name
        listed = str(script.messages)
        projects.update(name for name in PACKAGES if f"{name}/__init__.py" in listed)
    assert set(projects) == set(PACKAGES) and 90 < projects.total() < 210, projects


@pytest.mark.parametrize("package", PACKAGES)
def test_a_mistake_is_one_that_no_test_shows_yet(package):
    """A mistake that the tests of the project show already, one whose new test passes, or a repair that is none."""
    for index, mistake in enumerate(PACKAGES[package].mistakes):
        case = Case(Random(index), package, mistake)
        files = Repository.read(package).files
        for text, fails in ((case.text, True), (case.mended, False)):
            scope = namespace(package, case.path, text)
            scope["pytest"] = pytest
            for name in [name for name in scope if name.startswith("test_") and name != case.test]:
                scope[name]()
            exec(case.body, scope)
            with pytest.raises(Exception) if fails else nullcontext():  # noqa: B017, PT011
                scope.pop(case.test)()
        checkout = Repository({**files, case.path: case.text})
        checkout.apply(written(checkout, case))
        assert f"1 failed, {len(checkout.tests()) - 1} passed" in checkout.run_tests((case.seen[1],), 5)
        checkout.apply(case.fix)
        assert checkout.files[case.path] == case.mended


@pytest.mark.parametrize("domain", DOMAINS)
def test_they_are_distinct(domain, drawn):
    """A domain that says the same again and again."""
    scripts = drawn[domain]
    assert len({json.dumps(script.messages[:6]) for script in scripts}) >= 0.9 * EACH
    said = [message["content"] for script in scripts for message in answers(script) if message["content"]]
    assert len(set(said)) >= 0.4 * len(said), f"{len(set(said))} of {len(said)} answers are distinct"


def test_alternatives_are_drawn_from_the_innermost_out():
    """A nested choice, an empty one, and brackets that are none."""
    texts = {say(Random(index), ("[a|b[c|d]]{x}[upload-1][|!]",), x=5) for index in range(200)}
    assert texts == {f"{first}5[upload-1]{last}" for first in ("a", "bc", "bd") for last in ("", "!")}
