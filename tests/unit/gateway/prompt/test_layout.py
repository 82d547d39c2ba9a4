"""What became of each part: itself, trimmed, quoted, left out; or nobody can say."""

from __future__ import annotations

import pytest

from gateway.prompt.layout import (
    ShapeStep,
    common_prefix_chars,
    placeholder,
    snap_to_word_start,
    split_rendering,
    split_shape,
)
from gateway.prompt.messages import TemplatePart
from gateway.prompt.opaque_text import TRIMMED

A, B = placeholder(0), placeholder(1)


def check(
    marked: str, whole: str, *texts: str, calls: bool = False
) -> list[tuple[str, int | None]] | None:
    """(text, part) of each piece that has any."""
    pieces = split_rendering(marked, whole, [TemplatePart(text, is_call=calls) for text in texts])
    return None if pieces is None else [(p.text, p.part) for p in pieces if p.text]


def test_parts_are_found_between_the_templates_words() -> None:
    """As they are, trimmed, or written as JSON."""
    assert check(f"<{A}|{B}>", "<x|y>", "x", "y") == [
        ("<", None), ("x", 0), ("|", None), ("y", 1), (">", None),
    ]  # fmt: skip
    assert check(f"<{A}>", "<x>", " x\n") == [("<", None), ("x", 0), (">", None)]
    assert check(f'"{A}"', '"\\"x\\n"', '"x\n') == [('"', None), ('\\"x\\n', 0), ('"', None)]


def test_the_templates_order_is_kept() -> None:
    """It may differ from the order of the request."""
    assert check(f"{B}-{A}", "y-x", "x", "y") == [("y", 1), ("-", None), ("x", 0)]


def test_a_part_may_be_left_out() -> None:
    """Then no piece is it."""
    assert check(f"<{A}>", "<x>", "x", "y") == [("<", None), ("x", 0), (">", None)]


def test_arguments_are_an_object_where_their_mark_is_a_string() -> None:
    """The mark's quotes are not the template's."""
    found = check(f'{{"a": "{A}"}}', '{"a": {"z": 1}}', '{"z": 1}', calls=True)

    assert found == [('{"a": ', None), ('{"z": 1}', 0), ("}", None)]


@pytest.mark.parametrize(
    ("marked", "whole"),
    [
        (f"<{A}>", "<X>"),
        (f"<{A}{A}>", "<xx>"),
        (f"<{A}>", "[x]"),
        (f"<{A}>", "<x> and more"),
        (f"<{A}>", "<"),
    ],
)
def test_what_cannot_be_followed_has_no_layout(marked: str, whole: str) -> None:
    """Changed, doubled, or another text around it."""
    assert check(marked, whole, "x") is None


def test_pieces_know_where_they_stood() -> None:
    """Places in the marked text can be found in them."""
    pieces = split_rendering(f"<{A}|", "<long text|", [TemplatePart("long text")])

    assert pieces is not None
    assert [(p.text, p.start) for p in pieces if p.part is None] == [("<", 0), ("|", 1 + len(A))]


@pytest.mark.parametrize(
    ("first", "second", "count"), [("", "a", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("a", "a", 1)]
)
def test_what_two_texts_begin_with(first: str, second: str, count: int) -> None:
    """However long they are."""
    assert common_prefix_chars(first, second) == common_prefix_chars(second, first) == count
    assert common_prefix_chars("x" * 999 + first, "x" * 999 + second) == 999 + count


@pytest.mark.parametrize(("at", "found"), [(0, 0), (2, 2), (3, 2), (5, 2), (6, 6), (7, 7)])
def test_a_word_is_not_cut(at: int, found: int) -> None:
    """A special token is one token or none."""
    assert snap_to_word_start("ab<|x>cd<|x>", at, ["<|x>", "none"]) == found


def test_the_steps_of_a_shape_are_its_parts_and_what_stands_between() -> None:
    """As it is, or trimmed; one that is left out is no step."""
    trimmed = f"{B[:-1]}{TRIMMED}{B[-1]}"

    assert split_shape(f"<{A}|{trimmed}>", 3) == (
        ShapeStep("<"), ShapeStep("", 0), ShapeStep("|"),
        ShapeStep("", 1, is_trimmed=True), ShapeStep(">"),
    )  # fmt: skip


def test_a_part_that_stands_there_twice_has_no_steps() -> None:
    """Which of the two would its boundary be?"""
    assert split_shape(f"<{A}|{A}>", 1) is None
