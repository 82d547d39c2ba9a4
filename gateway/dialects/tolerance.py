"""Tolerance of request fields that the server knows but cannot honour, and of unknown fields.

    honoured │ hint: taken, named in a header │ would change the answer: 400 │ unknown: by mode

A dialect's parser makes one `Tolerance` for each request, which decides by its mode and collects
the names of the ignored fields for `Call.ignored`. The module knows no dialect's fields except the
published list of hints. `docs/dialects.md` has the policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal

from msgspec import Struct, inspect

from gateway.dialects.validation import alternatives, invalid_field, shown

Mode = Literal["standard", "strict", "lenient"]
"""`standard` takes hints and ignores unknown fields of answers that come back as history; `strict`
refuses both; `lenient` ignores every unknown field."""

IGNORED_NAMES_MAX = 20
"""Most ignored names that one request reports."""
NAME_CHARS_MAX = 48
"""Most characters of a reported name, so that the header has less than 1 KiB."""

REASONING_HINTS = frozenset(
    {
        *("reasoning", "reasoning_effort", "reasoning_format", "reasoning_split", "verbosity"),
        *("thinking", "thinking_budget", "thinking_config", "enable_thinking", "think", "effort"),
        "thinking_token_budget",
        *("include_reasoning", "separate_reasoning", "stream_reasoning", "preserve_thinking"),
    }
)
"""How much a model should reason, and where its reasoning is shown; only some models do."""

THINKING_FIELDS = frozenset(
    {
        *("reasoning_effort", "reasoning", "thinking", "thinking_budget", "enable_thinking"),
        *("think", "include_reasoning", "reasoning.effort", "output_config.effort"),
        "thinking_token_budget",
        *("chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking"),
        *("chat_template_kwargs.reasoning_effort", "chat_template_kwargs.thinking_budget"),
        "generationConfig.thinkingConfig",
    }
)
"""Names of the hints that a model that thinks honours."""

SERVICE_HINTS = frozenset(
    {
        *("service_tier", "speed", "store", "truncation", "prediction"),
        *("keep_alive", "num_ctx", "num_gpu", "num_thread", "num_batch", "num_keep", "n_keep"),
        *("cache_prompt", "id_slot", "slot_id", "timings_per_token", "return_progress"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "stream_interval"),
        *("provider", "route", "models", "transforms", "usage", "caching", "betas"),
        *("enable_enhanced_civic_answers", "media_resolution", "safety_settings"),
        *("routing_config", "model_selection_config", "model_armor_config"),
        *("background_options", "workspace_id"),
    }
)
"""How a server should run a request: tier, memory, route, speed, what it stores."""

RECORD_HINTS = frozenset(
    {
        *("metadata", "client_metadata", "labels", "safety_identifier", "max_tool_calls", "tags"),
        *("request_id", "rid", "session_id", "trace_id", "litellm_call_id", "litellm_metadata"),
        "user_profile_id",
    }
)
"""What a server should record of a request."""

HINTS = REASONING_HINTS | SERVICE_HINTS | RECORD_HINTS
"""Fields that cannot make an answer wrong. They are taken, not honoured, and named in a header."""

HISTORY, OTHER = "history", "other"
"""Metric labels of ignored fields in the history, and of all fields that no list names."""

_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-\[\]]")


def label_of(name: str) -> str:
    """Return the metric label of an ignored name: a hint's top-level name, or one of two others."""
    top, _, rest = name.partition(".")
    if top in HINTS:
        return top
    if rest in HINTS:
        return rest
    return HISTORY if top.endswith("[]") else OTHER


class _Shape(Struct, frozen=True):
    """The objects that a type decodes: field names with their shapes, by tag if it has one."""

    fields: Mapping[str, Mapping[str, _Shape | None]]
    tag_field: str | None
    items: _Shape | None

    def fields_of(self, value: dict[str, Any]) -> Mapping[str, _Shape | None] | None:
        """Return the known fields of an object; None for an object of an unknown tag."""
        tag = "" if self.tag_field is None else value.get(self.tag_field)
        return self.fields.get(tag) if isinstance(tag, str) else None


class Tolerance:
    """The mode of one request, and the fields that were ignored so far."""

    def __init__(self, mode: Mode = "standard") -> None:
        self.mode = mode
        self.hints: dict[str, Any] = {}
        """Values of the hints on reasoning: a model that thinks honours them."""
        self._ignored: dict[str, None] = {}

    @property
    def is_strict(self) -> bool:
        """Whether hints and unknown fields of the history are refused."""
        return self.mode == "strict"

    @property
    def is_lenient(self) -> bool:
        """Whether every unknown field is ignored."""
        return self.mode == "lenient"

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of the ignored fields in order, without indices of lists, each once."""
        return tuple(self._ignored)

    def ignore(self, path: str) -> None:
        """Note that the field at `path` was ignored. Names after the first 20 are dropped."""
        if len(self._ignored) < IGNORED_NAMES_MAX:
            name = _UNSAFE.sub("_", _INDEX.sub("[]", path[: 2 * NAME_CHARS_MAX]))
            self._ignored[name[:NAME_CHARS_MAX]] = None

    def take_hint(self, path: str, value: object, neutral: Collection[object] = ()) -> None:
        """Take a hint: note its name, unless the value asks for nothing. Raises Refusal if strict.

        `neutral`: further values that ask for nothing, in the order in which an error names them.
        """
        if asks_nothing(value) or any(type(value) is type(n) and value == n for n in neutral):
            return
        if self.is_strict and not neutral:
            problem = "this field is not supported; omit it."
            raise invalid_field(path, problem, "unsupported_parameter")
        if self.is_strict:
            expected = " or ".join(json.dumps(one) for one in neutral)
            raise invalid_field(path, f"Invalid value {shown(value)}; expected {expected}.")
        self.ignore(path)

    def leave_out_tools(self, tools: Mapping[str, str], *, may_call_others: bool) -> None:
        """Leave out tools that a hosted API's server runs, or that no dialect knows: note their
        types, by path, as ignored. The model cannot call a tool that it does not see.

        `may_call_others`: a function remains, and the request leaves the choice to the model.
        Raises Refusal if the answer could not be what was asked for, or if strict.
        """
        for path, kind in tools.items():
            if self.is_lenient or (may_call_others and not self.is_strict):
                self.ignore(f"tools.{kind}")
                continue
            problem = f"unsupported tool type {kind[:64]!r}; expected a function."
            if not self.is_strict:
                problem = (
                    f"unsupported tool type {kind[:64]!r}: this server runs no tools; one is left"
                    " out only where a function remains and the tool choice is 'auto'."
                )
            raise invalid_field(path, problem, "unsupported_parameter")

    def prune(self, value: Any, kind: Any, path: str) -> Any:
        """Return `value` without the fields that `kind` does not know, and note their names.

        Cost: O(objects). Values of another type than `kind` stay for its decoder to refuse.
        """
        shape = _shape_of(kind)
        return value if shape is None else self._prune(value, shape, path)

    def _prune(self, value: Any, shape: _Shape, path: str) -> Any:
        if type(value) is list and shape.items is not None:
            return [self._prune(item, shape.items, f"{path}[]") for item in value]
        if type(value) is not dict:
            return value
        fields = shape.fields_of(value)
        if fields is None:
            return value
        found = {}
        for name, item in value.items():
            if name not in fields:
                self.ignore(f"{path}.{name}" if path else name)
                continue
            inner = fields[name]
            if inner is not None and type(item) in (list, dict):
                item = self._prune(item, inner, f"{path}.{name}" if path else name)
            found[name] = item
        return found


def asks_nothing(value: object) -> bool:
    """Return whether a field's value is null or empty."""
    return value is None or value == {} or value == [] or value == ""


def without_thinking(ignored: Collection[str]) -> tuple[str, ...]:
    """Return the names that have no effect even if the model thinks. O(names)."""
    return tuple(name for name in ignored if name not in THINKING_FIELDS)


@cache
def _shape_of(kind: Any) -> _Shape | None:
    """Return the shape of a type; None if it decodes no objects of its own. Cached by type."""
    return _shape(inspect.type_info(kind))


def _shape(found: inspect.Type) -> _Shape | None:
    fields: dict[str, Mapping[str, _Shape | None]] = {}
    tag_field, items = None, None
    for alternative in alternatives(found):
        if isinstance(alternative, inspect.StructType):
            known = {field.encode_name: _shape(field.type) for field in alternative.fields}
            if alternative.tag_field is not None:
                tag_field = alternative.tag_field
                known[tag_field] = None
            fields[str(alternative.tag or "")] = known
        elif isinstance(alternative, inspect.ListType | inspect.CollectionType):
            items = _shape(alternative.item_type)
    return _Shape(fields, tag_field, items) if fields or items is not None else None
