"""The families of APIs that the server speaks, and which one a request is from.

Only this module says which dialects there are: the server asks it, and names none. What only one
family has (stored objects, embeddings, the tokenizer) it passes on by noun.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

from gateway.dialects.anthropic.family import FAMILY as ANTHROPIC
from gateway.dialects.canonical import Call, RequestMetadata
from gateway.dialects.gemini import cached_contents
from gateway.dialects.gemini.family import FAMILY as GEMINI
from gateway.dialects.openai import embeddings, tokenizer
from gateway.dialects.openai.family import FAMILY as OPENAI
from gateway.dialects.openai.family import PLAIN
from gateway.dialects.openai.responses import conversations, stored_items
from gateway.dialects.openai.responses import dialect as responses
from gateway.dialects.protocol import ApiFamily, Endpoint
from gateway.dialects.tolerance import Mode
from gateway.errors import Kind, Refusal
from gateway.retention_classes import CacheProfile, CachingConfig

__all__ = [
    "ENDPOINTS",
    "FAMILIES",
    "KEY_HEADERS",
    "PLAIN",
    "VERSION_HEADERS",
    "cache_profile",
    "cached_contents",
    "conversations",
    "embeddings",
    "find_family",
    "guess_family",
    "parse_as",
    "responses",
    "stored_items",
    "tokenizer",
]

FAMILIES: Mapping[str, ApiFamily] = {one.name: one for one in (GEMINI, ANTHROPIC, OPENAI)}
"""By name. Headers of a client are looked for in this order; the last family is anyone else's."""
ENDPOINTS: tuple[Endpoint, ...] = tuple(
    end for family in (ANTHROPIC, OPENAI, GEMINI) for end in family.endpoints
)
KEY_HEADERS = tuple(
    sorted(("Api-Key", *(name for one in FAMILIES.values() for name in one.key_headers)))
)
"""Headers that hold a key, beside Authorization; Azure's clients send Api-Key."""
VERSION_HEADERS = tuple(name for one in FAMILIES.values() for name in one.version_headers)
"""Headers that change what a body means; the first names the version."""


def find_family(path: str, headers: Container[str], query: Container[str] = ()) -> ApiFamily:
    """Return the family of a request: by its path, else by what only its clients send.

    `path`: tidied, with a slash at its end. `query`: names that may tell it, too.
    """
    by_path = (one for one in FAMILIES.values() if path.startswith(one.paths))
    by_client = (
        one
        for one in FAMILIES.values()
        if (one.key_parameter and one.key_parameter in query)
        or any(name in headers for name in one.headers)
    )
    return next(by_path, None) or next(by_client, OPENAI)


def cache_profile(settings: CachingConfig, name: str) -> CacheProfile:
    """Return the profile of a family's answers, as it is configured."""
    return settings.profiles.get(name) or FAMILIES[name].profile


def guess_family(body: bytes) -> str:
    """Return the name of the family that a body is of, by its fields. Raises Refusal if it is no
    object."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Refusal(Kind.BAD, "invalid_json", "The body is not a JSON object.") from None
    if "contents" in fields:
        return GEMINI.name
    openai_only = {"max_completion_tokens", "input", "prompt", "n", "response_format"}
    is_anthropic = "system" in fields or "thinking" in fields or "stop_sequences" in fields
    is_anthropic |= b'"cache_control"' in body or b'"input_schema"' in body
    return ANTHROPIC.name if is_anthropic and not openai_only & set(fields) else OPENAI.name


def parse_as(
    name: str, model: str, tolerance: Mode, body: bytes, *, separates_cache_key: bool = False
) -> Call:
    """Return the call of a body of a family, without the request that it came with. `model`: for
    bodies that name none. Raises Refusal."""
    try:
        fields = set(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        fields = set()  # the dialect's own error is better
    metadata = RequestMetadata(
        model=model,
        action="generateContent",
        tolerance=tolerance,
        separates_cache_key=separates_cache_key,
    )
    return FAMILIES[name].find_dialect(fields).parse(body, metadata)
