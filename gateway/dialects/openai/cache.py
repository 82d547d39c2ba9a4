"""Caching fields of OpenAI's dialects: breakpoints on parts and options of a request.

`prompt_cache_breakpoint` is OpenAI's own field, `cache_control` the field that most clients of
compatible servers send; both place a breakpoint. This module knows no messages: the chat and
responses dialects apply it to their segments and put its directives into the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gateway.dialects.canonical import UNNAMED, CacheDirectives, Segment, Tool
from gateway.dialects.validation import invalid_field

WRITES_MAX = 4
"""Most breakpoints that one request writes, the implicit one included; later ones have priority."""

DEFAULT_TTL = "30m"
"""Retention class of a breakpoint if the request names none."""

Ttl = Literal["30m", "12h"]


class Breakpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's own breakpoint on a content part."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class CompatCacheControl(Struct, frozen=True, forbid_unknown_fields=True):
    """A breakpoint in the spelling of OpenRouter, LiteLLM and others."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def retention(self) -> str:
        """Retention class of the breakpoint; without `ttl` the tenant's default."""
        return self.ttl or f"5m{UNNAMED}"


class ChatCacheOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`prompt_cache_options` of chat completions."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Ttl | None = None


class CacheSettings(Struct, frozen=True):
    """The caching fields of a whole request.

    `retention` is the deprecated `prompt_cache_retention`, an upper limit; `options` promise
    retention.
    """

    options: ChatCacheOptions | None = None
    retention: Literal["in_memory", "in-memory", "24h"] | None = None
    control: CompatCacheControl | None = None
    is_native: bool = False
    """Some part has OpenAI's own breakpoint."""

    @property
    def retention_class(self) -> str | None:
        """Retention class of the deprecated field, in its canonical spelling."""
        return None if self.retention is None else self.retention.replace("-", "_")

    @property
    def ttl(self) -> str:
        """Retention class of a breakpoint that names none."""
        requested = self.options.ttl if self.options is not None else None
        return requested or self.retention_class or f"{DEFAULT_TTL}{UNNAMED}"

    @property
    def mode(self) -> Literal["implicit", "explicit"]:
        """Breakpoint mode: the options' mode, else implicit.

        Without options and OpenAI's own fields the mode is explicit, because clients that send
        `cache_control` mark every prefix that they want kept.
        """
        if self.options is not None:
            return self.options.mode or "implicit"
        is_compat_only = self.retention is None and not self.is_native
        return "explicit" if is_compat_only else "implicit"


def requested_retention(
    native: Breakpoint | None, control: CompatCacheControl | None, settings: CacheSettings
) -> str | None:
    """Return the retention class of a part's breakpoint, OpenAI's own field first."""
    if native is not None:
        return native.ttl or settings.ttl
    return None if control is None else control.retention


def with_retention(segment: Segment, control: CompatCacheControl) -> Segment:
    """Return the segment with its message's breakpoint, unless the segment has one."""
    if segment.retention is not None:
        return segment
    return replace(segment, retention=control.retention)


def apply(
    tools: Sequence[Tool], segments: Sequence[Segment], settings: CacheSettings
) -> tuple[tuple[Segment, ...], CacheDirectives]:
    """Return the segments with their breakpoints, and the call's cache directives.

    Without caching fields the directives are the default: read any cached prefix. Breakpoints
    beyond `WRITES_MAX`, the earlier ones, are only looked up, as OpenAI does. Cost: O(tools +
    segments). Raises Refusal if the deprecated limit and `prompt_cache_options.ttl` are both set.
    """
    if settings.retention is not None and settings.options is not None and settings.options.ttl:
        problem = (
            "this deprecated field and prompt_cache_options.ttl are both set; expected only"
            " prompt_cache_options.ttl."
        )
        raise invalid_field("prompt_cache_retention", problem)
    parts = list(segments)
    if settings.control is not None and parts:
        parts[-1] = with_retention(parts[-1], settings.control)
    prompt: list[Tool | Segment] = [*tools, *parts]
    has_breakpoints = any(part.retention is not None for part in prompt)
    if not has_breakpoints and settings.options is None:
        # The deprecated field extends retention and leaves lookups unchanged.
        return tuple(parts), CacheDirectives(implicit=settings.retention_class)
    is_implicit = settings.mode == "implicit"
    directives = CacheDirectives(
        lookup="written" if has_breakpoints or is_implicit else "none",
        implicit=settings.ttl if is_implicit else None,
        writes_max=WRITES_MAX - is_implicit,
    )
    return tuple(parts), directives
