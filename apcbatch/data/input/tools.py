"""Check tools and convert them to the form that chat templates read: `{"type": "function", "function": {...}}`.

Two forms are converted: functions with `type` beside `name` (OpenAI's Responses), and schemas under `input_schema`
(Anthropic) or `inputSchema` (MCP). A bare function without `type` stays unchanged unless its
schema is under such a key, since many templates read it too.
"""

from __future__ import annotations

from typing import Any

from apcbatch.data.checks import invalid, need_object, need_string, one_of, shown, shown_keys, wrong
from apcbatch.data.conversation import Tool
from apcbatch.data.input.messages import ContentWarnings

_SCHEMAS = ("parameters", "input_schema", "inputSchema")
_UNSHOWN = ("type", "cache_control")  # keys of Anthropic's form that are left out of the converted function
_WITHOUT_SCHEMA = ("name", "description", "strict", *_SCHEMAS, *_UNSHOWN)
_FORM = '{"type": "function", "function": {"name": ..., "parameters": ...}}'


def check_tools(value: object, where: str, warnings: ContentWarnings) -> list[Tool] | None:
    """Check and convert the tools of a request; return None without any.

    RequestError for a tool that is not a function with a name. warnings: gets a sentence for each function that has
    unknown keys and no schema.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        raise wrong(where, value, "a list of tool schemas")
    return [_check_tool(item, f"{where}[{index}]", warnings) for index, item in enumerate(value)] or None


def _check_tool(value: object, where: str, warnings: ContentWarnings) -> Tool:
    tool = need_object(value, where, "a tool schema: an object")
    kind = tool.get("type")
    if "function" in tool:
        function = need_object(tool["function"], f"{where}.function", "an object with a name")
        need_string(function, "name", f"{where}.function.name")
        if kind not in (None, "function"):
            raise wrong(f"{where}.type", kind, '"function"')
        converted = _with_parameters(function, f"{where}.function", warnings)
        return tool if converted is function else {**tool, "function": converted}
    if kind not in (None, "function") and not (kind == "custom" and tool.get("input_schema") is not None):
        raise invalid(
            f'{where}.type is {shown(kind)}; expected "function": a tool that a service runs, or one without a schema, '
            f"cannot be called here; leave it out, or give it as {_FORM}"
        )
    if "name" not in tool:
        raise invalid(f"{where} has no name; its keys are {shown_keys(tool)}; give it as {_FORM}")
    need_string(tool, "name", f"{where}.name")
    function = _with_parameters(tool, where, warnings)
    if function is tool and kind is None:
        return tool
    return {"type": "function", "function": {key: one for key, one in function.items() if key not in _UNSHOWN}}


def _with_parameters(function: dict[str, Any], where: str, warnings: ContentWarnings) -> dict[str, Any]:
    """Move the schema of a function to `parameters`. Return the same object if the schema is there already, or if the
    function has none."""
    named = [name for name in _SCHEMAS if function.get(name) is not None]
    if len(named) > 1:
        raise invalid(f"{where} has the schemas {one_of(named).replace(' or ', ' and ')}; give one of them")
    if not named:
        others = [key for key in function if key not in _WITHOUT_SCHEMA]
        if others:
            sentence = f"{where} has no parameters; its keys {shown_keys(others)} are not known as a schema"
            warnings.add("tools", sentence)
        return function
    [name] = named
    if name == "parameters":
        return function
    need_object(function[name], f"{where}.{name}", "a JSON schema: an object")
    left = {key: one for key, one in function.items() if key == name or key not in _SCHEMAS}
    return {"parameters" if key == name else key: one for key, one in left.items()}
