"""Each part of a rendering is verbatim, trimmed, quoted or left out; others have no layout."""

from __future__ import annotations

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
from tests.tables import each_row

A, B = placeholder(0), placeholder(1)


def check(
    marked: str, whole: str, *texts: str, calls: bool = False
) -> list[tuple[str, int | None]] | None:
    """Return (text, part) of each piece that is not empty."""
    pieces = split_rendering(marked, whole, [TemplatePart(text, is_call=calls) for text in texts])
    return None if pieces is None else [(p.text, p.part) for p in pieces if p.text]


def test_finds_parts_between_template_text() -> None:
    """Verbatim, trimmed, or JSON-escaped."""
    assert check(f"<{A}|{B}>", "<x|y>", "x", "y") == [
        ("<", None), ("x", 0), ("|", None), ("y", 1), (">", None),
    ]  # fmt: skip
    assert check(f"<{A}>", "<x>", " x\n") == [("<", None), ("x", 0), (">", None)]
    assert check(f'"{A}"', '"\\"x\\n"', '"x\n') == [('"', None), ('\\"x\\n', 0), ('"', None)]


def test_keeps_template_order() -> None:
    """The order may differ from the request's."""
    assert check(f"{B}-{A}", "y-x", "x", "y") == [("y", 1), ("-", None), ("x", 0)]


def test_allows_part_left_out() -> None:
    assert check(f"<{A}>", "<x>", "x", "y") == [("<", None), ("x", 0), (">", None)]


def test_arguments_object_replaces_quoted_placeholder() -> None:
    """The placeholder's quotes are not the template's."""
    found = check(f'{{"a": "{A}"}}', '{"a": {"z": 1}}', '{"z": 1}', calls=True)

    assert found == [('{"a": ', None), ('{"z": 1}', 0), ("}", None)]


@each_row(
    ("marked", "whole"),
    [
        (f"<{A}>", "<X>"),
        (f"<{A}{A}>", "<xx>"),
        (f"<{A}>", "[x]"),
        (f"<{A}>", "<x> and more"),
        (f"<{A}>", "<"),
    ],
)
def test_returns_none_for_unknown_changes(marked: str, whole: str) -> None:
    """A part that is changed or doubled, or other text around it."""
    assert check(marked, whole, "x") is None


def test_pieces_have_offsets_in_marked_rendering() -> None:
    """Offsets of tools are given in the marked rendering."""
    pieces = split_rendering(f"<{A}|", "<long text|", [TemplatePart("long text")])

    assert pieces is not None
    assert [(p.text, p.start) for p in pieces if p.part is None] == [("<", 0), ("|", 1 + len(A))]


@each_row(
    ("first", "second", "count"), [("", "a", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("a", "a", 1)]
)
def test_common_prefix_chars(first: str, second: str, count: int) -> None:
    assert common_prefix_chars(first, second) == common_prefix_chars(second, first) == count
    assert common_prefix_chars("x" * 999 + first, "x" * 999 + second) == 999 + count


@each_row(("at", "found"), [(0, 0), (2, 2), (3, 2), (5, 2), (6, 6), (7, 7)])
def test_snaps_to_start_of_special_token(at: int, found: int) -> None:
    """A special token is one token or none."""
    assert snap_to_word_start("ab<|x>cd<|x>", at, ["<|x>", "none"]) == found


def test_splits_shape_into_parts_and_template_text() -> None:
    """Verbatim or trimmed; a part that is left out has no step."""
    trimmed = f"{B[:-1]}{TRIMMED}{B[-1]}"

    assert split_shape(f"<{A}|{trimmed}>", 3) == (
        ShapeStep("<"), ShapeStep("", 0), ShapeStep("|"),
        ShapeStep("", 1, is_trimmed=True), ShapeStep(">"),
    )  # fmt: skip


def test_shape_is_none_if_part_occurs_twice() -> None:
    """Its boundary would be ambiguous."""
    assert split_shape(f"<{A}|{A}>", 1) is None
