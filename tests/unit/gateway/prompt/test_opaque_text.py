"""Opaque texts can be written by a template but not read: every read is recorded."""

from __future__ import annotations

import pytest

from gateway.errors import Refusal
from gateway.prompt.layout import placeholder
from gateway.prompt.opaque_text import TRIMMED, OpaqueText, ReadRecorder
from gateway.prompt.template import ChatTemplate
from tests.tables import each_row

WRITES = (
    "{{ m.content }}",
    "{{ '<' + m.content + '>' }}",
    "{{ '<' ~ m.content ~ m.content ~ 1 }}",
    "{% set c = m.content %}{{ c }}",
    "{% if m.content is string %}{{ m.content }}{% else %}?{% endif %}",
    "{% if m.content is defined and m.content is not none %}{{ m.content }}{% endif %}",
    "{% if m.role == 'user' %}{{ m['content'] }}{% endif %}",
    "{{ m.content if m.content is not mapping else '' }}",
    "{% set ns = namespace(c=m.content) %}{{ ns.c }}",
    "{{ messages | map(attribute='content') | first }}",
    "{{ m.content | default('none') }}",
)
LOOKS = (
    "{% if m.content %}a{% endif %}",
    "{% if not m.content %}a{% endif %}",
    "{% if m.content == 'a' %}a{% endif %}",
    "{% if 'a' == m.content %}a{% endif %}",
    "{% if m.content != 'a' %}a{% endif %}",
    "{% if 'a' in m.content %}a{% endif %}",
    "{% if m.content in 'abc' %}a{% endif %}",
    "{% if m.content in ['a'] %}a{% endif %}",
    "{% if m.content < 'b' %}a{% endif %}",
    "{% if {'a': 1}[m.content] %}a{% endif %}",
    "{% if m.content is sequence %}a{% endif %}",
    "{% if m.content is iterable %}a{% endif %}",
    "{% if m.content is lower %}a{% endif %}",
    "{% if m.content is eq 'a' %}a{% endif %}",
    "{% if m.content.strip is defined %}a{% endif %}",
    "{% if m.content.text is defined %}a{% endif %}",
    "{% if m.content.trimmed is defined %}a{% endif %}",
    "{% if m.content['text'] is defined %}a{% endif %}",
    "{% if 'abc'.startswith(m.content) %}a{% endif %}",
    "{% if messages | selectattr('content') | list %}a{% endif %}",
    "{{ m.content | length }}",
    "{{ m.content | upper }}",
    "{{ m.content | int }}",
    "{{ m.content | float }}",
    "{{ m.content | list }}",
    "{{ m.content | first }}",
    "{{ m.content | string }}",
    "{{ m.content | tojson }}",
    "{{ m.content | safe }}",
    "{{ m.content | replace('a', 'b') }}",
    "{{ 'abc' | replace('a', m.content) }}",
    "{{ m.content | trim('a') }}",
    "{{ ('a' + m.content) | trim }}",
    "{{ m.content | default('none', true) }}",
    "{{ [m.content] | join }}",
    "{{ [m.content] | sort }}",
    "{{ [m.content, m.content] | unique | list }}",
    "{{ m.content[1:] }}",
    "{{ m.content[0] }}",
    "{{ m.content * 2 }}",
    "{{ m.content + 1 }}",
    "{{ m.content.split('a')[0] }}",
    "{{ m.content.upper() }}",
    "{{ m }}",
    "{{ [m.content] }}",
    "{{ range(m.content) | list }}",
    "{% for sign in m.content %}{{ sign }}{% endfor %}",
)


def rendered(source: str) -> tuple[str | None, bool]:
    """Return (the output or None if it failed, whether the text was read)."""
    recorder = ReadRecorder()
    messages = [{"role": "user", "content": OpaqueText(placeholder(0), recorder, is_whole=True)}]
    template = ChatTemplate("{% set m = messages[0] %}" + source)
    try:
        return template.render(messages), recorder.was_read
    except Refusal:
        return None, recorder.was_read


@each_row("source", WRITES)
def test_written_text_appears_unchanged(source: str) -> None:
    """Most templates do no more with most messages."""
    text, was_looked_at = rendered(source)

    assert placeholder(0) in (text or "")
    assert not was_looked_at


@each_row("source", LOOKS)
def test_records_every_read(source: str) -> None:
    """A template that reads a placeholder would render the wrong prompt."""
    text, was_looked_at = rendered(source)

    assert was_looked_at or text is None


@pytest.mark.parametrize("source", ["{{ m.content | trim }}", "{{ m.content | trim | trim }}"])
def test_records_trim_of_whole_content(source: str) -> None:
    """Twice is the same as once."""
    text, was_looked_at = rendered(source)

    assert text == f"{placeholder(0)[:-1]}{TRIMMED}{placeholder(0)[-1]}"
    assert not was_looked_at


def test_detects_captured_output() -> None:
    """Captured output becomes ordinary text that a template can read."""
    assert ChatTemplate("{% set a %}{{ messages }}{% endset %}{{ a | upper }}").has_captures
    assert ChatTemplate("{% macro a(m) %}{{ m }}{% endmacro %}{{ a(1) | upper }}").has_captures
    assert not ChatTemplate("{% set a = 1 %}{{ messages }}").has_captures
