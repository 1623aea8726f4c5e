"""Check a request's options for the chat template: variables, documents, and where the prompt ends.

data/fields.py lists the fields of a request that set them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from apcbatch.config import Config
from apcbatch.data.checks import invalid, need_object, optional_flag, optional_string, shown, wrong
from apcbatch.data.json_text import read_json, write_json
from apcbatch.data.model_files import MAX_TEMPLATE_BYTES
from apcbatch.errors import RequestError, UsageError
from apcbatch.regular_files import read_regular_file

MOST_VARIABLES = 64
MOST_BYTES = 1 << 20
_NAME_CHARACTERS = 64
# Names that chat_template_kwargs must not set: they have their own fields, or the template's environment sets them.
RESERVED = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "self",
)  # fmt: skip
_OWN_NAMES = ("enable_thinking", "thinking", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Options of a request for the chat template.

    variables: name -> value, from chat_template_kwargs and the fields in _OWN_NAMES. documents: list of objects for
    the template. add_generation_prompt: the prompt ends with the beginning of an answer. continue_final_message: the
    prompt ends inside the last message.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        pairs = ((name, getattr(self, name), getattr(_DEFAULT, name)) for name in self.__slots__)
        return {name: value for name, value, usual in pairs if value != usual}


_DEFAULT = TemplateOptions()


def read_template(path: str | Path) -> str:
    """Read the chat template in a file; UsageError if it cannot be read, or is empty."""
    try:
        text = read_regular_file(path, MAX_TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the chat template {path} cannot be read: {reason}") from None
    if not text.strip():
        raise UsageError(f"the chat template {path} is empty")
    return text


def check_template_options(record: Mapping[str, Any], where: str) -> TemplateOptions:
    """Check the options in a body (where: `body.`) or a line. A null counts as absent. RequestError for an invalid
    value."""
    variables = check_variables(record.get("chat_template_kwargs"), f"{where}chat_template_kwargs")
    for name in _OWN_NAMES:
        if record.get(name) is None:
            continue
        read = optional_string if name == "reasoning_effort" else optional_flag
        value = read(record, name, f"{where}{name}")
        if variables.get(name, value) != value:
            other = f"{shown(variables[name])} in chat_template_kwargs"
            raise invalid(f"{where}{name} is {shown(value)}, and {other}; give one of them")
        variables[name] = value
    continues = optional_flag(record, "continue_final_message", f"{where}continue_final_message") or False
    prompts = optional_flag(record, "add_generation_prompt", f"{where}add_generation_prompt")
    if continues and prompts:
        raise invalid(
            f"{where}add_generation_prompt and continue_final_message are both true; the prompt ends either with the "
            "beginning of an answer or inside the last message"
        )
    return TemplateOptions(
        variables, _documents(record, where), not continues if prompts is None else prompts, continues
    )


def check_variables(value: object, where: str) -> dict[str, Any]:
    """Check variables for the template: an object of limited size without reserved names; RequestError otherwise."""
    if value is None:
        return {}
    variables = dict(need_object(value, where))
    if len(variables) > MOST_VARIABLES:
        raise invalid(f"{where} has {len(variables):,} names; at most {MOST_VARIABLES} are taken")
    for name in variables:
        if name in RESERVED:
            raise invalid(f"{where} has the name {shown(name)}, which is not its to set; give it as a field of its own")
        if not name.isidentifier() or len(name) > _NAME_CHARACTERS:
            raise invalid(f"{where} has the name {shown(name)}; expected a name that a template can read")
    try:
        num_bytes = len(write_json(variables).encode())
    except ValueError:
        raise invalid(f"{where} is nested too deeply, or holds a value that JSON does not have") from None
    if num_bytes > MOST_BYTES:
        raise invalid(f"{where} holds more than {MOST_BYTES:,} bytes as JSON")
    return variables


def read_template_kwargs(text: str | None) -> dict[str, Any]:
    """Parse the variables of --template-kwargs, the JSON text of an object. Raises UsageError."""
    if text is None:
        return {}
    try:
        value = read_json(text)
        return check_variables(value, "--template-kwargs")
    except JSONDecodeError as error:
        reason = f"--template-kwargs is not JSON: {error.msg} at column {error.colno}"
    except RequestError as error:
        reason = error.message
    raise UsageError(f"{reason}; give an object, as in --template-kwargs '{{\"enable_thinking\": false}}'")


def _documents(record: Mapping[str, Any], where: str) -> list[Any] | None:
    value = record.get("documents")
    if value is None:
        return None
    if not isinstance(value, list):
        raise wrong(f"{where}documents", value, "a list of objects")
    for index, document in enumerate(value):
        need_object(document, f"{where}documents[{index}]")
    return value or None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a run for chats.

    tool_parser, reasoning_parser: `auto`, `none` or a parser's name. template_kwargs: JSON text of an object.
    chat_template: text of a template to use in place of the model's.
    max_tokens: limit of a prompt. clock: time that the chat template reads, in ISO 8601; None for the time when it is
    opened. is_dated: the clock is a given date.
    """

    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    template_kwargs: str | None = None
    chat_template: str | None = None
    max_tokens: int = Config.max_request_tokens
    clock: str | None = None
    is_dated: bool = False

    @classmethod
    def of(cls, config: Config, context_length: int | None = None) -> ChatOptions:
        """Take the options from a configuration. context_length: tokens of the model's context, or None. UsageError for
        a template that cannot be read."""
        return cls(
            config.tool_parser,
            config.reasoning_parser,
            config.template_kwargs,
            None if config.chat_template is None else read_template(config.chat_template),
            min(config.max_request_tokens, context_length or config.max_request_tokens),
            config.template_clock,
            config.template_date is not None,
        )
