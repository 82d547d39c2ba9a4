"""Stored items of OpenAI's responses, as lists show them.

Functions are pure; `gateway.api.stored_responses` calls them. An input item gets an id that is made
of its response's id and its index, so it is the same each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from gateway.errors import Kind, Refusal

PAGE_DEFAULT, PAGE_MAX = 20, 100
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


class Page(Struct, frozen=True):
    """A page of a list: at most `limit` items behind the item `after`, in this order."""

    limit: int = PAGE_DEFAULT
    after: str = ""
    is_descending: bool = True


def parse_page(query: Mapping[str, str]) -> Page:
    """Return the page that a query asks for. Raises Refusal."""
    text = query.get("limit", str(PAGE_DEFAULT))
    is_number = text.isascii() and text.isdigit() and len(text) <= 9
    if not is_number or not 1 <= int(text) <= PAGE_MAX:
        problem = f"limit: invalid value {text[:32]!r}; expected an integer from 1 to {PAGE_MAX}."
        raise Refusal(Kind.BAD, "invalid_value", problem, param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        problem = f"order: invalid value {order[:32]!r}; expected 'asc' or 'desc'."
        raise Refusal(Kind.BAD, "invalid_value", problem, param="order")
    return Page(int(text), query.get("after", ""), order == "desc")


def page_of(items: Sequence[dict[str, Any]], page: Page) -> dict[str, Any]:
    """Return one page of the items, which are in the order of the conversation. O(items).

    Raises Refusal if `page.after` is not the id of an item.
    """
    ordered = list(reversed(items)) if page.is_descending else list(items)
    start = 0
    if page.after:
        ids = [item["id"] for item in ordered]
        if page.after not in ids:
            problem = f"after: unknown item {page.after[:64]!r}; expected the id of an item."
            raise Refusal(Kind.BAD, "invalid_value", problem, param="after")
        start = ids.index(page.after) + 1
    return list_of(ordered[start : start + page.limit], has_more=len(ordered) > start + page.limit)


def list_of(items: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a list object of these items."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }


def shown_input(response_id: str, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the input items of a response with ids, types, states and content parts."""
    suffix = response_id.removeprefix("resp_")
    return [shown_item(item, f"{suffix}_i{number}") for number, item in enumerate(items)]


def shown_item(item: dict[str, Any], suffix: str) -> dict[str, Any]:
    """Return an item with an id that ends with `suffix`, its type, its state and content parts."""
    kind = item.get("type", "message")
    shown = {
        "id": f"{_ID_PREFIXES.get(kind, 'item')}_{suffix}",
        "type": kind,
        "status": "completed",
        **{name: value for name, value in item.items() if value is not None},
    }
    if kind == "message" and isinstance(item.get("content"), str):
        part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": item["content"], "annotations": []}
        shown["content"] = [part]
    return shown
