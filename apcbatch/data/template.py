"""Chat templates: messages and tools become the text of a prompt.

Must not know: tokens, turns, files of conversations. A template is untrusted: it runs in the sandbox of
`transformers`, sees plain data only, and whatever it raises becomes a RequestError of the one conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from apcbatch.data.messages import Message, Tool
from apcbatch.data.tokenizer import Tokenizer
from apcbatch.errors import ModelError, RequestError, UsageError

FALLBACK_NAME = "chat_template.jinja"
SHIPPED_FALLBACK = Path(__file__).with_name(FALLBACK_NAME)
_PROBE: tuple[Message, ...] = ({"role": "user", "content": "probe"},)


class ChatTemplate:
    """The chat template of a tokenizer, or the fallback where it has none.

    fallback: the text of the template for models without one. warn: told once, at the first conversation,
    when the fallback is used. Raises ModelError for a template that is not valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, fallback: str, warn: Callable[[str], None]) -> None:
        self._source = tokenizer.source
        self._warn: Callable[[str], None] | None = warn
        self._own = bool(self._source.chat_template)
        self._fallback = fallback
        self._variables: dict[str, Any] = dict(self._source.special_tokens_map)
        if not self._own:
            self._variables["add_bos"] = tokenizer.begins_with_bos
        self._check_syntax()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
        """The prompt's text: the messages and the generation prompt.

        Raises RequestError invalid_request with the template's own words where it refuses the conversation.
        """
        import jinja2

        if not self._own and self._warn is not None:
            self._warn(
                "the model has no chat template; conversations are rendered with apcbatch's plain one "
                f"({FALLBACK_NAME}): give the model folder a {FALLBACK_NAME} to use another"
            )
            self._warn = None
        try:
            return self._apply(messages, tools)
        except (jinja2.TemplateError, RecursionError, ArithmeticError, AttributeError, LookupError, TypeError,
                ValueError) as error:  # fmt: skip
            reason = str(error).strip() or type(error).__name__
            if isinstance(error, RecursionError):
                reason = "the messages or tools are nested too deeply"
            message = f"the chat template refuses messages[0:{len(messages)}]: {reason[:500]}"
            raise RequestError("invalid_request", message) from None

    def _apply(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> str:
        """One pass of the template; unlike `apply_chat_template` it takes an empty history too."""
        from transformers.utils.chat_template_utils import render_jinja_template

        schemas: list[Any] | None = list(tools) if tools else None
        rendered: Any = render_jinja_template(
            conversations=[list(messages)],
            tools=schemas,
            chat_template=self._source.get_chat_template(None, schemas) if self._own else self._fallback,
            add_generation_prompt=True,
            **self._variables,
        )
        return str(rendered[0][0])

    def _check_syntax(self) -> None:
        """Compile the template, so that a broken one is told at once and not for every conversation."""
        import jinja2

        try:
            self._apply(_PROBE, None)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template is not valid Jinja: line {error.lineno}: {error.message}; "
                "restore the file as the model was published"
            ) from None
        except (jinja2.TemplateError, RecursionError, ArithmeticError, AttributeError, LookupError, TypeError,
                ValueError):  # fmt: skip
            return  # it refuses the probe, which is its right: real conversations will tell


def read_fallback(path: str | Path | None) -> str:
    """The fallback template at path, or the one that comes with apcbatch; raises UsageError."""
    chosen = Path(path) if path is not None else SHIPPED_FALLBACK
    try:
        return chosen.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"the chat template {chosen} cannot be read: {error}") from None
