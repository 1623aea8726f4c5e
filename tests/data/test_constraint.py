"""Structures compiled against tokenizers of every kind: what may come is what the structure says, and nothing hostile
costs more than its bounds."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from tokenizers import decoders

from apcbatch.data.conversation import BadLine
from apcbatch.data.grammar import constraint as constraint_module
from apcbatch.data.grammar.constraint import GrammarCompiler, GrammarConstraint
from apcbatch.data.grammar.grammar_child import _Bytes
from apcbatch.data.grammar.llguidance import Thinking, is_finite
from apcbatch.data.grammar.structured_output import StructuredOutput, check_structured_output
from apcbatch.data.helper import Helper
from apcbatch.data.input.records import parse_line
from apcbatch.data.output.tool_parser import CallSyntax
from apcbatch.data.output.tool_parsers import tool_parsers
from apcbatch.data.tokenization.tokenizer import Tokenizer, load_tokenizer
from apcbatch.errors import RequestError
from tests.data.conftest import KINDS, build_tokenizer, save_model
from tests.data.family_tokenizers import FAMILY_TOKENIZERS, save_family_tokenizer
from tests.effort import table
from tests.fuzz.mutate import number_text
from tests.schemas import random_schema

DEMO = Path(__file__).resolve().parents[2] / "apcbatch" / "demo"
HERMES = CallSyntax(
    "<tool_call>\n", '{"name": "', '", "arguments": ', "}", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"
)
JAMBA = CallSyntax("<tool_calls>[\n    ", '{"name": "', '", "arguments": ', "}", ",\n    ", "\n]</tool_calls>")


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def constraints(demo: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(demo, HERMES)


def allowed(tokenizer: Tokenizer, constraint: object) -> np.ndarray:
    """The ids that may come next."""
    mask = np.full(-(-tokenizer.vocab_size // 32), -1, np.int32)
    assert constraint.fill(mask)  # type: ignore[attr-defined]
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=tokenizer.vocab_size, bitorder="little"))


def walk(tokenizer: Tokenizer, constraint: object, source: random.Random, most: int = 600) -> tuple[str, bool]:
    """A random answer, and whether it ended. A stop token ends it as soon as one may come, half of the times."""
    ids: list[int] = []
    while len(ids) < most:
        may_come = allowed(tokenizer, constraint)
        assert len(may_come), "a form that is not complete lets nothing come"
        ends = [token for token in tokenizer.eos_token_ids if token in may_come]
        token = source.choice(ends) if ends and source.random() < 0.5 else int(source.choice(may_come))
        complete = constraint.accept(token)  # type: ignore[attr-defined]
        if token in tokenizer.eos_token_ids:
            return tokenizer.decode(ids), True
        ids.append(token)
        if complete:
            return tokenizer.decode(ids), True
    return tokenizer.decode(ids), False


def test_random_answers_to_random_schemas_are_valid(demo, constraints):
    """Fault: a token that breaks the JSON, or a value that the schema forbids."""
    seed = random.randrange(1 << 30)
    source, ended = random.Random(seed), 0
    for _ in range(60):
        schema = random_schema(source)
        structure = check_structured_output({"structured_outputs": {"json": schema}}, None)
        text, is_whole = walk(demo, constraints.constraint(structure), source)
        if is_whole:
            ended += 1
            jsonschema.validate(json.loads(text), schema)
    assert ended > 40, f"seed {seed}"


def test_forced_tokens_are_allowed_and_asking_changes_nothing(demo, constraints):
    """Fault: a mask, or an end, that depends on whether the forced tokens were asked for; or one that is not allowed
    itself, so that drafting it costs a row for nothing."""
    seed = random.randrange(1 << 30)
    source, num_forced, number = random.Random(seed), 0, 0
    while num_forced <= 100:
        number += 1
        assert number < 600, f"seed {seed}"
        json_form = {"json": random_schema(source), "disable_any_whitespace": number % 2 == 0}
        forms = (json_form, json_form, {"regex": "(yes, of course|no){1,9}"}, {"choice": ["it is late", "it is lost"]})
        structure = check_structured_output({"structured_outputs": source.choice(forms)}, None)
        asked, plain = constraints.constraint(structure), constraints.constraint(structure)
        for _ in range(200):
            forced = [asked.forced() for _ in range(source.randrange(3))]
            may_come = allowed(demo, plain)
            assert np.array_equal(allowed(demo, asked), may_come), f"seed {seed}"
            asked.forced()
            token = int(source.choice(may_come))
            if forced and forced[0]:
                num_forced += 1
                token = forced[0][0]
                assert token in may_come and forced[0] == forced[-1], f"seed {seed}"
            complete = plain.accept(token)
            assert asked.accept(token) == complete, f"seed {seed}"
            if complete or token in demo.eos_token_ids:
                break


def test_nothing_is_forced_at_the_end_or_after_an_error(demo, constraints):
    """Fault: forced tokens behind the last one; an exception of the library that ends the pass, not one request."""
    ids = demo.source.backend_tokenizer.encode("it", add_special_tokens=False).ids
    complete = constraints.constraint(StructuredOutput("choice", '["it"]'))
    assert [complete.accept(token) for token in ids] == [False] * (len(ids) - 1) + [True]
    assert complete.forced() == []
    may_end = constraints.constraint(StructuredOutput("choice", '["it", "it is late"]'))
    assert not any(may_end.accept(token) for token in ids)
    assert may_end.forced() == []
    broken = constraints.constraint(StructuredOutput("choice", '["it"]'))
    with pytest.raises(RequestError):
        broken.accept(demo.vocab_size - 1)
    assert broken.forced() == []


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_of_every_kind(kind: str, model_dir: Callable[..., Path]):
    """Fault: a kind of tokenizer whose tokens are taken for other texts, so that the answer is not of the form; or one
    that is refused without a sentence."""
    tokenizer = load_tokenizer(model_dir(kind))
    made = GrammarCompiler(tokenizer)
    schema = {"type": "object", "properties": {"a": {"enum": ["x y", "é"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    source = random.Random(kind)
    if kind == "unigram":  # whose decoder the library does not know when it stands alone
        with pytest.raises(RequestError, match="cannot be made with this model's tokenizer: can't determine decoder"):
            made.constraint(StructuredOutput("json", json.dumps(schema)))
        return
    for _ in range(6):
        text, is_whole = walk(tokenizer, made.constraint(StructuredOutput("json", json.dumps(schema))), source)
        assert is_whole
        jsonschema.validate(json.loads(text), schema)
    text, is_whole = walk(tokenizer, made.constraint(StructuredOutput("regex", "[ab]{3}")), source)
    assert is_whole and re.fullmatch("[ab]{3}", text.strip())


SCHEMA = {"type": "object", "required": ["status", "größe"], "additionalProperties": False, "properties": {
    "status": {"enum": ["open now", "closed\nfor now"]}, "größe": {"const": "東京, it's cafe\u0301 🦔 "}}}  # fmt: skip
FORCED = [
    StructuredOutput("json", json.dumps(SCHEMA)),
    StructuredOutput("regex", "order number [0-9]{2}\n\n  in the city"),
    StructuredOutput("choice", '["the city of value", "the list of value"]'),
    StructuredOutput("calls", json.dumps([["get weather", SCHEMA]]), one_call=True),
]


@pytest.mark.drawn(5)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_TOKENIZERS)
def test_forced_texts_with_the_tokenizers_of_families(family: str, tmp_path: Path) -> None:
    """Fault: with a family's pattern or normalizer, a forced text with a blank, a line end, a letter beyond ASCII or a
    letter of two characters is an error, and an enum keeps only its one-word values."""
    tokenizer = load_tokenizer(save_family_tokenizer(tmp_path, family))
    made, source = GrammarCompiler(tokenizer, HERMES), random.Random(family)
    for structure in FORCED:
        texts = {walk(tokenizer, made.constraint(structure), source) for _ in range(5)}
        assert all(is_whole for _, is_whole in texts)
        for text in (one.lstrip(" ") for one, _ in texts):
            if structure.kind == "json":
                jsonschema.validate(json.loads(text), SCHEMA)
            elif structure.kind == "calls":
                call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
                jsonschema.validate(call["arguments"], SCHEMA)
            else:
                assert re.fullmatch(structure.text if structure.kind == "regex" else "the (city|list) of value", text)


@table("decoder, reason", [
    (decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]), "token [0-9]+, twice, is '▁"),
    (decoders.Sequence([decoders.Replace("▁", "_"), decoders.ByteFallback(), decoders.Fuse()]), "token [0-9]+, twice"),
])  # fmt: skip
def test_a_tokenizer_that_the_library_reads_otherwise_is_refused(
    decoder: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: answers break their pattern in silence, as a token is another text to the library than in the answer; or
    the library's form of a tokenizer is made again for each request."""
    backend = build_tokenizer("metaspace")
    backend.decoder = decoder
    made = GrammarCompiler(load_tokenizer(save_model(tmp_path, backend)))
    for pattern in ("a", "b"):
        with pytest.raises(RequestError, match=f"cannot be made with this model's tokenizer: {reason}") as caught:
            made.constraint(StructuredOutput("regex", pattern))
        assert caught.value.code == "invalid_request" and len(caught.value.message) < 400
        monkeypatch.setattr(llguidance, "LLTokenizer", None)


def test_a_blank_that_the_decoder_drops_begins_no_answer(tmp_path: Path) -> None:
    """Fault: an answer lacks the blank that its pattern begins with, since the decoder drops it, in silence."""
    backend = build_tokenizer("legacy")
    backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])
    tokenizer = load_tokenizer(save_model(tmp_path, backend, eos_token="</s>"))
    made = GrammarCompiler(tokenizer)
    for seed in range(12):
        text, is_whole = walk(
            tokenizer, made.constraint(StructuredOutput("regex", "[ a-z]{5}!| (a|b) c")), random.Random(seed)
        )
        assert is_whole and re.fullmatch("[ a-z]{5}!", text)
    with pytest.raises(RequestError, match="regular expression cannot be used: it begins with a blank, which this mod"):
        allowed(tokenizer, made.constraint(StructuredOutput("regex", " a|  b")))


@table("is_open", [True, False])
def test_a_thought_comes_before_the_form(demo, constraints, is_open):
    """Fault: an answer that ends within its thought, a form that is asked of the thought, or a thought that has to come
    where none was begun."""
    thinking = Thinking(("<think>",), ("</think>",), is_open)
    structure = StructuredOutput("regex", "[ab]{3}")
    made = constraints.constraint(structure, thinking)
    for token in demo.encode_continuation(("" if is_open else "<think>") + "is it a, or b?</think>\n"):
        may_come = allowed(demo, made)
        assert token in may_come and not set(demo.eos_token_ids) & set(may_come.tolist())
        assert not made.accept(token)
    text, is_whole = walk(demo, made, random.Random(1))
    assert is_whole and re.fullmatch("[ab]{3}", text.strip())
    without = constraints.constraint(structure, thinking)
    complete = [without.accept(token) for token in demo.encode_continuation("aba")][-1]
    assert complete is not is_open


def test_a_thought_may_end_with_a_token_of_its_own(demo: Tokenizer, constraints: GrammarCompiler) -> None:
    """Fault: a marker that is one special token is asked for letter by letter, so that no thought ends."""
    thinking = Thinking(("<think>",), ("</tools>", "</think>"), is_open=True)
    forms = StructuredOutput("regex", "[ab]{3}"), StructuredOutput("grammar", "start: /[ab]{3}/")
    for end, form in zip(("</tools>", "</think>"), forms, strict=True):
        made = constraints.constraint(form, thinking)
        for token in demo.encode(f"is it a?{end}aba").ids:
            assert token in allowed(demo, made)
            complete = made.accept(token)
        assert complete


@table("pattern", [r"[0-9]{3}-[0-9]{4}", r"^(yes|no)$", r"(?i)abc", r"[a-z]{2,5}@x\.org", "é{2}", r"a/b\\c"])
def test_patterns_match_the_whole_answer(demo, constraints, pattern):
    """Fault: a pattern that is looked for somewhere in the answer; an answer that continues behind it."""
    source = random.Random(pattern)
    for _ in range(5):
        text, is_whole = walk(demo, constraints.constraint(StructuredOutput("regex", pattern)), source)
        assert is_whole and re.fullmatch(pattern, text)


@table(
    "given, blanks",
    [
        ({"whitespace_pattern": "  "}, {"  "}),
        ({"disable_any_whitespace": True}, set()),
        ({"whitespace_pattern": "  ", "disable_any_whitespace": True}, set()),
    ],
)
def test_the_blanks_between_the_tokens_of_json(demo, constraints, given, blanks):
    """Fault: blanks that whitespace_pattern excludes, or any blank where disable_any_whitespace excludes all."""
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    structure = check_structured_output({"structured_outputs": {"json": schema, **given}}, None)
    text, is_whole = walk(demo, constraints.constraint(structure), random.Random(1))
    assert is_whole and json.loads(text) == [1, 1] and set(re.findall(r"\s+", text)) == blanks


def test_choices_and_grammars(demo, constraints):
    """Fault: a choice that is cut where another one ends; a grammar of one dialect taken for the other."""
    source = random.Random(1)
    choices = ["yes", "yes, sir", 'a "quoted"\n text', "\\d", "/", "日本"]
    structure = check_structured_output({"guided_choice": choices}, None)
    found = {walk(demo, constraints.constraint(structure), source)[0] for _ in range(120)}
    assert found == set(choices)
    for grammar in ('start: "(" start ")" | "x"', 'root ::= "(" root ")" | "x"'):
        for _ in range(5):
            text, is_whole = walk(demo, constraints.constraint(StructuredOutput("grammar", grammar)), source)
            assert not is_whole or re.fullmatch(r"\(*x\)*", text) and text.count("(") == text.count(")")


def test_the_end_is_offered_where_the_form_is_complete(demo, constraints):
    """Fault: a stop token in the middle of a form, or none at its end."""
    constraint = constraints.constraint(StructuredOutput("regex", "a(b?)"))
    [eos] = demo.eos_token_ids
    assert eos not in allowed(demo, constraint)
    assert not constraint.accept(demo.encode("a").ids[-1])
    assert eos in allowed(demo, constraint)
    assert constraint.accept(eos)


@pytest.mark.parametrize(("syntax", "pattern"), [(HERMES, r"<tool_call>\n(.*?)\n</tool_call>"), (JAMBA, None)])
def test_calls_are_forced_in_the_syntax_of_the_model(demo, syntax, pattern):
    """Fault: a name that is no tool's, arguments outside their schema, markers as letters where they are tokens."""
    made, source = GrammarCompiler(demo, syntax), random.Random(5)
    tools = {f"tool_{number}": {**random_schema(source, kind="object")} for number in range(4)}
    given = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in tools.items()]
    structure = check_structured_output({"tool_choice": "required"}, given)
    ended = 0
    for _ in range(12):
        text, is_whole = walk(demo, made.constraint(structure), source)
        if not is_whole:
            continue
        ended += 1
        if pattern is None:
            assert text.startswith("<tool_calls>[\n") and text.endswith("]</tool_calls>")
            calls = json.loads(text[len("<tool_calls>") : -len("</tool_calls>")])
        else:
            calls = [json.loads(block) for block in re.findall(pattern, text, re.DOTALL)]
        assert calls
        for call in calls:
            jsonschema.validate(call["arguments"], tools[call["name"]])
    assert ended > 3


def test_markers_come_as_their_tokens(demo, constraints):
    """Fault: `<tool_call>` in letters, which the model was not trained on."""
    tools = [{"function": {"name": "f"}}]
    constraint = constraints.constraint(check_structured_output({"tool_choice": "required"}, tools))
    assert allowed(demo, constraint).tolist() == [demo.marker_id("<tool_call>")]


def test_a_name_is_written_in_its_own_letters(demo, constraints):
    """Fault: a tool's name comes in escapes, which the model was not trained on and which its template does not
    write."""
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    structure = StructuredOutput("calls", json.dumps([["caf\u00e9", parameters]]), one_call=True)
    text, is_whole = walk(demo, constraints.constraint(structure), random.Random(1))
    assert is_whole and '"name": "caf\u00e9"' in text


@table(
    "syntax, reason",
    [
        (None, "writes none that are read .see --tool-parser."),
        (CallSyntax("", "<f=", ">", "</f>", "", "", arguments="xml"), "does not write their arguments as JSON"),
    ],
)
def test_calls_that_cannot_be_forced_are_refused(demo, syntax, reason):
    """Fault: a model whose calls are not written in JSON is forced into something that no parser reads."""
    structure = check_structured_output({"tool_choice": "required"}, [{"function": {"name": "f"}}])
    with pytest.raises(RequestError, match=f"the model {reason}, so none can be forced"):
        GrammarCompiler(demo, syntax).constraint(structure)


REFUSED = [
    (
        StructuredOutput("json", '{"uniqueItems":true}'),
        'the JSON schema cannot be used: Unimplemented keys: ["uniqueItems"]',
    ),
    (StructuredOutput("json", '{"not":{"const":1}}'), "Unimplemented keys"),
    (StructuredOutput("json", '{"$ref":"https://x.org/s.json"}'), "the JSON schema cannot be used"),
    (StructuredOutput("json", "false"), "false"),
    (StructuredOutput("json", '{"type":"strnig"}'), "strnig"),
    (StructuredOutput("regex", "a(?=b)"), "look-around, including look-ahead and look-behind, is not supported"),
    (StructuredOutput("regex", "("), "unclosed group"),
    (StructuredOutput("grammar", "start: nope"), 'the grammar cannot be used: at 1(8): unknown name: "nope"'),
    (StructuredOutput("grammar", "hello"), "the grammar cannot be used"),
    (StructuredOutput("grammar", "start: <|nope|>"), "unknown special token"),
]


@table("structure, words", REFUSED)
def test_what_the_library_cannot_do_is_a_sentence(constraints, structure, words):
    """Fault: a keyword that is ignored in silence, so that the answer is not what was asked for."""
    for _ in range(2):  # the second time from what is kept
        with pytest.raises(RequestError) as caught:
            constraints.constraint(structure)
        assert words in caught.value.message and "\n" not in caught.value.message and len(caught.value.message) < 400


def test_a_grammar_that_the_library_refuses_only_here_is_a_sentence(demo, monkeypatch):
    """Fault: a grammar that its trial in the helper process let pass constrains an answer to nothing."""
    made = GrammarCompiler(demo)
    monkeypatch.setattr(Helper, "ask", lambda *given: (constraint_module.DONE, b"start: nope"))
    with pytest.raises(RequestError, match="^the regular expression cannot be used: .*unknown name"):
        made.constraint(StructuredOutput("regex", "a"))


def test_the_words_of_the_library_are_short():
    """Fault: an error record of a megabyte, or a sentence that is cut for no need."""
    structure = StructuredOutput("grammar", "")
    for reason, shown in ((f" {'x' * 299}\n y.", f"{'x' * 299} ..."), ("x" * 300 + " .", "x" * 300)):
        assert constraint_module.unusable(structure, reason).message == f"the grammar cannot be used: {shown}"


@table("special", [{}, {5: "<a>", 299: "<b>", 300: "<c>"}, {5: "<a>", 301: "<c>"}])
def test_a_grammar_is_tried_with_every_byte(special):
    """Fault: a form that needs a certain byte is refused, since the tokens of the trial lack it."""
    made = _Bytes(300, special)
    assert sorted(token for token in made.tokens if len(token) == 1) == [bytes([byte]) for byte in range(256)]
    assert len(made.tokens) == 300
    inside = {number: name for number, name in special.items() if number < 300} or {0: "<eos>"}
    assert made.special_token_ids == sorted(inside) and made.eos_token_id == min(inside)
    assert {number: made.tokens[number].decode() for number in inside} == inside


def numeric_schema(source: random.Random) -> dict[str, object]:
    """A schema with numbers of any size where they count."""

    def number() -> float:
        while "inf" in repr(found := json.loads(number_text(source))):
            pass
        return found

    kind = source.randrange(5)
    if kind == 0:
        return {"enum": [number() for _ in range(source.randrange(1, 4))]}
    if kind == 1:
        return {"const": {"a": [number(), {"b": number()}]}}
    if kind == 2:
        steps = [source.choice((3, 7, 0.5, 65_537, 65_539, 2**31, 2**33)) for _ in range(2)]
        within = {"minimum": -(10**15), "maximum": 10**15}  # jsonschema divides floats
        return {"allOf": [{"type": "integer", "multipleOf": steps[0]}, {"multipleOf": steps[1]}], **within}
    low = number()
    schema = {"type": "integer", "minimum": low, "maximum": low + source.randrange(4)}
    if kind == 3 and source.randrange(2):
        schema["exclusiveMinimum"] = schema.pop("minimum")
    return schema if kind == 3 else schema | {"type": "number"}


@pytest.mark.slow
def test_answers_have_every_digit_of_a_schema(demo, constraints):
    """Fault: of enum [9007199254740993] the answer ...992, of a minimum 10^20 the answer 9223372036854775807, of a
    float of 17 digits its neighbour, of steps 65537 and 65539 a multiple of neither."""
    seed = random.randrange(1 << 30)
    source, answered, refused = random.Random(seed), 0, 0
    for number in range(400):
        schema = numeric_schema(source)
        text = json.dumps(schema)
        structure = StructuredOutput("json", text)
        if number % 2:
            form = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
            structure = StructuredOutput("calls", json.dumps([["f", form]]), one_call=True)
        try:
            constraint = constraints.constraint(structure)
        except RequestError as error:
            assert "cannot be used: " in error.message
            refused += 1
            continue
        answer, is_whole = walk(demo, constraint, source)
        if is_whole:
            answered += 1
            if structure.kind == "json":
                jsonschema.validate(json.loads(answer), schema)
            else:
                [call] = tool_parsers()["hermes"].find(answer, []).calls
                jsonschema.validate(call.arguments, {"properties": {"x": schema}})
    assert answered > 40 and refused > 40, f"seed {seed}"


KEPT = [
    '{"enum":[5e-324,1e-310,1e-308,-2.5e-309,4.5e-308]}',
    '{"type":"integer","minimum":0,"maximum":9223372036854775807}',
    '{"type":["integer","null"],"minimum":-9007199254740992,"maximum":4611686018427387904}',
    '{"enum":[9007199254740992,-9223372036854774784,0.1,1e-7,123456.789,-0.0,"9007199254740993"]}',
    '{"type":"number","maximum":9007199254740991,"minimum":9007199254740990.0}',
    '{"type":["integer","null"],"maximum":9223372036854774784}',
    '{"type":"number","minimum":0.05,"maximum":99.99,"multipleOf":0.01}',
    '{"type":"string","default":12345678901234567890123,"title":"t","examples":[1e300]}',
    '{"properties":{"minimum":{"type":"string"},"const":{"type":"integer","maximum":9223372036854775807}}}',
    *(f'{{"allOf":[{{"type":"number","multipleOf":{one}}},{{"multipleOf":{other}}}]}}'
      for one, other in ((1, 65535), (4, 6), (0.01, 655.35))),
]  # fmt: skip
CHANGED = {
    '{"enum":[9007199254740993]}': "enum has the number 9007199254740993, which the grammar library would change",
    '{"const":{"a":[9223372036854775808]}}': "const has the number",
    '{"type":"integer","maximum":9007199254740993}': "maximum has the number",
    '{"type":"integer","minimum":100000000000000000000}': "minimum has the number",
    '{"type":"integer","exclusiveMinimum":9007199254740992}': "exclusiveMinimum has the number",
    '{"type":"integer","minimum":9007199254740992,"exclusiveMinimum":true}': "minimum has the number",
    '{"type":"integer","minimum":-9223372036854775808}': "minimum has the number",
    '{"type":"number","maximum":9223372036854775807}': "maximum has the number",
    '{"type":["integer","number"],"maximum":9223372036854774784}': "maximum has the number",
    '{"const":0.9594388378770715}': "const has the number",
    '{"items":{"anyOf":[{"const":-18446744073709551616}]}}': "const has the number",
    **{f'{{"allOf":[{{"type":"number","multipleOf":{one}}},{{"multipleOf":{other}}}]}}':
       "the numbers of multipleOf are too large"
       for one, other in ((65537, 65539), (1, 65536), (655.36, 0.01), (0.5, 32768), (1e2, 65536), (-1, -65536))},
}  # fmt: skip


@table("text", KEPT)
def test_numbers_that_are_kept_are_not_refused(constraints, text):
    """Fault: the bounds of 64-bit integers, or numbers that say nothing of the answer, refused with the others."""
    constraints.constraint(StructuredOutput("json", text))


@table("text", CHANGED)
def test_numbers_that_the_library_changes_are_refused(constraints, text):
    """Fault: an answer that its schema forbids, with `stop` and without a warning."""
    calls = StructuredOutput("calls", f'[["look_up",{{"type":"object","properties":{{"x":{text}}}}}]]')
    for structure, before in (
        (StructuredOutput("json", text), "the JSON schema"),
        (calls, "the parameters of the tools"),
    ):
        with pytest.raises(RequestError) as caught:
            constraints.constraint(structure)
        message, own = caught.value.message, '"look_up": ' * (structure is calls)
        assert message.startswith(f"{before} cannot be used: {own}{CHANGED[text]}") and len(message) < 350


def needing(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{name}"}}, "required": ["x"], **more}


@table(
    "schema, is_ended",
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": needing("b"), "b": needing("a")}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": needing("b"), "b": {"anyOf": [needing("a"), {"type": "null"}]}}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": needing("b"), "b": {"allOf": [needing("a"), {}]}}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": needing("b"), "b": {"oneOf": [needing("a"), needing("b")]}}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": needing("a", type=["object", "null"])}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": needing("a", required=["y"])}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}}, False),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1}, True),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2}, False),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#"}}}, False),
        ({"type": "string", "$defs": {"a": {"$ref": "#/$defs/a"}}}, True),
        ({"$ref": "#/$defs/0", "$defs": {str(n): needing(str(n + 1)) for n in range(20)} | {"20": {}}}, True),
        ({"$ref": "https://a/b"}, True), ({"$ref": 5}, True), (True, True), ({"enum": [{"$ref": "#"}]}, True),
    ],
)  # fmt: skip
def test_a_schema_without_a_finite_value_is_refused(schema: Any, is_ended: bool) -> None:
    """Fault: an answer to a $ref that leads back to itself runs to its limit of tokens; or a list of itself is
    refused."""
    assert is_finite(schema) == is_ended


@table(
    "schema, reason",
    [
        ('{"type":"array","items":{"enum":[1,2]},"uniqueItems":false,"maxItems":2}', ""),
        ('{"properties":{"uniqueItems":{"type":"array","uniqueItems":false}}}', ""),
        ('{"type":"array","uniqueItems":true}', 'Unimplemented keys: ["uniqueItems"]'),
        ('{"$ref":"#/$defs/n","$defs":{"n":{"$ref":"#/$defs/n"}}}', "no finite value satisfies it: a $ref"),
        ('{"type":"object","properties":{"s":{"type":"integer","multipleOf":5,"minimum":0,"maximum":20}},"required":["s"],'
         '"patternProperties":{"^s$":{"type":"integer"}},"additionalProperties":false}', "finds no text for it: "),
        ('{"const":"a<|end|>b"}', "it forces the text of the added token 2"),
    ],
)  # fmt: skip
def test_a_schema_that_is_refused_has_a_sentence(demo, constraints, schema: str, reason: str) -> None:
    """Fault: `uniqueItems: false` is refused though it means nothing, or a reason is a word of the library's code."""
    calls = StructuredOutput("calls", f'[["f",{{"type":"object","properties":{{"x":{schema}}}}}]]')
    for structure in (StructuredOutput("json", schema), *([calls] if not reason else [])):
        with pytest.raises(RequestError, match=re.escape(reason)) if reason else nullcontext():
            walk(demo, constraints.constraint(structure), random.Random(0), most=20)


@table(
    "schema, number",
    [
        ('{"const": 1e-400}', "1e-400"), ('{"enum": [1, 0.12345678901234567890123]}', "0.12345678901234567890123"),
        ('{"anyOf": [{"const": {"a": [-1.00000000000000000001]}}]}', "-1.00000000000000000001"),
        ('{"const": 0.10}', None), ('{"enum": [1.5e0, 30e-1, 0.30000000000000004]}', None),
        ('{"type": "number", "minimum": 0.12345678901234567890123}', None),
        ('{"default": 0.12345678901234567890123, "const": 0.5}', None),
        ('{"const": "0.12345678901234567890123"}', None), ('{"const": 0.5, "title": "1e99999999999999999999"}', None),
    ],
)  # fmt: skip
def test_a_float_with_more_digits_than_a_double_is_refused(schema: str, number: str | None) -> None:
    """Fault: an answer has another number than the one that its schema names."""
    for given in (schema, json.dumps(schema)):
        line = f'{{"messages": [{{"role": "user", "content": "0.25"}}], "guided_json": {given}}}'
        found = parse_line(line.encode(), 3)
        assert isinstance(found, BadLine) == (number is not None)
        if isinstance(found, BadLine):
            assert f"has the number {number}, which a float of 64 bits cannot hold" in found.error.message
            assert (found.error.line, found.custom_id) == (3, "line-3#1")


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


HOSTILE = [
    StructuredOutput(
        "json", json.dumps({"properties": {f"p{number}": {"type": "string"} for number in range(20_000)}})
    ),
    StructuredOutput("json", '{"type":"integer","multipleOf":999983}'),
    StructuredOutput("json", nested(5000)),
    StructuredOutput("json", '{"$ref":"#"}'),
    StructuredOutput(
        "json", json.dumps({"allOf": [{"anyOf": [{"const": [n, m]} for m in range(9)]} for n in range(60)]})
    ),
    StructuredOutput("json", '{"type":"string","pattern":"(.*a.{12}b.{12})+c{900}"}'),
    StructuredOutput("regex", "(a?){500}a{500}"),
    StructuredOutput("regex", "a{1000000000}"),
    StructuredOutput("regex", "((a{1,1000}){1,1000}){1,1000}b"),
    StructuredOutput("regex", "(a|aa)*" * 40 + "b{1000}"),
    StructuredOutput("regex", "(" * 100_000 + "a" + ")" * 100_000),
    StructuredOutput("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    StructuredOutput("grammar", 'start: (x{1,1000}){1,1000}\nx: y{1,1000}\ny: "a" | "b"'),
    StructuredOutput("grammar", 'start: e\ne: e e | "a" | "aa" | ""'),
]


@pytest.mark.drawn(6)
@pytest.mark.slow
@pytest.mark.parametrize("structure", HOSTILE, ids=[f"{one.kind} {one.text[:40]}" for one in HOSTILE])
def test_hostile_input_is_bounded(demo, constraints, structure):
    """Fault: one line of an input that takes the processor for minutes, or all memory, or the process down. It works
    within the bounds, or it is refused."""
    try:
        constraint = constraints.constraint(structure)
        for _ in range(60):
            may_come = allowed(demo, constraint)
            assert len(may_come)
            if constraint.accept(int(may_come[-1])):
                break
    except RequestError as error:
        assert error.code in ("invalid_request", "out_of_memory") and "cannot be used: " in error.message


@pytest.mark.slow
def test_a_process_that_was_ended_is_begun_again(demo, monkeypatch):
    """Fault: after one hostile schema, every later one is refused."""
    monkeypatch.setattr("apcbatch.data.helper.CPU_SECONDS", 0.3)
    made = GrammarCompiler(demo)
    with pytest.raises(RequestError, match="it takes more than 0.3 seconds of processor time"):
        made.constraint(HOSTILE[1])
    assert made.constraint(StructuredOutput("regex", "ok")) is not None


def test_what_is_compiled_is_kept_and_bounded(demo, monkeypatch):
    """Fault: the same schema compiled for every line; ten thousand different ones kept in memory."""
    monkeypatch.setattr(constraint_module, "MOST_COMPILED", 3)
    made, tried, ask = GrammarCompiler(demo), [], Helper.ask
    monkeypatch.setattr(Helper, "ask", lambda self, *given: tried.append(given) or ask(self, *given))
    counts = []
    for text in ("a", "b", "a", "c", "a", "d", "b"):
        made.constraint(StructuredOutput("regex", text))
        counts.append(len(tried))
    assert counts == [1, 2, 2, 3, 3, 4, 5]


def test_answers_do_not_share_what_they_know(demo, constraints):
    """Fault: an answer's place in its grammar moves as another one's does, or depends on what came before it."""
    structure = StructuredOutput("json", '{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}')
    first, second = constraints.constraint(structure), constraints.constraint(structure)
    before = allowed(demo, second).tolist()
    walk(demo, first, random.Random(3), most=20)
    assert allowed(demo, second).tolist() == before == allowed(demo, constraints.constraint(structure)).tolist()


def test_a_matcher_that_fails_midway_fails_its_answer() -> None:
    """Fault: an answer is sampled from the mask of a matcher that has given up, and looks like a structured one."""
    matcher = SimpleNamespace(
        unsafe_compute_mask_ptr=lambda *given: None,
        is_error=lambda: True,
        consume_token=lambda token: False,
        get_error=lambda: "too many states",
    )
    failing = GrammarConstraint(matcher, StructuredOutput("regex", "a"))  # type: ignore[arg-type]
    for call in (lambda: failing.fill(np.zeros(1, np.int32)), lambda: failing.accept(0)):
        with pytest.raises(RequestError, match="the regular expression cannot be used: too many states"):
            call()
