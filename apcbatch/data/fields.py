"""Table of all fields of a request, with the kind of each, and the checks of a line against it.

docs/reference/formats.md is made from this table (tools/make_formats_docs.py). Invariant: only a harmless field
is ignored silently. Any other is content, honoured, refused with a sentence, or an unused column, which causes a
warning. A field that is null counts as absent.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from apcbatch.data.checks import invalid, one_of, shown
from apcbatch.errors import RequestError
from apcbatch.formats import CHAT_URL, COMPLETIONS_URL, Format
from apcbatch.sampling import MOST_TOP_LOGPROBS, SETTINGS

Kind = Literal["content", "honoured", "refused", "harmless"]
Shape = Literal["chat", "completions", "messages", "sharegpt", "batch", "message", "part", "call", "function", "spoken"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
CHATS: tuple[Shape, ...] = ("chat", "messages", "sharegpt")
REQUESTS: tuple[Shape, ...] = ("chat", "completions", "messages", "sharegpt")
SPOKEN: tuple[Shape, ...] = ("message", "spoken")
INSIDE: tuple[Shape, ...] = ("message", "spoken", "part", "call", "function")

MOST_COLUMNS = 1024
_SHORTEST_NEAR = 5
_LONGEST_NEAR = 40
_NEAR = 0.85
_MOST_EDITS = 2
_IF_DATA = "; if it is data, give --ignore-columns {}"
_NEAR_IN_BODY = 0.5  # lower than _NEAR, since a body has no columns: each of its keys is meant as a field


@dataclass(frozen=True, slots=True)
class Field:
    """One key of the objects of a request.

    kind: `content`, a part of the conversation; `honoured`, applied to the request (a setting overrides the run's
    option); `refused`, since it would change the answer; `harmless`, since it changes no answer. note: meaning of the
    key, for the formats page. accepted: the only allowed values. An empty tuple refuses every value; with None, this
    module does not check the value. In a refused field, an accepted value means the same as an absent field.
    hint: remedy, for the error and the formats page. shapes: kinds of objects that have the key: a body (`chat`,
    `completions`), a line (`messages`, `sharegpt`, `batch`), a message (`message`; `spoken` in a sharegpt line), or an
    object in a message (`part` of the content, tool `call`, `function` of a call).
    """

    name: str
    kind: Kind
    note: str
    accepted: tuple[Any, ...] | None = None
    hint: str = ""
    shapes: tuple[Shape, ...] = REQUESTS


def _content(name: str, note: str, *shapes: Shape) -> Field:
    return Field(name, "content", note, shapes=shapes)


def _refused(name: str, note: str, *accepted: Any, hint: str = "", shapes: tuple[Shape, ...] = REQUESTS) -> Field:
    return Field(name, "refused", note, accepted, hint, shapes)


_SHAPES: Mapping[str, tuple[Shape, ...]] = {"all": REQUESTS, "chats": CHATS, "completions": ("completions",)}
_SETTINGS = [
    Field(setting.line or setting.name, "honoured", setting.note, shapes=_SHAPES[setting.shapes])
    for setting in SETTINGS.values()
    if setting.note
]
FIELDS: tuple[Field, ...] = (
    _content("id", "the conversation's name, a string or an integer; `line-<n>` without one", "messages", "sharegpt"),
    _content("messages", "the messages, at least one", "messages", "chat"),
    _content("conversations", "objects with `from` (human, gpt, system, tool) and `value`", "sharegpt"),
    _content("system", "the system message, if the list does not begin with one", "sharegpt"),
    _content("prompt", "a text or a list of token ids, for one completion; or a list of one of these", "completions"),
    _content("custom_id", "the request's name, a string that is not empty", "batch"),
    _content("method", "`POST`; may be absent", "batch"),
    _content(
        "url",
        f"`{CHAT_URL}` or `{COMPLETIONS_URL}`, also without `/v1`; without one a body with `prompt` and no `messages` "
        "is a completion's",
        "batch",
    ),
    _content("body", "the request: a chat's or a completion's", "batch"),
    Field(
        "tools",
        "honoured",
        "functions, of the shapes in [Tool calls](../tool-calls.md#tools); on sharegpt lines also as JSON text",
        shapes=CHATS,
    ),
    Field("tool_choice", "honoured", "`auto`, `none` (hides the tools), `required` or a named function", shapes=CHATS),
    Field(
        "parallel_tool_calls",
        "honoured",
        "false: of several calls in an answer the first one is given, and a warning says so",
        shapes=CHATS,
    ),
    Field("chat_template_kwargs", "honoured", "variables for the template: an object", shapes=CHATS),
    Field("enable_thinking", "honoured", "true or false: a variable for the template", shapes=CHATS),
    Field("thinking", "honoured", "true or false: a variable for the template", shapes=CHATS),
    Field("reasoning_effort", "honoured", "a text: a variable for the template", shapes=CHATS),
    Field("documents", "honoured", "a list of objects for the template", shapes=CHATS),
    Field("add_generation_prompt", "honoured", "false: the prompt has no beginning of an answer", shapes=CHATS),
    Field(
        "continue_final_message",
        "honoured",
        "true: the prompt ends inside the last message, the assistant's; the line is one request",
        shapes=CHATS,
    ),
    Field("model", "honoured", "compared with the loaded model: another name is a warning, or refused"),
    *_SETTINGS,
    Field("max_completion_tokens", "honoured", "the newer name of `max_tokens`; it wins over the older one"),
    Field(
        "logprobs",
        "honoured",
        f"0 to {MOST_TOP_LOGPROBS} likeliest tokens beside the chosen one",
        shapes=("completions",),
    ),
    Field(
        "draft",
        "honoured",
        "false: no token of the answer is drafted (`--draft`); the answer is the same, to the bit",
    ),
    Field("best_of", "honoured", "as many as `n`: no answer is chosen, all are given"),
    Field("response_format", "honoured", "`text`, `json_object` or `json_schema`"),
    Field("structured_outputs", "honoured", "one of `json`, `json_object`, `regex`, `choice` and `grammar`"),
    Field("guided_json", "honoured", "a JSON schema, or its text"),
    Field("guided_regex", "honoured", "a regular expression that the whole answer matches"),
    Field("guided_choice", "honoured", "the texts that an answer may be"),
    Field("guided_grammar", "honoured", "a grammar in Lark's syntax or GBNF"),
    Field("guided_whitespace_pattern", "honoured", "what may stand between the tokens of JSON"),
    _refused("guided_decoding_backend", "the grammars' library", hint="it is llguidance"),
    _refused(
        "system",
        "a text beside the messages",
        "",
        hint="a system message comes first in messages",
        shapes=("messages",),
    ),
    _refused("num_return_sequences", "several answers", 1, hint="the field is n"),
    _refused("use_beam_search", "beam search", False),
    _refused("length_penalty", "beam search", 1),
    _refused("stream", "an answer in pieces", False, hint="a batch is answered in one piece"),
    _refused("stop_sequences", "texts that end an answer", [], hint="the field is stop"),
    _refused("bad_words", "texts that an answer must not hold", []),
    _refused("max_new_tokens", "new tokens at most", hint="the field is max_tokens"),
    _refused("max_output_tokens", "new tokens at most", hint="the field is max_tokens"),
    _refused("do_sample", "drawing or not", hint="temperature 0 is greedy, above 0 draws"),
    _refused("typical_p", "typical sampling", 1),
    _refused("logits_processors", "code that changes logits", []),
    _refused("echo", "the prompt in the answer", False, shapes=CHATS),
    _refused("suffix", "text behind the completion", ""),
    _refused("truncate_prompt_tokens", "the end of the prompt alone"),
    _refused("add_special_tokens", "special tokens around the prompt"),
    _refused("skip_special_tokens", "special tokens in the answer's text", True),
    _refused("spaces_between_special_tokens", "spaces between special tokens", True),
    _refused("return_tokens_as_token_ids", "token ids for tokens", False),
    Field(
        "functions",
        "honoured",
        "the older form of `tools`; a list where these are absent",
        ([],),
        "its newer form is tools",
        CHATS,
    ),
    Field(
        "function_call",
        "honoured",
        "the older form of `tool_choice`, beside `functions`",
        ("auto", "none"),
        "its newer form is tool_choice",
        CHATS,
    ),
    _refused("chat_template", "another template", hint="--chat-template is for the whole run", shapes=CHATS),
    _refused("verbosity", "how long to answer", "medium", shapes=CHATS),
    _refused("modalities", "kinds of output", ["text"], shapes=CHATS),
    _refused("audio", "spoken output", shapes=CHATS),
    _refused("web_search_options", "a search of the web", shapes=CHATS),
    _refused("moderation", "a check of prompt and answer by the service", shapes=CHATS),
    _refused("cache_salt", "whose snapshots may be shared", hint="the option --cache-salt is for the whole run"),
    _refused("extra_body", "further fields", {}, hint="its fields belong in its place"),
    Field("user", "harmless", "id of the end user"),
    Field("safety_identifier", "harmless", "id of the end user"),
    Field("metadata", "harmless", "your own notes"),
    Field("store", "harmless", "whether the service keeps the answer"),
    Field("service_tier", "harmless", "how fast the service is"),
    Field("priority", "harmless", "the order of work"),
    Field("prediction", "harmless", "a guess at the answer, for speed alone"),
    Field("prompt_cache_key", "harmless", "where the service caches; prefixes are found without it"),
    Field("prompt_cache_retention", "harmless", "how long the service caches"),
    Field("prompt_cache_options", "harmless", "how the service caches"),
    Field("stream_options", "harmless", "details of `stream`, which is refused"),
    _content("role", "role of the speaker: system (or developer), user, assistant, tool (or function)", "message"),
    _content("content", "a text, a list of text parts or of blocks; of an assistant also null", "message"),
    _content("name", "name of the speaker, or of the tool that answers; of the tool to call", "message", "function"),
    _content("tool_calls", "the calls that the assistant makes", "message"),
    _content("tool_call_id", "the id of the call that the tool answers", "message"),
    _content("refusal", "why the assistant did not answer, a text for the template", "message"),
    _content("reasoning_content", "what the assistant thought", "message"),
    _content("reasoning", "another name of `reasoning_content`, if it is a text", "message"),
    _content("thinking", "another name of `reasoning_content`, if it is a text", "message"),
    _content("function_call", "the older form of a tool call, if there are no `tool_calls`", "message"),
    _content("text", "another name of `content`, if that is absent", "message"),
    _content("from", "role of the speaker: human, gpt, system, tool and their other names", "spoken"),
    _content("value", "a text", "spoken"),
    _content("type", "`text` of a part, `function` of a call", "part", "call"),
    _content("text", "the text of the part", "part"),
    _content("value", "another name of `text`, if that is absent", "part"),
    _content("id", "the call's id", "call"),
    _content(
        "function",
        "an object with name and arguments; or the name, with arguments beside it; or absent, with both beside it",
        "call",
    ),
    _content("arguments", "an object, or JSON text of one; other text stays, with a warning", "function"),
    Field("id", "harmless", "a name in another system", shapes=("message", "spoken", "part")),
    Field("index", "harmless", "its place in a list", shapes=("message", "spoken", "part", "call")),
    Field("weight", "harmless", "how much a training counts it", shapes=SPOKEN),
    Field("loss", "harmless", "whether a training counts it", shapes=SPOKEN),
    Field("loss_mask", "harmless", "whether a training counts it", shapes=SPOKEN),
    Field("train", "harmless", "whether a training counts it", shapes=SPOKEN),
    Field("metadata", "harmless", "your own notes", shapes=(*SPOKEN, "part", "call")),
    Field("source", "harmless", "whether it was recorded or generated", shapes=("message",)),
    Field("timestamp", "harmless", "when it was said", shapes=SPOKEN),
    Field("created_at", "harmless", "when it was said", shapes=SPOKEN),
    Field("model", "harmless", "model that wrote it", shapes=SPOKEN),
    Field("finish_reason", "harmless", "how it ended", shapes=SPOKEN),
    Field("stop_reason", "harmless", "how it ended", shapes=SPOKEN),
    Field("usage", "harmless", "what it cost", shapes=SPOKEN),
    Field("logprobs", "harmless", "what it was drawn with", shapes=("message",)),
    Field("annotations", "harmless", "links that a service added", shapes=("message", "part")),
    Field("citations", "harmless", "links that a service added", shapes=("message", "part")),
    Field("cache_control", "harmless", "what a service caches", shapes=("message", "part")),
    Field("provider_specific_fields", "harmless", "what a service added", shapes=("message", "call", "function")),
    Field("parsed", "harmless", "the content again, as a client read it", shapes=("message",)),
    Field("parsed_arguments", "harmless", "the arguments again, as a client read them", shapes=("function",)),
)

BY_SHAPE: Mapping[Shape, Mapping[str, Field]] = {
    shape: {field.name: field for field in FIELDS if shape in field.shapes} for shape in SHAPES
}


def letters(name: str) -> str:
    """Reduce a name to its letters and digits in lower case, since typing errors often change the rest."""
    return "".join(character for character in name.lower() if character.isalnum())


# letters(name) -> name, for the settings that a line may have.
_BY_LETTERS: Mapping[str, str] = {
    letters(field.name): field.name
    for field in BY_SHAPE["messages"].values()
    if field.kind in ("honoured", "refused") and field.name != "system"
}


def check_body(body: Mapping[str, Any], shape: Shape) -> None:
    """Raise RequestError for a field of a batch line's body that is unknown, is only for the other url, or has a
    forbidden value."""
    known = BY_SHAPE[shape]
    for name, value in body.items():
        if value is None:
            continue
        field = known.get(name)
        if field is None:
            raise _unknown_in_body(name, shape)
        _check_value(field, value, f"body.{name}")


def check_line(record: Mapping[str, Any], source_format: Format) -> tuple[str, ...]:
    """Check the fields of a line; return the names of its unknown fields, the unused columns.

    RequestError for a forbidden value, for more than MOST_COLUMNS unknown fields, and for an unknown name that is
    similar to a setting's, since it is more likely a typing error than a column. --ignore-columns lets each of these
    pass."""
    known = BY_SHAPE[source_format]
    columns: list[str] = []
    for name, value in record.items():
        if value is None:
            continue
        field = known.get(name)
        if field is not None:
            _check_value(field, value, name, _IF_DATA.format(shlex.quote(name)) if source_format != "batch" else "")
        elif len(columns) == MOST_COLUMNS:
            raise invalid(
                f"the line has more than {MOST_COLUMNS:,} unknown fields; if they are data, put them into metadata"
            )
        elif (setting := near_setting(name)) is None:
            columns.append(name)
        elif setting == name:
            raise invalid(f"{name} stands beside body, where it does nothing; put it into body")
        else:
            raise invalid(
                f"the line has the unknown field {shown(name)}; {_near(BY_SHAPE['messages'][setting])} "
                f"If it is data, give --ignore-columns {shlex.quote(name)}"
            )
    return tuple(columns)


def unread_keys(record: Mapping[str, Any], shape: Shape) -> list[str]:
    """Return the unknown keys of a message, or of an object in it. Keys with an empty value are left out."""
    known = BY_SHAPE[shape]
    return [str(name) for name, value in record.items() if name not in known and value not in (None, "", [], {})]


@lru_cache(maxsize=1024)
def near_setting(name: str) -> str | None:
    """Return the setting that a name probably means, or None.

    A setting matches if it is equal to the name apart from case and punctuation. For a name of at least _SHORTEST_NEAR
    letters, the most similar setting within _MOST_EDITS edits matches too. A name of more than _LONGEST_NEAR characters
    has no match."""
    if len(name) > _LONGEST_NEAR:
        return None
    own = letters(name)
    if own in _BY_LETTERS or len(own) < _SHORTEST_NEAR:
        return _BY_LETTERS.get(own)
    close = difflib.get_close_matches(own, _BY_LETTERS, n=1, cutoff=_NEAR)
    return _BY_LETTERS[close[0]] if close and _edits(own, close[0]) <= _MOST_EDITS else None


def _edits(name: str, other: str) -> int:
    """Return the number of letters to insert, delete or replace that turn one name into the other."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(name, start=1):
        before, row[0] = row[0], number
        for place, one in enumerate(other, start=1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (letter != one))
    return row[-1]


def json_text(value: object) -> str:
    """Serialize an accepted value of a field as JSON, for error sentences and the formats page."""
    return json.dumps(value)


def _check_value(field: Field, value: object, where: str, if_data: str = "") -> None:
    if field.accepted is None or any(_same(value, one) for one in field.accepted):
        return
    ways = ["leave it out", *([f"give {one_of([*map(json_text, field.accepted)])}"] if field.accepted else [])]
    hint = f": {field.hint}" if field.hint else ""
    raise invalid(f"{where} is {shown(value)}, which is not supported; {' or '.join(ways)}{hint}{if_data}")


def _same(value: object, other: object) -> bool:
    """Return whether two values are equal as JSON: 0 equals 0.0, but not false."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _unknown_in_body(name: str, shape: Shape) -> RequestError:
    other, url = ("completions", COMPLETIONS_URL) if shape == "chat" else ("chat", CHAT_URL)
    if name in BY_SHAPE[other]:  # type: ignore[index]
        return invalid(f"body.{name} is a field of {url} alone; leave it out, or give that url")
    close = difflib.get_close_matches(name[:_LONGEST_NEAR], BY_SHAPE[shape], n=1, cutoff=_NEAR_IN_BODY)
    near = _near(BY_SHAPE[shape][close[0]]) if close else "leave it out"
    return invalid(f"body has the unknown field {shown(name)}; {near}")


def _near(field: Field) -> str:
    """Return advice about an unknown name. field: known field with the most similar name."""
    if field.kind != "refused":
        return f"did you mean {field.name}?"
    hint = f": {field.hint}" if field.hint else ""
    return f"{field.name}, which is near, is not supported{hint}."
