"""Chat templates written anew with the constructs of those that each listed family publishes.

Each is short and has what its family's template is known for: tags, filters, methods, macros,
namespaces, the date. `test_template_conformance` renders them beside transformers.
"""

from __future__ import annotations

_TURNS = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

_LLAMA = """
{{- bos_token }}
{%- if not day is defined and strftime_now is defined %}{% set day = strftime_now("%d %b %Y") %}
{%- endif %}
{%- set head = messages[0]['content']|trim if messages[0]['role'] == 'system' else '' %}
{%- set rest = messages[1:] if head else messages %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + day + "\\n\\n" + head }}
{%- for t in (tools or []) %}{{ "\\n" + t | tojson(indent=4) }}{% endfor %}
{%- for m in rest %}
    {%- if 'tool_calls' in m %}
        {%- if not m.tool_calls|length == 1 %}{{ raise_exception("one call at a time") }}{% endif %}
        {%- set f = m.tool_calls[0].function %}
        {{- '{"name": "' + f.name + '", "parameters": ' + f.arguments|tojson + "}" }}
    {%- elif m.role in ('ipython', 'tool') and (m.content is mapping or m.content is iterable) %}
        {{- m.content | tojson }}
    {%- else %}
        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_MISTRAL = """
{%- set today = strftime_now("%Y-%m-%d") %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' and messages[0]['content'] is string %}
    {%- set head = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set head = "The date is " + today + "." %}{% set rest = messages %}{% endif %}
{{- '[SYSTEM_PROMPT]' + head + '[/SYSTEM_PROMPT]' }}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(turn=0) %}
{%- for m in rest if not (m.role == "tool" or m.tool_calls is defined) %}
    {%- if (m["role"] == "user") != (ns.turn % 2 == 0) %}
        {{- raise_exception("user and assistant must alternate") }}
    {%- endif %}
    {%- set ns.turn = ns.turn + 1 %}
{%- endfor %}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and (m == users[-1]) %}
            {%- for tool in tools %}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' + ('"' + val + '"' if val is string else val|tojson) }}
                    {{- ", " if not loop.last }}
                {%- endfor %}
            {%- endfor %}
        {%- endif %}
        {{- '[INST]' + m['content'] + '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {%- for call in m.tool_calls %}
            {{- (call.function|tojson)[:-1] + ', "id": "' + call.id[-9:] + '"}' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'assistant' %}{{ m['content'] + eos_token }}
    {%- else %}{{ '[TOOL_RESULTS]' + m.content|string + '[/TOOL_RESULTS]' }}{% endif %}
{%- endfor %}
"""

_QWEN = """
{%- if tools %}{{ '<|im_start|>system\\n# Functions' }}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(asked=false, at=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- if not seen.asked and m.role == "user" and m.content is string
           and not (m.content.startswith('<r>') and m.content.endswith('</r>')) %}
        {%- set seen.asked = true %}{% set seen.at = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set text = m.content if m.content is string else '' %}
    {%- if m.role == "assistant" %}
        {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if '</think>' in text %}
            {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > seen.at and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in m.tool_calls or [] %}
            {%- if text or not loop.first %}{{ '\\n' }}{% endif %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + text }}
    {%- endif %}
    {%- if m.role != 'tool' or loop.last or loop.nextitem.role != 'tool' %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>' }}
    {%- endif %}
{%- endif %}
"""

_SMOLLM3 = """
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" %}
{{- "<|im_start|>system\\n" -}}
{%- set today = strftime_now("%d %B %Y") -%}
{{- "Today Date: " ~ today ~ "\\nReasoning Mode: " + reasoning_mode + "\\n\\n" -}}
{%- if messages and messages[0].role == "system" -%}
    {%- set custom = messages[0].content.replace("/no_think", "").replace("/think", "").rstrip() -%}
    {{- custom + "\\n\\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}
            {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content + "<|im_end|>\\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}
        {{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" }}{%- endif -%}
"""

_GEMMA = """
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if message['role'] == 'assistant' -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

_PHI = """
{%- for message in messages %}
{%- if message['role'] == 'system' and tools %}
{{- '<|system|>' + message['content'] + '<|tool|>' + (tools | tojson(ensure_ascii=False)) }}
{{- '<|/tool|>' + '<|end|>' }}
{%- else %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""

_GRANITE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Today's Date: " + strftime_now('%B %d, %Y') + "." %}
    {%- if tools and documents %}{% set system_message = system_message + " Both." %}
    {%- elif tools %}{% set system_message = system_message + " Tools." %}{% endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' }}
    {{- tools | tojson(indent=4) }}
    {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- if controls is defined %}{{ controls | map('trim') | join(',') }}{% endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] }}
    {{- '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{ ' ' + controls | tojson() }}{% endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

_GRANITE_4 = """
{%- set tools_prefix = 'You may call these functions, each on a line:\\n<tools>' %}
{%- set g = namespace(system='', tools='') %}
{%- if tools %}
    {%- for tool in tools %}{% set g.tools = g.tools + '\\n' + (tool | tojson) %}{% endfor %}
    {%- set g.tools = tools_prefix + g.tools + '\\n</tools>' %}
{%- endif %}
{%- if messages[0].role == 'system' and messages[0].content is string %}
    {%- set g.system = messages[0].content %}
{%- endif %}
{%- if g.tools %}
    {%- set g.system = (g.system + '\\n\\n' if g.system else '') + g.tools %}
{%- endif %}
{%- if g.system %}
    {{- '<|start_of_role|>system<|end_of_role|>' + g.system + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = namespace(value='') %}
    {%- if message.content is string %}{% set content.value = message.content %}
    {%- elif message.content is iterable %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}
                {%- set content.value = content.value + part.text %}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + content.value }}
        {{- '<|end_of_text|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' + content.value }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content.value) or not loop.first %}{{- '\\n' }}{% endif %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end_of_text|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|start_of_role|>user<|end_of_role|>' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content.value + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|end_of_text|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}
"""

_COHERE = """
{%- macro document_turn(documents) -%}
<|START_TURN|>{% for document in documents %}{{ document['text'] | default('none') }}{% endfor %}
{%- endmacro %}
{%- macro number_of(messages, tool_call_id) %}
{%- set counter = namespace(value=0) %}{% set found = namespace(value=false) %}
{%- for msg in messages %}
    {%- if msg.tool_calls %}
        {%- for tool_call in msg.tool_calls %}
            {%- if tool_call.id == tool_call_id and not found.value -%}
                {{ counter.value }}{% set found.value = true %}
            {%- endif %}
            {%- set counter.value = counter.value + 1 %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- endmacro %}
{{- bos_token }}{{ document_turn(documents or []) }}
{%- set ns = namespace(turns=[]) %}
{%- for message in messages %}
    {%- if message.role|lower == 'tool' %}
        {{- '<|RESULT|>[' + number_of(messages, message.tool_call_id) + ']' }}
        {{- {'output': message.content} | tojson }}
    {%- else %}
        {%- set ns.turns = ns.turns + [message.role | upper] %}
        {{- '<|' ~ (message.role | upper) ~ '_TOKEN|>' ~ (message.content or '') | trim }}
        {%- for tc in message.tool_calls or [] %}
            {{- {'tool': tc['function']['name'], 'with': tc['function']['arguments']} | tojson }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{{- ns.turns | unique | list | length }}
{%- for tool in tools or [] %}
    {{- tool['function'] | dictsort | map('first') | join('|') | replace('name', 'NAME') }}
{%- endfor %}
"""

_GLM = """
[gMASK]<sop>
{%- macro shown(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content if item.type == 'text' -%}{{- item.text }}{%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- set latest = namespace(user=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set latest.user = loop.index0 -%}{% endfor %}
{% for m in messages %}
{%- if m.role == 'assistant' -%}
<|assistant|>
{%- set text = shown(m.content) %}
{%- if loop.index0 > latest.user and '</think>' in text %}
{{ '\\n<think>' + ((text.split('</think>')|first).split('<think>')|last).strip() + '</think>' }}
{%- endif %}
{%- if text.strip() -%}{{ '\\n' + text.strip() }}{%- endif -%}
{% for call in m.tool_calls or [] %}
{% set given = call.function.arguments %}
{{ '\\n<tool_call>' + call.function.name }}
{% for k, v in given.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{%- else -%}
<|{{ 'observation' if m.role == 'tool' else m.role }}|>
{{ shown(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""

_GPT_OSS = """
{%- macro type_of(spec) -%}
    {%- if spec.type == "array" -%}
        {{- type_of(spec['items']) + "[]" if spec['items'] else "any[]" }}
    {%- elif spec.type is iterable and spec.type is not string -%}{{- spec.type | join(" | ") }}
    {%- elif spec.type == "string" and spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- elif spec.type == "object" -%}
        {%- for name, inner in spec.properties.items() -%}
            {{- name -}}{%- if name not in (spec.required or []) -%}{{- "?" }}{%- endif -%}
            {{- ": " }}{{ type_of(inner) }}{%- if not loop.last -%}{{- ", " }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- spec.type }}{%- endif -%}
{%- endmacro -%}
{%- macro head() -%}
    {{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n" }}
    {%- if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}
    {{- "Reasoning: " + reasoning_effort }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{ head() }}{{ "<|end|>" }}
{%- for tool in tools or [] %}
    {{- "type " + tool.function.name + " = " + type_of(tool.function.parameters) + ";\\n" }}
{%- endfor %}
{%- for m in messages -%}
    {{- "<|start|>" + m.role }}
    {%- if m.tool_calls -%}
        {{- " to=" + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments|tojson }}
    {%- else -%}
        {{- "<|message|>" + (m.content|tojson if m.role == 'tool' else m.content) + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

_DEEPSEEK = """
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(called=false, result=false, system='') %}
{%- for m in messages %}{%- if m['role'] == 'system' %}
{%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + m['content'] %}
{%- endif %}{%- endfor %}
{{ bos_token }}{{ ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{%- set ns.result = false -%}{{ '<|User|>' + m['content'] }}
{%- elif m['role'] == 'assistant' and m['tool_calls'] %}
{%- for call in m['tool_calls'] %}
{%- if not ns.called %}{{ '<|Assistant|>' }}{%- set ns.called = true -%}{%- endif %}
{{ call['type'] + '<|sep|>' + call['function']['name'] }}
{{ call['function']['arguments'] | tojson }}
{%- endfor %}
{%- elif m['role'] == 'assistant' %}
{%- set text = m['content'] %}
{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}
{{ '<|Assistant|>' + text + eos_token }}
{%- elif m['role'] == 'tool' %}{%- set ns.result = true -%}{{ '<|tool_output|>' + m['content'] }}
{%- endif %}{%- endfor -%}
{% if add_generation_prompt and not ns.result %}{{ '<|Assistant|><think>\\n' }}{% endif %}
"""

_LFM2 = """
{{- bos_token -}}
{%- set head = "" -%}
{%- set ns = namespace(head="") -%}
{%- if messages[0]["role"] == "system" -%}
{%- set ns.head = messages[0]["content"] -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
{%- set ns.head = ns.head + ("\n" if ns.head else "") + "Tools: <|tool_list_start|>[" -%}
{%- for tool in tools -%}
{%- if tool is not string -%}{%- set tool = tool | tojson -%}{%- endif -%}
{%- set ns.head = ns.head + tool + ("" if loop.last else ", ") -%}
{%- endfor -%}
{%- set ns.head = ns.head + "]<|tool_list_end|>" -%}
{%- endif -%}
{%- if ns.head -%}{{- "<|im_start|>system\n" + ns.head + "<|im_end|>\n" -}}{%- endif -%}
{%- for message in messages -%}
{{- "<|im_start|>" + message["role"] + "\n" -}}
{%- set content = message["content"] -%}
{%- if content is not string -%}{%- set content = content | tojson -%}{%- endif -%}
{%- if message["role"] == "tool" -%}
{%- set content = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}
{%- endif -%}
{{- content + "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""

_QWEN_XML = """
{%- macro text_of(content) %}
{%- if content is string %}{{- content }}
{%- elif content is iterable and content is not mapping %}
{%- for item in content %}{%- if 'text' in item %}{{- item.text }}{%- else %}
{{- raise_exception('unknown item') }}{%- endif %}{%- endfor %}
{%- elif content is none or content is undefined %}{{- '' }}
{%- endif %}
{%- endmacro %}
{%- if not messages %}{{- raise_exception('no messages') }}{%- endif %}
{%- if tools and tools is iterable and tools is not mapping %}
{{- '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
{%- if message.role == 'user' and ns.last == messages|length - 1 %}
{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = text_of(message.content)|trim %}
{{- '<|im_start|>' + message.role + '\n' + content }}
{%- if message.tool_calls is defined and message.tool_calls is iterable %}
{%- for call in message.tool_calls %}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\n<tool_call>\n<function=' + call.name + '>\n' }}
{%- for name, value in call.arguments|items %}
{{- '<parameter=' + name + '>\n' }}
{%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not
string) else value | string %}
{{- value }}{{- '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is true %}{{- '<think>\n' }}
{%- else %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

_NEMOTRON = """
{%- set given = messages[0].role == 'system' -%}
<SPECIAL_10>System
{{ messages[0].content | trim if given else '' }}
{%- for m in (messages[1:] if given else messages) %}
{%- if m.role == 'assistant' %}
<SPECIAL_11>Assistant
{% if '</think>' in m.content %}{{ (m.content.split('</think>') | last).strip() }}
{%- else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
<TOOLCALL>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{%- endfor %}
{%- elif m.content is string %}
<SPECIAL_11>{{ 'Tool' if m.role == 'tool' else 'User' }}
{{ m.content }}
{%- else %}
<SPECIAL_11>User
{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<SPECIAL_11>Assistant
{% endif %}"""

FAMILY_TEMPLATES = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral3": _MISTRAL,
    "mixtral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen2_moe": _TURNS,
    "qwen3_moe": _QWEN,
    "phi3": _PHI,
    "smollm3": _SMOLLM3,
    "olmo2": _TURNS,
    "olmo3": _QWEN,
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE_4,
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "cohere2": _COHERE,
    "glm4": _GLM,
    "glm4_moe": _GLM,
    "glm4_moe_lite": _GLM,
    "gpt_oss": _GPT_OSS,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "qwen3_next": _QWEN,
    "qwen3_5_text": _QWEN_XML,
    "qwen3_5_moe_text": _QWEN_XML,
    "nemotron_h": _NEMOTRON,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
"""A template for each `model_type` that runs."""
