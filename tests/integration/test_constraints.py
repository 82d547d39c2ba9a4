"""Answers that a pattern, a choice or a grammar constrains, and refusals that name the field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.tables import each_row
from tests.unit.gateway.gateway_fixture import GatewayFixture

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
}
GBNF = r"""
root  ::= both{2}   # a comment
both  ::= "\x28"
  "x"?  [)] space
space ::= " "
"""
LARK = 'start: "no" | digits\ndigits: /[0-9]{3}/'


@pytest.fixture
def unopened_gateway(unopened_gateway: GatewayFixture) -> GatewayFixture:
    """A gateway whose engine compiles grammars."""
    unopened_gateway.takes_grammars = True
    return unopened_gateway


async def ask(gateway: GatewayFixture, path: str, **fields: Any) -> tuple[int, Any]:
    """Return the status and the answer's text, or the error."""
    status, found, _ = await gateway.ask(path, {"model": gateway.model, **PATHS[path], **fields})
    if status != 200:
        return status, found["error"]
    if "output" in found:
        return status, found["output"][0]["content"][0]["text"]
    choice = found["choices"][0]
    return status, choice["text"] if "text" in choice else choice["message"]["content"]


@each_row("path", sorted(PATHS))
@each_row(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[xyz]{4}"}, "[xyz]{4}"),
        ({"guided_choice": ["yes.", "no?"]}, r"yes\.|no\?"),
        ({"guided_grammar": LARK}, "no|[0-9]{3}"),
        ({"guided_grammar": GBNF}, r"(\(x?\) ){2}"),
        ({"grammar": GBNF}, r"(\(x?\) ){2}"),
        ({"ebnf": 'root ::= nested\nnested ::= "(" nested ")" | "ab"'}, r"(\()*ab(\))*"),
        ({"structured_outputs": {"choice": ["a b", "c"]}}, "a b|c"),
    ],
)
async def test_answer_satisfies_its_constraint(
    gateway: GatewayFixture, path: str, fields: dict[str, Any], pattern: str
) -> None:
    status, text = await ask(gateway, path, **fields)

    assert status == 200
    assert re.fullmatch(pattern, text)
    await gateway.check_quiet()


@each_row("path", sorted(PATHS))
@each_row(
    ("fields", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
        ({"guided_grammar": "root ::= nowhere"}, "guided_grammar"),
        ({"ebnf": 'root ::= root "a"'}, "ebnf"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
    ],
)
async def test_unusable_constraint_is_refused_by_name(
    gateway: GatewayFixture, path: str, fields: dict[str, Any], param: str
) -> None:
    """Not as a schema, which the client did not send."""
    status, error = await ask(gateway, path, **fields)

    assert (status, error["code"], error["param"]) == (400, "grammar_invalid", param)
    assert "schema" not in error["message"]
    await gateway.check_quiet()
