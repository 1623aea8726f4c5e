"""Child process that renders a model's chat template: it reads messages and returns text.

A template is untrusted. Its environment is the jinja2 sandbox of `transformers`, rebuilt here so that the process
starts fast and needs little memory. Limits: data/helper_child.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from apcbatch.data.helper_child import DONE, MAX_CHARACTERS, REFUSED, TOO_LONG, Reply, serve

_NONE: Mapping[str, Any] = {}


def environment(clock: str) -> ImmutableSandboxedEnvironment:
    """Build the jinja2 environment that `apply_chat_template` of transformers gives to a template. clock: time that
    strftime_now formats, in ISO 8601; its offset is not shown, as in transformers."""
    now = datetime.fromisoformat(clock).replace(tzinfo=None)
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": now.strftime,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


class Template:
    """One compiled template. variables: name -> value, in every request. clock: see `environment`. ValueError if it
    cannot be compiled."""

    def __init__(self, source: str, variables: Mapping[str, Any], clock: str = "1970-01-01") -> None:
        self._variables = dict(variables)
        try:
            self._template = environment(clock).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None

    def answer(
        self,
        count: int,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        variables: Mapping[str, Any] = _NONE,
    ) -> Reply:
        """Render the first `count` messages. variables: the request's own; they override those of the run."""
        random.seed(0)  # of the filter `random` and the function `lipsum`: a prompt depends on its conversation alone
        try:
            text = self._template.render({**self._variables, **variables, "messages": messages[:count], "tools": tools})
            text.encode()
        except RecursionError:
            return REFUSED, "the messages or tools are nested too deeply"
        except UnicodeEncodeError:
            return REFUSED, "its text holds half of a surrogate pair; expected Unicode"
        return (DONE, text) if len(text) <= MAX_CHARACTERS else (TOO_LONG, str(len(text)))


def main() -> None:
    """Answer requests from standard input until it ends."""
    serve(lambda source, variables, clock: Template(source, variables, clock).answer)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise a value as JSON. Unlike jinja's own filter, do not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """The function `dict` of templates, which gives no access to the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return dict.fromkeys of the arguments."""
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """The `namespace` of templates. It refuses names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that `namespace(self=...)` works too
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


class _GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks the assistant's text for training. Here it renders its body alone."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parse the block as a call block with a scope of its own, as transformers does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
