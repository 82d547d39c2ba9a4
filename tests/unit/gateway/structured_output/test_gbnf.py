"""GBNF to Lark: rules, terminals and texts, and what is refused."""

from __future__ import annotations

import pytest

from gateway.structured_output.gbnf import GbnfError, is_gbnf, translate_gbnf
from tests.tables import each_row


@each_row(
    ("gbnf", "lark"),
    [
        ('root ::= "a" | "b"', 'start: T0\nT0: "a" | "b"\n'),
        ('root ::= "a"* "b"+ x?\nx ::= "c"', 'start: T0\nT0: "a"* "b"+ T1?\nT1: "c"\n'),
        (
            'root ::= ("a" "b"){2} "c"{1,} "d"{0,3}',
            'start: T0\nT0: ( "a" "b" ){2,2} "c"{1,} "d"{0,3}\n',
        ),
        ('root ::= "(" root ")" | "a"', 'start: r0\nr0: "(" r0 ")" | "a"\n'),
        (
            'root ::= a-b\na-b ::= "x" root | y\ny ::= "y"',
            'start: r0\nr0: r1\nr1: "x" r0 | T2\nT2: "y"\n',
        ),
        ("root ::= [a-z0-9_]", "start: T0\nT0: /[a-z0-9\\x{5F}]/\n"),
        (r"root ::= [^\]\-x-]", "start: T0\nT0: /[^\\x{5D}\\x{2D}x\\x{2D}]/\n"),
        (r'root ::= "\x41\u00e9\n\"\\ *"', 'start: T0\nT0: "A\u00e9\\n\\"\\\\ *"\n'),
        ("root ::= . # any\n", "start: T0\nT0: /(?s:.)/\n"),
        ('root ::= "a" |', 'start: T0\nT0: "a" | ""\n'),
        ('root ::= ("a" | ) "b"', 'start: T0\nT0: ( "a" | "" ) "b"\n'),
        ('root ::=\n  "a"\n  | "b"', 'start: T0\nT0: "a" | "b"\n'),
    ],
)
def test_translates_to_lark(gbnf: str, lark: str) -> None:
    """A rule without recursion is a terminal, in capitals."""
    assert is_gbnf(gbnf)
    assert translate_gbnf(gbnf) == lark


@each_row(
    ("gbnf", "says"),
    [
        ("::=", "before the first rule"),
        ("root ::= (", "without '\\)'"),
        ("root ::= )", "without '\\('"),
        ("root := x", "unexpected text: ':= x'"),
        ('root ::= "a', "unexpected text"),
        ("root ::= y", "'y' is not defined"),
        ("a ::= a", "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "'root' is defined twice"),
        ("root ::= *", "nothing to repeat before '\\*'"),
        ('root ::= "a"{3,2}', "larger second number"),
        ('root ::= "a"{10001}', "at most 10000"),
        ("root ::= [z-a]", "reversed"),
        (r'root ::= "\uD800"', "no character"),
    ],
)
def test_refuses_what_is_no_grammar(gbnf: str, says: str) -> None:
    with pytest.raises(GbnfError, match=says):
        translate_gbnf(gbnf)


def test_lark_stays_lark() -> None:
    """Also if a text in it looks like a definition."""
    assert not is_gbnf('start: "::="')
