"""Short chat templates in the manner of model families. Each has its family's difficulty: it writes
tools in an unusual position, trims, drops or refuses messages."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from engine.model_store import ModelCard
from gateway.prompt import Renderer
from gateway.template_date import Calendar

HERMES = """
{%- if tools %}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
# Tools
<tools>
{%- for tool in tools %}
{{ '\n' + (tool | tojson) }}
{%- endfor %}
{{ '\n' }}</tools>
Answer with <tool_call> and </tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
       or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}
{%- if call.function is defined %}{% set call = call.function %}{% endif %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

LLAMA3 = """
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|im_start|>system\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\n' }}{% endif %}
{{- system + '<|im_end|>' }}
{%- if tools is not none %}
{%- set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{{- '<|im_start|>user\nAnswer with {"name": name, "parameters": arguments}.\n\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
{{- first + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|im_start|>assistant\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}
{{- '}<|im_end|>' }}
{%- else %}
{{- '<|im_start|>ipython\n' }}
{%- if message.content is mapping or message.content is iterable %}
{{- message.content | tojson }}
{%- else %}{{ message.content }}{% endif %}
{{- '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and message == users[-1] %}
{{- '[AVAILABLE_TOOLS] [' }}
{%- for tool in tools %}{{ tool | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}
{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be strings with length 9!') }}
{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
{{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}
{{- '[SYSTEM] ' + message.content }}
{%- endif %}
{%- endfor %}
"""

ITERATING = HERMES.replace(
    "{{- call.arguments | tojson }}",
    "{%- for name, value in call.arguments | items %}{{ name }}={{ value | tojson }};{% endfor %}",
)
"""Writes arguments one by one, as some do in tags."""

THINKING = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if message.reasoning_content is string and loop.last %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}
{%- elif enable_thinking is defined %}{{ '<think>\n' }}{% endif %}
{%- endif %}
"""
"""Drops the thoughts of all answers but a last one, and has a switch for new ones."""

HARMONY = """
{%- if tools is not none %}
{{- '<|start|>developer<|message|>' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|end|>' }}
{%- endif %}
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.thinking is string and loop.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
"""Writes channels and the effort, and drops the thoughts of earlier answers."""

GEMMA2 = """
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

DROPPING = GEMMA2.replace(
    "{{ raise_exception('no system role') }}", "{% set messages = messages[1:] %}"
)


def with_template(
    card: ModelCard, template: str, folder: Path, calendar: Calendar | None = None
) -> Renderer:
    """Return a model's renderer with another template. `folder`: an empty one, for its copy."""
    shutil.copytree(Path(card.folder), folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return Renderer(msgspec.structs.replace(card, folder=str(folder)), calendar)


def text_of(renderer: Renderer, ids: Iterable[int]) -> str:
    """Return tokens as text, special tokens as the template writes them."""
    plain = renderer.tokenizer.token_bytes
    parts = (plain(one) or renderer.special_text(one).encode() for one in ids)
    return b"".join(parts).decode()
