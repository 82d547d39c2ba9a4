"""The caching fields of OpenAI's dialects: marks on parts, options of a request, both spellings.

`prompt_cache_breakpoint` is OpenAI's own mark, `cache_control` what most clients of compatible
servers send; both say "keep the prompt up to here". It knows no messages: the chat and responses
dialects mark their segments with it and ask what the cache is to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gateway.dialects.canonical import CacheDirectives, Segment, Tool
from gateway.errors import Kind, Refusal

WRITES_MAX = 4
"""Breakpoints written by one request, the implicit one included: the latest ones."""

DEFAULT_TTL = "30m"
Ttl = Literal["30m", "12h"]


class Breakpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's mark on a content part."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class CompatCacheControl(Struct, frozen=True, forbid_unknown_fields=True):
    """The same in the spelling of OpenRouter, LiteLLM and others."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class ChatCacheOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`prompt_cache_options` of chat completions."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Ttl | None = None


class CacheSettings(Struct, frozen=True):
    """What a request says about caching as a whole. `is_native`: some part has OpenAI's own mark.

    `retention` is the deprecated field's class: a limit where `options` makes promises.
    """

    options: ChatCacheOptions | None = None
    retention: Literal["in_memory", "in-memory", "24h"] | None = None
    control: CompatCacheControl | None = None
    is_native: bool = False

    @property
    def retention_class(self) -> str | None:
        """The deprecated field in one spelling."""
        return None if self.retention is None else self.retention.replace("-", "_")

    @property
    def ttl(self) -> str:
        """The class of a breakpoint that names none."""
        asked = self.options.ttl if self.options is not None else None
        return asked or self.retention_class or DEFAULT_TTL

    @property
    def mode(self) -> Literal["implicit", "explicit"]:
        """Implicit, unless the request says otherwise or marks only in the other spelling, whose
        clients name all that they want kept."""
        if self.options is not None:
            return self.options.mode or "implicit"
        is_foreign = self.retention is None and not self.is_native
        return "explicit" if is_foreign else "implicit"


def requested_retention(
    native: Breakpoint | None, control: CompatCacheControl | None, settings: CacheSettings
) -> str | None:
    """The class that a part's marks ask for. Where both spellings are there, OpenAI's counts."""
    if native is not None:
        return native.ttl or settings.ttl
    return None if control is None else control.ttl or "5m"


def with_retention(segment: Segment, control: CompatCacheControl) -> Segment:
    """The segment with a mark of the whole message, unless it has one of its own."""
    if segment.retention is not None:
        return segment
    return replace(segment, retention=control.ttl or "5m")


def check_settings(settings: CacheSettings) -> None:
    """A promise and a limit at once mean nothing. Raises Refusal."""
    if settings.retention is not None and settings.options is not None and settings.options.ttl:
        message = (
            "prompt_cache_retention is deprecated, and prompt_cache_options.ttl replaces it; give"
            " one of them."
        )
        raise Refusal(Kind.BAD, "invalid_value", message, param="prompt_cache_retention")


def apply(
    tools: Sequence[Tool], segments: Sequence[Segment], settings: CacheSettings
) -> tuple[tuple[Segment, ...], CacheDirectives]:
    """The segments with their marks, and what is asked of the cache. O(tools + segments).

    Without any caching field nothing is asked, and whatever the cache holds is read. Of more marks
    than may be written the earlier ones are only looked up, as at OpenAI. Raises Refusal.
    """
    check_settings(settings)
    parts = list(segments)
    if settings.control is not None and parts:
        parts[-1] = with_retention(parts[-1], settings.control)
    prompt: list[Tool | Segment] = [*tools, *parts]
    has_marks = any(part.retention is not None for part in prompt)
    if not has_marks and settings.options is None:
        # The deprecated field keeps for longer what is matched as without it.
        return tuple(parts), CacheDirectives(implicit=settings.retention_class)
    is_implicit = settings.mode == "implicit"
    ask = CacheDirectives(
        lookup="written" if has_marks or is_implicit else "none",
        implicit=settings.ttl if is_implicit else None,
        writes_max=WRITES_MAX - is_implicit,
    )
    return tuple(parts), ask
