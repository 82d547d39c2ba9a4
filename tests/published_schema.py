"""Checks answers against OpenAI's published OpenAPI document.

It knows the keywords that the document uses for answers, and reports every violation by its path.
Fields that a schema does not know are allowed, as the document allows them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parent / "data" / "openai_openapi.json"

ACCEPTED = frozenset(
    {
        # The hosted API sends null here too, in every chunk but the last one of a choice.
        ("CreateCompletionResponse", "choices[].finish_reason"),
        # The first token of an echoed prompt has no logprob, there as here.
        ("CreateCompletionResponse", "choices[].logprobs.token_logprobs[]"),
        ("CreateCompletionResponse", "choices[].logprobs.top_logprobs[]"),
        ("CreateCompletionResponse", "choices[].logprobs.top_logprobs"),
    }
)
"""Nulls that differ from the document: (schema, path without indices)."""

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int,),
}


def violations(value: object, name: str) -> list[str]:
    """Return how `value` violates the schema `name`, one line for each violation."""
    return [
        problem
        for path, problem in _check(value, {"$ref": name}, "")
        if not (problem.endswith(": null") and (name, path) in ACCEPTED)
    ]


@cache
def _schemas() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DOCUMENT.read_text())
    schemas: dict[str, Any] = document["schemas"]
    return schemas


def _check(value: object, schema: dict[str, Any], path: str) -> list[tuple[str, str]]:
    if value is None and schema.get("nullable"):
        return []
    if "$ref" in schema:
        return _check(value, _schemas()[schema["$ref"]], path)
    problems = [found for part in schema.get("allOf", ()) for found in _check(value, part, path)]
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        tagged = [choice for choice in choices if _is_tagged(value, choice)]
        choices = tagged or choices
        results = [_check(value, choice, path) for choice in choices]
        fewest = min(len(result) for result in results)
        problems += next(result for result in results if len(result) == fewest)
    if not _has_type(value, schema) or not _is_listed(value, schema):
        shown = json.dumps(value)[:60]
        return [*problems, (path, f"{path}: {shown}")]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        problems += [
            (f"{path}.{name}", f"{path}.{name}: missing")
            for name in schema.get("required", ())
            if name not in value
        ]
        for name, item in value.items():
            inner = properties.get(name)
            if inner is not None:
                problems += _check(item, inner, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for item in value:
            problems += _check(item, schema["items"], f"{path}[]")
    return problems


def _is_tagged(value: object, schema: dict[str, Any]) -> bool:
    """Return whether the object's `type` is that of an alternative."""
    while "$ref" in schema:
        schema = _schemas()[schema["$ref"]]
    tag = schema.get("properties", {}).get("type", {})
    return isinstance(value, dict) and value.get("type") in tag.get("enum", ())


def _has_type(value: object, schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    is_flag = isinstance(value, bool)
    return not kinds or any(
        isinstance(value, _TYPES[kind]) and (not is_flag or kind == "boolean") for kind in kinds
    )


def _is_listed(value: object, schema: dict[str, Any]) -> bool:
    return ("enum" not in schema or value in schema["enum"]) and (
        "const" not in schema or value == schema["const"]
    )
