"""Digests of tools by what they say, in any order of their keys.

Two lists of tools with the same digests in another order are the same tools: a client that builds
its schemas from sets or unordered maps sends such lists. Pure; `generation.outcome` computes them
for `prompt_findings`, because the gateway has the parsed tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import msgspec

from gateway.dialects.canonical import Prompt, Tool
from tenancy.reuse.prompt_changes import ToolDigest

DIGESTS_KEPT = 1_024
"""Tools that have their digests kept: applications send theirs with each request."""
_UNORDERED = frozenset({"required", "enum", "type"})
"""Keywords of a JSON Schema with lists that are sets."""


def digests_of(tools: Sequence[Tool]) -> tuple[ToolDigest, ...]:
    """Return the digests of a request's tools, in its order. O(characters) of new ones."""
    return tuple(_digest(one.name, one.description, one.parameters) for one in tools)


@lru_cache(maxsize=DIGESTS_KEPT)
def _digest(name: str, description: str, parameters: str) -> ToolDigest:
    try:
        schema = _canonical(msgspec.json.decode(parameters))
    except (msgspec.MsgspecError, RecursionError):
        schema = parameters
    return ToolDigest(_number(name), _number([name, description, schema]))


def _canonical(value: object, key: str = "") -> object:
    """Return a JSON value with its keys in order, and with lists that are sets in order."""
    if isinstance(value, dict):
        return {name: _canonical(value[name], name) for name in sorted(value)}
    if not isinstance(value, list):
        return value
    items = [_canonical(item) for item in value]
    return sorted(items, key=msgspec.json.encode) if key in _UNORDERED else items


def head_of(prompt: Prompt) -> int:
    """Return the digest of what a prompt begins with: its tools and system text, or its first
    message if it has neither. Models and templates make no difference."""
    first = [one for one in prompt.segments if one.tier == "system"] or prompt.segments[:1]
    texts = [one.text for one in first] or [prompt.text or ""]
    return _number([[one.content for one in digests_of(prompt.tools)], texts])


def _number(value: object) -> int:
    return int.from_bytes(blake2b(msgspec.json.encode(value), digest_size=8).digest())
