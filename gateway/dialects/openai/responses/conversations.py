"""Conversations of OpenAI's API: parse what creates and changes them, encode what lists show.

Functions are pure; `gateway.api.conversations` calls them. The items of a conversation are those of
responses (`openai.responses.prompt`), and a request appends its input and its output to the
conversation that it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gateway.dialects.canonical import StoredItem
from gateway.dialects.openai import wire
from gateway.dialects.openai.responses import stored_items
from gateway.dialects.openai.responses.prompt import check_items
from gateway.dialects.tolerance import Mode, Tolerance
from gateway.dialects.validation import encode_json

ID_PREFIX = "conv_"
"""Prefix of a conversation's id."""

ITEMS_AT_ONCE = 20
"""Most items of one request that creates or extends a conversation."""

Items = Annotated[list[dict[str, Any]], Meta(max_length=ITEMS_AT_ONCE)]
_RULES = wire.FieldRules()


class CreateBody(Struct, frozen=True, kw_only=True):
    """The body that creates a conversation."""

    items: Items | None = None
    metadata: wire.Metadata | None = None


class UpdateBody(Struct, frozen=True, kw_only=True):
    """The body that sets a conversation's metadata."""

    metadata: wire.Metadata | None


class ItemsBody(Struct, frozen=True, kw_only=True):
    """The body that appends items."""

    items: Annotated[Items, Meta(min_length=1)]


def parse_create(body: bytes, mode: Mode) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the items and the metadata of a new conversation. Raises Refusal."""
    tolerance = Tolerance(mode)
    fields = wire.decode(body or b"{}", CreateBody, _RULES, tolerance)
    check_items(fields.items or (), tolerance)
    return fields.items or [], fields.metadata or {}


def parse_update(body: bytes, mode: Mode) -> dict[str, str]:
    """Return the new metadata of a conversation. Raises Refusal."""
    return wire.decode(body, UpdateBody, _RULES, Tolerance(mode)).metadata or {}


def parse_items(body: bytes, mode: Mode) -> list[dict[str, Any]]:
    """Return the items to append to a conversation. Raises Refusal."""
    tolerance = Tolerance(mode)
    fields = wire.decode(body, ItemsBody, _RULES, tolerance)
    check_items(fields.items, tolerance)
    return fields.items


def named_items(items: Sequence[dict[str, Any]], name: str) -> list[StoredItem]:
    """Return items as a conversation keeps them, with ids that end with `name` and their index.

    An id that an item came with is replaced: it may be that of an item elsewhere.
    """
    found = []
    for number, item in enumerate(items):
        own = {key: value for key, value in item.items() if key != "id"}
        shown = stored_items.shown_item(own, f"{name}_i{number}")
        found.append(StoredItem(shown["id"], encode_json(shown)))
    return found


def shown_conversation(conversation_id: str, created_ms: int, metadata: bytes) -> bytes:
    """Return a conversation object. `metadata`: JSON."""
    return msgspec.json.encode(
        {
            "id": conversation_id,
            "object": "conversation",
            "created_at": created_ms // 1000,
            "metadata": msgspec.Raw(metadata),
        }
    )


def shown_list(items: Sequence[bytes], *, has_more: bool = False) -> bytes:
    """Return a list object of items, which are JSON. O(bytes)."""
    shown = [msgspec.json.decode(item, type=dict[str, Any]) for item in items]
    return msgspec.json.encode(stored_items.list_of(shown, has_more=has_more))
