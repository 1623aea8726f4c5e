"""Chat templates after those of the families whose calls are parsed: each says how an assistant's message is written.

`<|start|>` and `<|stop|>` stand around each message, so that a test finds what the model would write; the rest is as
the family has it.
"""

from __future__ import annotations

HEAD = """{%- for message in messages %}{{- '<|start|>' + message.role + '\\n' }}
{%- if message.role != 'assistant' %}{{- message.content }}
{%- else %}"""
TAIL = """{%- endif %}{{- '<|stop|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""

CALLS = {
    "hermes": """{{- message.content }}
{%- for call in message.tool_calls or [] %}
    {{- '\\n<tool_call>\\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}
    {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}""",
    "jamba": """{%- if message.content %}{{- message.content }}{%- endif %}
{%- if message.tool_calls %}{{- '<tool_calls>[\\n    ' }}
    {%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
        {%- if not loop.last %}{{- ',\\n    ' }}{%- endif %}
    {%- endfor %}{{- '\\n]</tool_calls>' }}
{%- endif %}""",
    "qwen-coder": """{{- message.content }}
{%- for call in message.tool_calls or [] %}
    {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
    {%- for name, value in call.function.arguments | items %}
        {{- '<parameter=' + name + '>\\n' }}
        {{- (value | tojson | safe) if value is mapping or (value is sequence and value is not string)
            else (value | string) }}
        {{- '\\n</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</tool_call>' }}
{%- endfor %}""",
    "mistral": """{{- message.content }}
{%- if message.tool_calls %}{{- '[TOOL_CALLS] [' }}
    {%- for call in message.tool_calls %}
        {%- if call.id | length != 9 %}{{- raise_exception('a call id has nine letters and digits') }}{%- endif %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
        {{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}{{- ']' }}
{%- endif %}""",
    "mistral, by name": """{{- message.content }}
{%- for call in message.tool_calls or [] %}
    {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}""",
    "mistral, by name and id": """{{- message.content }}
{%- for call in message.tool_calls or [] %}
    {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}""",
    "llama3": """{#- "parameters" <|start_header_id|> #}{{- message.content }}
{%- for call in message.tool_calls or [] %}
    {%- if loop.first %}{{- '<|python_tag|>' }}{%- else %}{{- '; ' }}{%- endif %}
    {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
{%- endfor %}""",
    "llama3, bare": """{#- "parameters" <|start_header_id|> #}
{%- if not message.tool_calls %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}{%- if not loop.first %}{{- '; ' }}{%- endif %}
    {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
{%- endfor %}""",
    "lfm2": """{{- message.content }}
{%- if message.tool_calls %}{{- '<|tool_call_start|>[' }}
    {%- for call in message.tool_calls %}
        {{- call.function.name + '(' }}
        {%- for name, value in call.function.arguments | items %}
            {{- name + '=' + value | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}{{- ')' }}
        {%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}{{- ']<|tool_call_end|>' }}
{%- endif %}""",
    "granite": """{%- if message.tool_calls %}{{- message.content + '<|tool_call|>[' }}
    {%- for call in message.tool_calls %}
        {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
        {%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}{{- ']' }}
{%- else %}{{- message.content }}{%- endif %}""",
    "granite 3.1": """{#- <|start_of_role|> #}{{- message.content }}
{%- if message.tool_calls %}{{- '<tool_call>[' }}
    {%- for call in message.tool_calls %}
        {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
        {%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}{{- ']' }}
{%- endif %}""",
    "nemotron": """{{- message.content }}
{%- if message.tool_calls %}{{- '<TOOLCALL>[' }}
    {%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
        {%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}{{- ']</TOOLCALL>' }}
{%- endif %}""",
}
TEMPLATES = {name: HEAD + calls + TAIL for name, calls in CALLS.items()}


def parser_name(name: str) -> str:
    """The parser of a template's calls."""
    return name.partition(",")[0].partition(" ")[0]


def written_by_the_assistant(text: str) -> list[str]:
    """What a rendered conversation has in the place of each assistant's message."""
    parts = text.split("<|start|>assistant\n")[1:]
    return [part.partition("<|stop|>")[0] for part in parts]
