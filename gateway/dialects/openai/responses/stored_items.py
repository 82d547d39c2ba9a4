"""Stored items of OpenAI's responses: as lists show them, and as requests refer to them.

Functions are pure; `gateway.api.stored_responses` and `openai.responses.dialect` call them. An
item's id is made of its response's id and its index (`msg_<response>_0` of the output,
`msg_<response>_i0` of the input), so it is the same each time and names the response that holds the
item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from gateway.dialects.canonical import ItemReference
from gateway.dialects.openai import wire
from gateway.dialects.validation import convert, invalid_field, parse_int
from gateway.errors import Kind, Refusal

PAGE_DEFAULT, PAGE_MAX = 20, 100
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


class ReferenceItem(Struct, frozen=True, forbid_unknown_fields=True):
    """An input item that refers to a stored one."""

    id: wire.Short
    type: Literal["item_reference"] | None = None


class Page(Struct, frozen=True):
    """A page of a list: at most `limit` items behind the item `after`, in this order."""

    limit: int = PAGE_DEFAULT
    after: str = ""
    is_descending: bool = True


def parse_page(query: Mapping[str, str]) -> Page:
    """Return the page that a query asks for. Raises Refusal."""
    limit = parse_int(query.get("limit", str(PAGE_DEFAULT)), "limit", 1, PAGE_MAX)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_field("order", f"invalid value {order[:32]!r}; expected 'asc' or 'desc'.")
    return Page(limit, query.get("after", ""), order == "desc")


def page_of(items: Sequence[dict[str, Any]], page: Page) -> dict[str, Any]:
    """Return one page of the items, which are in the order of the conversation. O(items).

    Raises Refusal if `page.after` is not the id of an item.
    """
    ordered = list(reversed(items)) if page.is_descending else list(items)
    start = 0
    if page.after:
        ids = [item["id"] for item in ordered]
        if page.after not in ids:
            raise unknown_after(page.after)
        start = ids.index(page.after) + 1
    return list_of(ordered[start : start + page.limit], has_more=len(ordered) > start + page.limit)


def unknown_after(item_id: str) -> Refusal:
    """Return the refusal of a page behind an item that the list does not have."""
    return invalid_field("after", f"unknown item {item_id[:64]!r}; expected the id of an item.")


def list_of(items: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a list object of these items."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else "",
        "last_id": items[-1]["id"] if items else "",
        "has_more": has_more,
    }


def kind_of(item: dict[str, Any]) -> Any:
    """Return an item's type; it is a message if it has none."""
    return "message" if item.get("type") is None else item["type"]


def shown_input(response_id: str, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the input items of a response with ids, types, states and content parts."""
    suffix = response_id.removeprefix("resp_")
    return [shown_item(item, f"{suffix}_i{number}") for number, item in enumerate(items)]


def shown_item(item: dict[str, Any], suffix: str) -> dict[str, Any]:
    """Return an item with an id that ends with `suffix`, its type, its state and content parts."""
    kind = kind_of(item)
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


def references_in(items: str | Sequence[dict[str, Any]]) -> tuple[ItemReference, ...]:
    """Return the stored items that input items refer to, in order. O(items).

    Raises Refusal for an invalid reference and for an item that is referred to twice: each would be
    sent to the model twice.
    """
    if isinstance(items, str):
        return ()
    found: dict[str, ItemReference] = {}
    for number, item in enumerate(items):
        if not _is_reference(item):
            continue
        name = convert(item, ReferenceItem, f"input[{number}]").id
        if name in found:
            problem = f"duplicate item found with id {name[:64]!r}; expected each item once."
            raise invalid_field(f"input[{number}]", problem)
        found[name] = _reference_to(name)
    return tuple(found.values())


def resolve(
    items: str | Sequence[dict[str, Any]], stored: Mapping[str, dict[str, Any]]
) -> Sequence[dict[str, Any]]:
    """Return the input with the stored items in the place of the references to them. O(items).

    `stored`: items by the id that was looked for. Raises Refusal for an item that is not stored.
    """
    assert not isinstance(items, str), "a text has no references"
    return [_stored(item["id"], stored) if _is_reference(item) else item for item in items]


def item_not_found(item_id: str) -> Refusal:
    """Return the refusal of a request that names an item which is not stored."""
    message = (
        f"Item with id {item_id[:64]!r} not found. Items are not persisted when `store` is set to"
        " false, and are deleted when they expire; expected the id of a stored item, or the item"
        " itself."
    )
    return Refusal(Kind.NOT_FOUND, "item_not_found", message, param="input")


def _is_reference(item: dict[str, Any]) -> bool:
    """Return whether an item is a reference. Its type may be left out."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def _reference_to(item_id: str) -> ItemReference:
    """Return the place that an id names; with an empty response id, if it names none."""
    _, _, rest = item_id.partition("_")
    name, _, place = rest.rpartition("_")
    digits = place.removeprefix("i")
    if not name or not (digits.isascii() and digits.isdigit() and len(digits) <= 9):
        return ItemReference(item_id, "", "output", 0)
    part: Literal["input", "output"] = "output" if digits == place else "input"
    return ItemReference(item_id, f"resp_{name}", part, int(digits))


def _stored(item_id: str, stored: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the item of this id. An input item is stored without the id that it is shown with."""
    item = stored.get(item_id)
    if item is not None:
        own = item.get("id") or _ID_PREFIXES.get(kind_of(item), "item")
        if item_id in (own, f"{own}_{item_id.partition('_')[2]}"):
            return item
    raise item_not_found(item_id)
