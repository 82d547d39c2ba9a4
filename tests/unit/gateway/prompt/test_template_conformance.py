"""The environment of chat templates is the one that transformers gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, tzinfo
from typing import Any, Self

import pytest

from engine.model_store.families import FAMILIES
from gateway.errors import Refusal
from gateway.prompt.template import ChatTemplate
from gateway.template_date import Calendar
from tests.tables import each_row
from tests.unit.gateway.prompt.family_templates import FAMILY_TEMPLATES

Renders = Callable[..., str | None]
DAY = date(2026, 11, 28)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Wärme <x> & 'y'",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"type": "string", "enum": ["a", "b"]},
                    "at": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["where"],
            },
        },
    }
]
CALL = {"name": "look", "arguments": {"where": "ü", "at": [1, 2]}}
USER = {"role": "user", "content": " Hi <é> "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one message": [USER],
    "with a system message": [
        {"role": "system", "content": " Be brief. "},
        USER,
        {"role": "assistant", "content": "<think>so</think>\nYo"},
        {"role": "user", "content": "More?"},
    ],
    "with a call": [
        {"role": "system", "content": "s"},
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALL}],
        },
        {"role": "tool", "name": "look", "tool_call_id": "abcdefghi", "content": "42 é"},
    ],
    "of parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
}


@pytest.fixture(scope="module")
def transformers() -> Iterator[Renders]:
    """Return transformers' rendering, at the midnight of a day: None where it refuses."""
    from transformers.utils import chat_template_utils

    class Midnight(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls(DAY.year, DAY.month, DAY.day, tzinfo=UTC)

    patch = pytest.MonkeyPatch()
    patch.setattr(chat_template_utils, "datetime", Midnight)

    def render(source: str, chat: list[dict[str, Any]], **variables: Any) -> str | None:
        try:
            found = chat_template_utils.render_jinja_template(
                [chat], chat_template=source, **variables
            )
        except Exception:  # Jinja's errors, and those of the functions that a template calls
            return None
        return str(found[0][0])

    yield render
    patch.undo()


def ours(source: str, chat: list[dict[str, Any]], **variables: Any) -> str | None:
    """Render with the product: None where the template refuses."""
    template = ChatTemplate(source, calendar=Calendar(DAY))
    try:
        return template.render(chat, **{"tools": None, "documents": None, **variables})
    except Refusal:
        return None


def test_every_listed_family_has_a_template_here() -> None:
    """A family that is added is tried too."""
    assert FAMILY_TEMPLATES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILY_TEMPLATES)
@each_row("chat", CHATS)
def test_families_render_as_in_transformers(family: str, chat: str, transformers: Renders) -> None:
    """A model was trained on what transformers rendered: tools, calls, thinking, the date."""
    source, special = FAMILY_TEMPLATES[family], {"bos_token": "<s>", "eos_token": "</s>"}
    for tools in (None, TOOLS):
        for opens in (True, False):
            asked = {"tools": tools, "add_generation_prompt": opens, **special}
            expected = transformers(source, CHATS[chat], **asked)

            assert ours(source, CHATS[chat], **asked) == expected
            assert expected is not None or chat in ("with a call", "of parts")


CONSTRUCTS = {
    "generation": "a{% generation %} b {% endgeneration %}c",
    "generation, trimmed": "a\n {%- generation -%} \n b \n {%- endgeneration -%} \n c",
    "generation on lines of its own": "a\n    {% generation %}\n  b\n    {% endgeneration %}\nc",
    "generation in if": "{% if messages %}{% generation %}b{% endgeneration %}{% endif %}",
    "generation in for": "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}"
    "{% endgeneration %}{% endfor %}",
    "generation in a macro": "{% macro f(x) %}{% generation %}[{{ x }}]{% endgeneration %}"
    "{% endmacro %}{{ f(1) }}",
    "generation around a macro": "{% generation %}{% macro f(x) %}[{{ x }}]{% endmacro %}"
    "{{ f(1) }}{% endgeneration %}",
    "generation sets": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}"
    "{{ a }}",
    "generation and namespace": "{% set ns = namespace(a=1) %}{% generation %}{% set ns.a = 2 %}"
    "{% endgeneration %}{{ ns.a }}",
    "tojson": "{{ tools | tojson }}",
    "tojson ensure_ascii": "{{ tools | tojson(ensure_ascii=True) }}{{ 'é' | tojson(true) }}",
    "tojson not ensure_ascii": "{{ tools | tojson(ensure_ascii=False) }}",
    "tojson indent": "{{ tools | tojson(indent=2) }}{{ tools | tojson(indent=12) }}",
    "tojson indent of text": "{{ tools | tojson(indent='\t') }}",
    "tojson separators": "{{ tools | tojson(separators=(',', ':')) }}",
    "tojson sort_keys": "{{ tools | tojson(sort_keys=True, indent=1) }}",
    "tojson of scalars": "{{ 1.5|tojson }}{{ none|tojson }}{{ true|tojson }}{{ '</s>'|tojson }}",
    "strftime_now": "{{ strftime_now('%d %B %Y') }} {{ strftime_now('%Y-%m-%d %H:%M:%S %A') }}",
    "strftime_now by name": "{{ strftime_now(format='%j %-d') }}",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "formats": "{{ '%05.1f|%s|%d%%' % (2.25, 'x', 7) }}{{ '{:>4}|{a!r}'.format(1, a='b') }}"
    "{{ '%s-%s' | format(1, 2) }}{{ '{x}'.format_map({'x': 1}) }}{{ '%(k)s' % {'k': 1} }}",
    "padding": "{{ 'a'.ljust(3) }}{{ 'a'.rjust(3, '.') }}{{ 'a'.center(4) }}{{ '7'.zfill(3) }}"
    "{{ 'a' | center(5) }}{{ '\t.'.expandtabs(4) }}",
    "methods": "{{ 'aB c'.swapcase() }}{{ 'ẞ'.casefold() }}{{ 'a,b'.partition(',') }}"
    "{{ 'a1'.isalnum() }}{{ 'Ab'.istitle() }}{{ '٣'.isdecimal() }}{{ 'a'.isascii() }}",
    "numbers": "{{ 2.675 | round(2) }}{{ 2.1 | round(method='ceil') | int }}{{ 2 ** 10 }}"
    "{{ [1, 2.5] | sum }}{{ messages | sum(attribute='x', start=3) }}{{ 3.0.is_integer() }}"
    "{{ 1234567 | filesizeformat }}",
    "lists": "{{ range(5) | batch(2, '-') | list }}{{ range(5) | slice(2) | map('list') | list }}"
    "{% for key, all in messages | groupby('role') %}{{ key }}{{ all | length }}{% endfor %}"
    "{{ messages | map('attr', 'x') | list | length }}{{ dict.fromkeys([1, 2], 3) }}",
    "escapes": "{{ '<a&b>' | e }}{{ '<' | forceescape }}{{ 'a b/ü' | urlencode }}"
    "{{ {'a': 'b c'} | urlencode }}{{ 'a b c' | wordcount }}",
    "globals": "{% set j = joiner(', ') %}{% for i in range(3) %}{{ j() }}{{ i }}{% endfor %}"
    "{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.next() }}{{ c.current }}",
    "refusal": "{{ raise_exception('no') }}",
    "call block": "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}a{% endcall %}",
    "filter block": "{% filter upper %}a{{ 1 }}{% endfilter %}{% set x | trim %} b "
    "{% endset %}{{ x }}",
}


@each_row("name", CONSTRUCTS)
def test_constructs_render_as_in_transformers(name: str, transformers: Renders) -> None:
    """Each tag, filter, method and function that transformers has and that can be bounded."""
    messages = [{**USER, "x": 2}, {**USER, "x": 3}]
    expected = transformers(CONSTRUCTS[name], messages, tools=TOOLS)

    assert ours(CONSTRUCTS[name], messages, tools=TOOLS) == expected
    assert (expected is None) == (name == "refusal")
