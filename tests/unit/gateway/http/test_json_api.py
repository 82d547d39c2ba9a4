"""JSON of the admin and self-service APIs: time windows, integers, errors."""

from __future__ import annotations

import json

import pytest

from gateway.errors import Kind, Refusal
from gateway.http import json_api
from tenancy.types import DAY_MS
from tests.tables import each_row

NOON_MS = 1_767_268_800_000
"""2026-01-01T12:00:00Z."""


def refused(given: dict[str, str]) -> str:
    """Return the parameter that a refused window's error names."""
    with pytest.raises(Refusal) as caught:
        json_api.window(given, NOON_MS)
    assert caught.value.kind is Kind.BAD
    return caught.value.param or ""


def test_window_defaults_to_the_last_thirty_days() -> None:
    """The window includes the current millisecond."""
    window = json_api.window({}, NOON_MS)

    assert window.as_json() == {
        "since": "2025-12-02T12:00:00.001Z",
        "until": "2026-01-01T12:00:00.001Z",
    }


def test_window_that_ends_at_the_epoch_is_refused() -> None:
    """Time 0 is a value; it must not read as a missing parameter."""
    assert refused({"until": "1970-01-01"}) == "since"


def test_window_accepts_dates_and_times() -> None:
    """A date means midnight in UTC; a time keeps its own zone."""
    days = json_api.window({"since": "2025-12-01", "until": "2026-01-01"}, NOON_MS)
    hours = json_api.window({"since": "2026-01-01T11:00:00+01:00"}, NOON_MS)

    assert days.as_json() == {
        "since": "2025-12-01T00:00:00.000Z",
        "until": "2026-01-01T00:00:00.000Z",
    }
    assert hours.since_ms == NOON_MS - 2 * 3_600_000


@each_row(
    ("given", "param"),
    [
        ({"since": "yesterday"}, "since"),
        ({"since": ""}, "since"),
        ({"since": "2026-01-01T11:00:00"}, "since"),
        ({"since": "2026-02-30"}, "since"),
        ({"since": "1969-12-31"}, "since"),
        ({"until": "9" * 100}, "until"),
        ({"since": "2026-01-02"}, "since"),
        ({"since": "2025-12-01", "until": "2025-12-01"}, "since"),
        ({"since": "2016-01-01"}, "since"),
    ],
)
def test_invalid_window_is_refused(given: dict[str, str], param: str) -> None:
    """F10: a window of ten years would scan the whole ledger."""
    assert refused(given) == param


def test_window_is_limited_to_four_hundred_days() -> None:
    """One millisecond more is refused."""
    since = json_api.instant(NOON_MS + 1 - 400 * DAY_MS)

    assert json_api.window({"since": since}, NOON_MS).until_ms == NOON_MS + 1
    assert refused({"since": json_api.instant(NOON_MS - 400 * DAY_MS)}) == "since"


@each_row("text", ["0", "-1", "11", "1.5", "x", "", "١", "9" * 19])
def test_integer_outside_its_bounds_is_refused(text: str) -> None:
    """The message names the bounds."""
    with pytest.raises(Refusal, match="integer from 1 to 10"):
        json_api.positive_int({"limit": text}, "limit", 5, 10)


def test_error_body_has_code_message_and_param() -> None:
    status, body = json_api.SHAPE.error_body(Refusal(Kind.QUOTA, "a", "b", param="c"), "id")

    assert status == 429
    assert json.loads(body) == {"error": {"code": "a", "message": "b", "param": "c"}}
    assert json_api.SHAPE.headers("id") == {}


@each_row("body", [b"", b"{", b'{"a": 1} x', b"\xff", b"[" * 9_000])
def test_invalid_json_is_refused_as_invalid_json(body: bytes) -> None:
    """Syntax, encoding, trailing bytes and nesting all give the same code."""
    with pytest.raises(Refusal) as caught:
        json_api.decode(body, dict)

    assert caught.value.code == "invalid_json"


def test_csv_has_the_columns_of_all_rows() -> None:
    """Text that a spreadsheet would run is quoted, and an amount below zero is not."""
    rows: list[dict[str, object]] = [
        {"a": None, "b": "=1+1", "c": True},
        {"a": "-0.5", "b": ["x"], "d": 7},
    ]
    answer = json_api.csv_answer(rows, "rows")

    assert isinstance(answer.body, bytes)
    assert answer.body.decode().split("\r\n") == [
        "a,b,c,d",
        ",'=1+1,true,",
        '-0.5,"[""x""]",,7',
        "",
    ]
    assert answer.headers["Content-Disposition"] == 'attachment; filename="rows.csv"'
    assert answer.headers["Content-Type"] == "text/csv; charset=utf-8"


def test_refuses_an_unknown_format() -> None:
    with pytest.raises(Refusal) as refused:
        json_api.wants_csv({"format": "xml"})

    assert refused.value.param == "format"
    assert [json_api.wants_csv({"format": name}) for name in ("json", "csv")] == [False, True]
