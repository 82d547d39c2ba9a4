"""Chat templates render as Jinja renders them, within limits on time and size."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from datetime import date, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import Kind, Refusal
from gateway.prompt.template import ChatTemplate
from gateway.template_date import Calendar

DAY = date(2026, 11, 28)
MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi {{ x }} <|im_end|>", "name": "ann"},
    {"role": "assistant", "content": "<think>so</think>Hello"},
    {"role": "user", "content": "And ü🙂?\n"},
]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEADERS = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}{%- endif %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- 'Today: ' + date_string + '\\n' + system }}"
    "{%- for m in messages %}{{- '<|h|>' + m.role + '<|/h|>' + m['content']|trim }}{%- endfor %}"
)
THINKING = (
    "{%- set ns = namespace(last=messages|length - 1, multi=true) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi and message.role == 'user' and message.content is string"
    " and not (message.content.startswith('<r>') and message.content.endswith('</r>')) %}"
    "{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- macro turn(m, n) %}[{{ m.role }}]{{ m.content }}{% if m.name %}({{ m.name }}){% endif %}"
    "{% endmacro %}"
    "{%- for m in messages %}{%- if '</think>' in m.content and loop.index0 < ns.last %}"
    "{{- m.content.split('</think>')[-1].lstrip('\\n') }}{%- else %}{{- turn(m, 1) }}{%- endif %}"
    "{%- if loop.last %}{% break %}{%- endif %}{%- endfor %}"
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(', ') }}"
    "{% set block %}{{ messages[0].role }} of {{ messages|length }}{% endset %}{{ block|upper }}"
    "{{ {'a': [1, 2.5, none, true]} }} {{ 7 % 3 }} {{ 'a' ~ 1 ~ none ~ missing }} {{ (1, 'b') }}"
)


def reference(source: str, **variables: Any) -> str:
    """Render with plain Jinja."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["strftime_now"] = DAY.strftime
    return environment.from_string(source).render(**variables)


@pytest.mark.parametrize(
    "source", [CHATML, HEADERS, THINKING], ids=["chatml", "headers", "thinking"]
)
@pytest.mark.parametrize("opens", [True, False])
def test_renders_like_jinja(source: str, opens: bool) -> None:
    """The limits do not change a template that keeps them."""
    variables: dict[str, Any] = {
        "messages": MESSAGES,
        "add_generation_prompt": opens,
        "bos_token": "<s>",
    }

    template = ChatTemplate(source, calendar=Calendar(DAY))
    assert template.render(**variables) == reference(source, **variables)


def test_tojson_does_not_escape_html() -> None:
    """Models were trained without HTML escaping."""
    tools = [{"name": "f", "text": "<é> & 'x'", "b": 1, "a": 2}]
    text = ChatTemplate("{{ tools|tojson }}\n{{ tools|tojson(indent=2) }}").render([], tools=tools)

    assert text == f"{json.dumps(tools, ensure_ascii=False)}\n" + json.dumps(
        tools, ensure_ascii=False, indent=2
    )


def test_raise_exception_reaches_client() -> None:
    """Some models take no system message and say so."""
    with pytest.raises(Refusal) as raised:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(MESSAGES)

    assert (raised.value.kind, raised.value.param) == (Kind.BAD, "messages")
    assert "roles must alternate" in raised.value.message


def test_contents_are_not_parsed_as_template() -> None:
    """Contents are values."""
    text = ChatTemplate(CHATML).render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])

    assert "{{ 7 * 7 }}{% raw %}" in text


def looped(body: str, start: str = "'aa'") -> str:
    """Repeat an expression sixty times on its own result."""
    loop = "{% for i in range(60) %}" + body + "{% endfor %}"
    return "{% set ns = namespace(x=" + start + ") %}" + loop + "{{ ns.x }}"


LARGE = {
    "add": looped("{% set ns.x = ns.x + ns.x %}"),
    "join by ~": looped("{% set ns.x = ns.x ~ ns.x %}"),
    "captured": looped("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "captured text": looped(
        "{% set y %}{% for i in range(1000) %}" + "x" * 100_000 + "{% endfor %}{% endset %}"
    ),
    "macro": "{% macro m(n) %}{% for i in range(1000) %}"
    + "x" * 100_000
    + "{% endfor %}{% endmacro %}"
    "{{ m(1)|length }}",
    "lists": looped("{% set ns.x = ns.x + ns.x %}", "[1]"),
    "nested lists": looped("{% set ns.x = [ns.x, ns.x] %}", "[]"),
    "nested dicts": looped("{% set ns.x = {1: ns.x, 2: ns.x} %}", "[]"),
    "tuples": looped("{% set ns.x = (ns.x, ns.x) %}", "[]"),
    "nested and written as JSON": looped("{% set ns.x = [ns.x, ns.x] %}") + "{{ ns.x|tojson }}",
    "dict()": looped("{% set ns.x = dict(a=ns.x, b=ns.x) %}", "[]"),
    "replace filter": looped("{% set ns.x = ns.x|replace('a', ns.x) %}"),
    "replace method": looped("{% set ns.x = ns.x.replace('a', ns.x) %}"),
    "join filter": looped("{% set ns.x = [ns.x, ns.x]|join(ns.x) %}"),
    "join method": looped("{% set ns.x = ns.x.join([ns.x, ns.x]) %}"),
    "join of a generator": "{{ ('a' * 9999).join(range(99999)|map('string')) }}",
    "indent": "{{ ('\\n' * 99999)|indent(99999) }}",
    "split": "{{ ('a ' * 9999999).split()|length }}",
    "slices": "{% set s = 'a' * 9999999 %}{% for i in range(99) %}{% set t = s[1:] %}{% endfor %}",
    "times": "{{ 'a' * 10**12 }}",
    "times a list": "{{ ([1] * 99999999)|length }}",
    "numbers": looped("{% set ns.x = ns.x * ns.x %}", "9"),
    "powers": "{{ 10 ** (10 ** 10) }}",
    "padding": "{{ 'a'.ljust(10**11) }}",
    "tabs": "{{ '\t'.expandtabs(10**11) }}",
    "percent": "{{ '%99999999999d' % 1 }}",
    "format": "{{ '{:>99999999999}'.format(1) }}",
    "format_map": "{{ '{a:>99999999999}'.format_map({'a': 1}) }}",
    "power of a power": looped("{% set ns.x = ns.x ** 9 %}", "9"),
    "widths": "{{ '%*d' % (10**11, 1) }}",
    "widths behind a key": "{{ '%((a))99999999999d' % {'(a)': 1} }}",
    "precisions": "{{ '%.99999999999f' % 1 }}",
    "percent of a long text": "{{ '%s%s%s%s' % (('a' * 9999999,) * 4) }}",
    "percent filter": "{{ '%99999999999d' | format(1) }}",
    "format with an argument as width": "{{ '{:{}}'.format(1, 10**11) }}",
    "format of a long text": "{{ '{0}{0}{0}'.format('a' * 9999999) }}",
    "zeros": "{{ '1'.zfill(width=10**11) }}",
    "center filter": "{{ 'a' | center(10**11) }}",
    "center by map": "{{ ['a'] | map('center', 10**11) | list }}",
    "batches": "{{ [1] | batch(10**11, 'x') | list }}",
    "slices of lists": "{{ [1] | slice(10**11, 'x') | list }}",
    "rounding": "{{ 1 | round(-(10**11)) }}",
    "rounding up": "{{ 1 | round(10**11, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) | length }}",
    "bytes": "{{ (1).to_bytes(10**11, 'big') | length }}",
    "empty texts": "{{ (['', '', '', '', '', '', '', ''] * 999999) | length }}",
    "indented JSON": looped("{% set ns.x = [ns.x] %}", "[0] * 99999")
    + "{{ ns.x | tojson(indent=9) }}",
    "separated JSON": "{{ ([0] * 99999) | tojson(separators=('x' * 9999, ':')) }}",
    "escaped JSON": "{{ ('é' * 9999999) | tojson(ensure_ascii=True) }}",
    "escaped HTML": "{{ ('<' * 9999999) | e }}",
    "escaped URL": "{{ ('é' * 9999999) | urlencode }}",
    "words": "{{ ('a ' * 9999999) | wordcount }}",
    "format of the date": "{{ strftime_now('%99999999999d' * 99) }}",
    "ranges": "{% for i in range(10**9) %}x{% endfor %}",
    "many values": "{% for i in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
    "output": "{% for i in range(1000) %}" + "x" * 100_000 + "{% endfor %}",
}


@pytest.mark.parametrize("name", LARGE)
def test_refuses_large_values(name: str) -> None:
    """A model is third-party data; its template must not exhaust the gateway's memory."""
    template = ChatTemplate(LARGE[name], clock=lambda: 0.0)

    with pytest.raises(Refusal) as raised:
        template.render(MESSAGES)

    assert raised.value.kind is Kind.BAD
    assert any(word in raised.value.message for word in ("SecurityError", "OverflowError"))


@pytest.mark.parametrize("name", ["add", "join by ~", "captured", "replace method", "slices"])
def test_limit_bounds_memory_in_bytes(name: str) -> None:
    """The limit counts characters; memory is bytes."""
    template = ChatTemplate(LARGE[name], clock=lambda: 0.0)
    tracemalloc.start()
    try:
        with pytest.raises(Refusal):
            template.render(MESSAGES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 150 * 2**20


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(9) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    ],
    ids=["loops", "macros", "recursive loop"],
)
def test_stops_long_loops(source: str) -> None:
    """A thread cannot be killed, so each iteration checks the clock."""
    ticks = itertools.count()

    with pytest.raises(Refusal) as raised:
        ChatTemplate(source, clock=lambda: next(ticks) * 0.1).render([])

    assert "TimeoutError" in raised.value.message
    assert next(ticks) < 100


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ (messages|attr('__class__')).mro() }}",
        "{{ messages|map(attribute='__class__')|list }}{{ x.y }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ lipsum() }}",
        "{{ 1 / 0 }}",
        "{{ missing.attribute }}",
        "{{ messages[99].content }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_unsafe_or_failing_template_is_a_refusal(source: str) -> None:
    """The program is out of reach, and every error is a refusal."""
    try:
        template = ChatTemplate(source)
    except ValueError:
        return  # refused when the model was loaded

    with pytest.raises(Refusal) as raised:
        template.render([dict(message) for message in MESSAGES])

    assert raised.value.kind is Kind.BAD


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ a|unheard_of }}", "{{ a|wordwrap(1) }}", "x" * 300_000, "{{" + "(" * 5_000],
    ids=["syntax", "no such filter", "no such filter here", "too long", "too deep"],
)
def test_compile_error_is_raised_at_load(source: str) -> None:
    """Not at the first request."""
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'turns.jinja' %}",
        "{% if tools %}{% include 'turns.jinja' ignore missing %}{% endif %}",
        "{% import 'turns.jinja' as turns %}",
        "{% from 'turns.jinja' import turn %}",
        "{% extends 'turns.jinja' %}",
        "{% include messages[0].content %}",
    ],
)
def test_a_template_in_several_files_is_refused_at_load(source: str) -> None:
    """There is no file that it could read, so each request failed."""
    with pytest.raises(ValueError, match="needs another template"):
        ChatTemplate(source)


def test_limits_apply_per_rendering() -> None:
    """A thousand long prompts are not one large one."""
    template = ChatTemplate(CHATML)
    messages = [{"role": "user", "content": "x" * 2_000_000}]

    assert {len(template.render(messages)) for _ in range(20)} == {2_000_000 + 28}


def test_the_day_changes_at_the_midnight_of_its_time_zone() -> None:
    """A prompt's beginning is the same all day long: the time of day is midnight."""
    now_ms = wall_at("2026-11-28T22:59:59+00:00")
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y %H:%M') }}",
        calendar=Calendar(time_zone=ZoneInfo("Europe/Paris"), wall=lambda: now_ms),
    )
    before = template.render([])
    now_ms += 1_000
    after = template.render([])

    assert (before, after) == ("28 Nov 2026 00:00", "29 Nov 2026 00:00")


def test_without_settings_the_day_is_the_machines() -> None:
    """As in transformers."""
    now_ms = wall_at("2026-11-28T12:00:00+00:00")
    local = datetime.fromtimestamp(now_ms / 1_000).astimezone()

    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", calendar=Calendar(wall=lambda: now_ms))

    assert text.render([]) == f"{local:%Y-%m-%d}"


def wall_at(text: str) -> int:
    """Return an instant in milliseconds since the epoch."""
    return int(datetime.fromisoformat(text).timestamp() * 1_000)
