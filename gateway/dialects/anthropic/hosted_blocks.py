"""Blocks of tools that another server ran, and texts that come with a source, as a history.

Clients send the answers of other servers back as they came. A use of such a tool becomes a call of
a function, and its result block the call's result, as a text that every template can tell the
model. A document or a search result that is a text becomes that text. `anthropic.prompt` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gateway.dialects.anthropic.wire import CacheControl, CallId, Text
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import convert, invalid_field, shown

TEXT_ONLY = "the model reads only text; expected a text block."
LEFT_OUT = frozenset({"mcp_tool_listing", "fallback", "container_upload"})
"""What says nothing of the conversation: a server's tools, a change of models, a file's id."""
_UNREADABLE = "(encrypted)"
_NO_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_NAME_CHARS_MAX = 64


class HostedUse(Struct, frozen=True, kw_only=True, gc=False):
    """A call of a tool that another server ran; `server_name` is of an MCP tool."""

    id: CallId
    name: Text
    input: dict[str, Any]
    type: str
    server_name: Text = ""
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None

    @property
    def function(self) -> str:
        """The name of the function that the model is told, as functions may be called."""
        name = f"{self.server_name}_{self.name}" if self.server_name else self.name
        return _NO_NAME.sub("_", name)[:_NAME_CHARS_MAX]


class HostedResult(Struct, frozen=True, kw_only=True, gc=False):
    """The result of such a call. `content` is told by its own type, or by those of its items."""

    tool_use_id: CallId
    type: str
    content: Text | dict[str, Any] | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None

    def told(self, path: str) -> str:
        """Return the result's text. Raises Refusal for a content of an unknown type."""
        prefix = "Error: " if self.is_error else ""
        return prefix + _told(self.content, f"{path}.content")


class _Text(Struct, frozen=True):
    text: Text

    def told(self) -> str:
        return self.text


class _Found(Struct, frozen=True):
    """A page that a search has found; its own text is encrypted."""

    title: Text
    url: Text

    def told(self) -> str:
        return f"{self.title}\n{self.url}"


class _Output(Struct, frozen=True):
    """What code printed. Files that it made have only ids."""

    stdout: Text = ""
    encrypted_stdout: Text = ""
    stderr: Text = ""
    return_code: int = 0

    def told(self) -> str:
        code = f"exit status {self.return_code}" if self.return_code else ""
        hidden = _UNREADABLE if self.encrypted_stdout else ""
        return _lines(self.stdout, hidden, self.stderr, code)


class _View(Struct, frozen=True):
    content: Text

    def told(self) -> str:
        return self.content


class _Created(Struct, frozen=True):
    is_file_update: bool

    def told(self) -> str:
        return "The file was updated." if self.is_file_update else "The file was created."


class _Replaced(Struct, frozen=True):
    lines: list[Text] | None = None

    def told(self) -> str:
        return "\n".join(self.lines or ())


class _Reference(Struct, frozen=True):
    tool_name: Text


class _ToolsFound(Struct, frozen=True):
    tool_references: list[_Reference]

    def told(self) -> str:
        return "\n".join(one.tool_name for one in self.tool_references)


class _Sealed(Struct, frozen=True):
    def told(self) -> str:
        return _UNREADABLE


class _Failure(Struct, frozen=True):
    error_code: Text
    error_message: Text | None = None

    def told(self) -> str:
        return f"Error: {self.error_message or self.error_code}"


class _Part(Struct, frozen=True):
    type: Text
    text: Text = ""


class _Source(Struct, frozen=True):
    type: Text
    data: Text = ""
    content: Text | list[_Part] = ""

    @property
    def text(self) -> str | None:
        """The source's text; None if it is no text, or not here."""
        if self.type == "text":
            return self.data
        if self.type != "content":
            return None
        if isinstance(self.content, str):
            return self.content
        if any(part.type != "text" for part in self.content):
            return None
        return "\n".join(part.text for part in self.content)


class _Citations(Struct, frozen=True):
    enabled: bool | None = None


class _Document(Struct, frozen=True, kw_only=True):
    source: _Source
    title: Text | None = None
    context: Text | None = None
    citations: _Citations | None = None
    cache_control: CacheControl | None = None

    def told(self) -> str:
        """A file that is no text is told by its title alone."""
        return _lines(self.title or "", self.context or "", self.source.text or "")


class _SearchResult(Struct, frozen=True, kw_only=True):
    title: Text
    source: Text
    content: list[_Part]
    citations: _Citations | None = None
    cache_control: CacheControl | None = None

    def told(self) -> str:
        return _lines(self.title, self.source, *(part.text for part in self.content))


class _Fetched(Struct, frozen=True):
    url: Text
    content: _Document

    def told(self) -> str:
        return _lines(self.url, self.content.told())


_CONTENTS: Mapping[str, type[Any]] = {
    "text": _Text,
    "web_search_result": _Found,
    "web_fetch_result": _Fetched,
    "code_execution_result": _Output,
    "encrypted_code_execution_result": _Output,
    "bash_code_execution_result": _Output,
    "text_editor_code_execution_view_result": _View,
    "text_editor_code_execution_create_result": _Created,
    "text_editor_code_execution_str_replace_result": _Replaced,
    "tool_search_tool_search_result": _ToolsFound,
    "advisor_result": _Text,
    "advisor_redacted_result": _Sealed,
    **dict.fromkeys(
        (
            *("web_search_tool_result_error", "web_fetch_tool_result_error"),
            *("code_execution_tool_result_error", "bash_code_execution_tool_result_error"),
            *("text_editor_code_execution_tool_result_error", "tool_search_tool_result_error"),
            "advisor_tool_result_error",
        ),
        _Failure,
    ),
}
"""What the content of a result is, by its type."""

USES = frozenset({"server_tool_use", "mcp_tool_use"})
RESULTS = frozenset(
    {
        *("web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result"),
        *("code_execution_tool_result", "bash_code_execution_tool_result"),
        *("text_editor_code_execution_tool_result", "advisor_tool_result", "mcp_tool_result"),
    }
)
SOURCED: Mapping[str, type[_Document | _SearchResult]] = {
    "document": _Document,
    "search_result": _SearchResult,
}
"""Blocks that become text blocks where they are texts."""


def as_text(value: dict[str, Any], path: str, tolerance: Tolerance) -> dict[str, Any]:
    """Return a document or a search result as a text block.

    Changes: `tolerance` notes citations that were asked for. Raises Refusal for one that is no
    text. Cost: O(characters).
    """
    kind = str(value["type"])
    found = convert(value, SOURCED[kind], path)
    if isinstance(found, _Document):
        is_text = found.source.text is not None
    else:
        is_text = all(part.type == "text" for part in found.content)
    if not is_text:
        raise invalid_field(path, f"{kind}: {TEXT_ONLY}", "unsupported_parameter")
    if found.citations is not None and found.citations.enabled:
        tolerance.take_hint(f"{path}.citations", True)
    return {"type": "text", "text": found.told(), "cache_control": value.get("cache_control")}


def _told(content: str | dict[str, Any] | list[dict[str, Any]] | None, path: str) -> str:
    if isinstance(content, list):
        return "\n".join(_told(one, f"{path}[{at}]") for at, one in enumerate(content))
    if not isinstance(content, dict):
        return content or ""
    kind = content.get("type")
    if not isinstance(kind, str) or kind not in _CONTENTS:
        problem = f"unknown type {shown(kind)} of a result; expected one of the API's, or a text."
        raise invalid_field(f"{path}.type", problem)
    text: str = convert(content, _CONTENTS[kind], path).told()
    return text


def _lines(*texts: str) -> str:
    return "\n".join(text for text in texts if text)
