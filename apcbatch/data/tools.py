"""Tools: checked, and brought into the form that chat templates read, which is OpenAI's.

Must not know: lines, files, templates, tokens. That form is `{"type": "function", "function": {...}}`; the function
alone, without a type, stays as it is, since many templates take both. The function with a type beside its name (of
OpenAI's Responses), and one whose schema is `input_schema` (Anthropic's) or `inputSchema` (of MCP) are brought into it.
"""

from __future__ import annotations

from typing import Any

from apcbatch.data.checks import invalid, need_object, need_string, one_of, shown, wrong
from apcbatch.data.messages import Tool, Unread

_SCHEMAS = ("parameters", "input_schema", "inputSchema")
_UNSHOWN = ("type", "cache_control")  # of Anthropic's: the first says what is known, the second what a service caches
_WITHOUT_SCHEMA = ("name", "description", "strict", *_SCHEMAS, *_UNSHOWN)
_FORM = '{"type": "function", "function": {"name": ..., "parameters": ...}}'


def check_tools(value: object, where: str = "tools", unread: Unread | None = None) -> list[Tool] | None:
    """The tools of a request; None without any. RequestError for what is no function with a name.

    unread: is told of functions whose schema has no name that is known.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        raise wrong(where, value, "a list of tool schemas")
    unread = Unread() if unread is None else unread
    return [_check_tool(item, f"{where}[{index}]", unread) for index, item in enumerate(value)] or None


def _check_tool(value: object, where: str, unread: Unread) -> Tool:
    tool = need_object(value, where, "a tool schema: an object")
    kind = tool.get("type")
    if "function" in tool:
        function = need_object(tool["function"], f"{where}.function", "an object with a name")
        need_string(function, "name", f"{where}.function.name")
        if kind not in (None, "function"):
            raise wrong(f"{where}.type", kind, '"function"')
        converted = _with_parameters(function, f"{where}.function", unread)
        return tool if converted is function else {**tool, "function": converted}
    if kind not in (None, "function") and not (kind == "custom" and tool.get("input_schema") is not None):
        raise invalid(
            f'{where}.type is {shown(kind)}; expected "function": a tool that a service runs, or one without a schema, '
            f"cannot be called here; leave it out, or give it as {_FORM}"
        )
    if "name" not in tool:
        keys = ", ".join(shown(str(key)) for key in list(tool)[:8]) or "none"
        raise invalid(f"{where} has no name; its keys are {keys}; give it as {_FORM}")
    need_string(tool, "name", f"{where}.name")
    function = _with_parameters(tool, where, unread)
    if function is tool and kind is None:
        return tool
    shown_keys = {key: one for key, one in function.items() if key not in _UNSHOWN}
    return {"type": "function", "function": shown_keys}


def _with_parameters(function: dict[str, Any], where: str, unread: Unread) -> dict[str, Any]:
    """The function with its schema under `parameters`; the same object if it is there, or if there is none."""
    named = [name for name in _SCHEMAS if function.get(name) is not None]
    if len(named) > 1:
        raise invalid(f"{where} has the schemas {one_of(named).replace(' or ', ' and ')}; give one of them")
    if not named:
        others = [key for key in function if key not in _WITHOUT_SCHEMA]
        if others:
            keys = ", ".join(shown(str(key)) for key in others[:8])
            unread.say(f"{where} has no parameters: its keys {keys} hold no call to a schema")
        return function
    [name] = named
    if name == "parameters":
        return function
    need_object(function[name], f"{where}.{name}", "a JSON schema: an object")
    left = {key: one for key, one in function.items() if key == name or key not in _SCHEMAS}
    return {"parameters" if key == name else key: one for key, one in left.items()}
