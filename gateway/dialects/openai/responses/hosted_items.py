"""Items of tools that another server ran, or that stand in other servers' answers, as a history.

Clients send the answers of other servers back as they came. What such an item says becomes a call
of a function with its result, which every template can tell the model. An item that says nothing
which the texts beside it lack is left out, by name. What can be neither is refused, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from gateway.dialects.openai import tools, wire
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import convert, invalid_field, json_text

Placed = tuple[dict[str, Any], str]
"""An item, and its path in the request."""

LEFT_OUT = frozenset({"web_search_call", "mcp_list_tools"})
"""What a search has found, and which tools there were, is not in these; the answer stands behind.
"""
_TEXT_ONLY = f"its result is an image, and {tools.TEXT_ONLY}"
_SEALED = "its content is encrypted for the server that made it; send the items it stands for."
_MORE_TOOLS = "it declares tools in the input; expected them in the field tools."
REFUSED: Mapping[str, str] = {
    "additional_tools": _MORE_TOOLS,
    "compaction": _SEALED,
    "compaction_trigger": "this server does not shorten histories; omit it.",
    "computer_call": _TEXT_ONLY,
    "computer_call_output": _TEXT_ONLY,
    "configuration_update": "it changes settings in the input; expected fields of the request.",
    "custom_tool_call": tools.unsupported_type(tools.CUSTOM),
    "custom_tool_call_output": tools.unsupported_type(tools.CUSTOM),
    "tool_search_call": _MORE_TOOLS,
    "tool_search_output": _MORE_TOOLS,
}
"""Why an item is not taken, by its type."""
_NO_NAME = re.compile(r"[^a-zA-Z0-9_-]")
_NAME_CHARS_MAX = 64


class _Hosted(Struct, frozen=True):
    """An item of a tool that another server ran: its result, if it has one, is in the item."""

    id: tools.CallId | None = None


class _McpCall(_Hosted, frozen=True, kw_only=True):
    server_label: wire.Text
    name: wire.Text
    arguments: tools.Arguments
    output: wire.Text | None = None
    error: wire.Text | dict[str, Any] | None = None
    approval_request_id: wire.Text | None = None


class _ApprovalRequest(_Hosted, frozen=True, kw_only=True):
    server_label: wire.Text
    name: wire.Text
    arguments: tools.Arguments


class _ApprovalResponse(Struct, frozen=True, kw_only=True):
    approval_request_id: wire.Text
    approve: bool
    reason: wire.Text | None = None


class _Log(Struct, frozen=True):
    """An output of code; an image has no logs."""

    logs: wire.Text = ""


class _CodeCall(_Hosted, frozen=True, kw_only=True):
    code: wire.Text | None = None
    outputs: list[_Log] | None = None


class _FoundText(Struct, frozen=True):
    filename: wire.Text | None = None
    text: wire.Text | None = None


class _FileSearch(_Hosted, frozen=True, kw_only=True):
    queries: list[wire.Text] = []
    results: list[_FoundText] | None = None


class _ImageCall(_Hosted, frozen=True, kw_only=True):
    revised_prompt: wire.Text | None = None


class _ClientCall(Struct, frozen=True, kw_only=True):
    """A call that a client or a program carried out: its result is an item of its own."""

    call_id: tools.CallId
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    code: wire.Text | None = None


class _ShellOutput(Struct, frozen=True):
    stdout: wire.Text = ""
    stderr: wire.Text = ""


class _ClientResult(Struct, frozen=True, kw_only=True):
    call_id: tools.CallId
    output: wire.Text | list[_ShellOutput] | None = None
    result: wire.Text | None = None
    status: wire.Text | None = None


class _ShellResult(Struct, frozen=True, kw_only=True):
    """The result of a local shell names its call in `id`."""

    call_id: tools.CallId = field(name="id")
    output: wire.Text


def plain_items(
    placed: Sequence[Placed], tolerance: Tolerance, *, is_part: bool = False
) -> Sequence[Placed]:
    """Return the items with those of hosted tools as calls and results, or left out. `is_part`:
    others will surround them. Raises Refusal. Changes: `tolerance` notes what is left out.
    Cost: O(items)."""
    if tolerance.is_strict or not any(_translate(item) for item, _ in placed):
        return placed
    return list(_Translation(placed, tolerance, is_part=is_part).run())


def unsupported_item(kind: str) -> str:
    """Return the problem of an item that is not taken."""
    if reason := REFUSED.get(kind):
        return f"unsupported item type {kind!r}: {reason}"
    where = " in the strict mode" if kind in KINDS else ""
    more = " or" if where else ", an item of a hosted tool or"
    return (
        f"unsupported item type {kind[:64]!r}{where}; expected 'message', 'function_call',"
        f" 'function_call_output'{more} 'reasoning'."
    )


class _Translation:
    """Translates the items of one request."""

    def __init__(self, placed: Sequence[Placed], tolerance: Tolerance, *, is_part: bool) -> None:
        self._placed, self._tolerance, self._is_part = placed, tolerance, is_part
        self._denied: dict[str, str] = {}
        """By approval request: why the call was not made."""
        self._made: set[str] = set()
        """The approval requests whose call was made."""

    def run(self) -> Iterator[Placed]:
        """Yield what the model is told."""
        for item, path in self._placed:
            kind = item.get("type")
            if kind == "mcp_call" and isinstance(of := item.get("approval_request_id"), str):
                self._made.add(of)
            elif kind == "mcp_approval_response":
                answer = convert(item, _ApprovalResponse, path)
                if not answer.approve:
                    self._denied[answer.approval_request_id] = answer.reason or ""
        for number, (item, path) in enumerate(self._placed):
            if (translate := _translate(item)) is None:
                yield item, path
                continue
            told = translate(self, item, path)
            if not told:
                self._tolerance.ignore(f"{path}.{item['type']}")
            for one in told:
                one["call_id"] = one["call_id"] or f"{item['type']}_{number}"
                yield one, path

    def left_out(self, item: dict[str, Any], path: str) -> list[dict[str, Any]]:
        return []

    def mcp_call(self, item: dict[str, Any], path: str) -> list[dict[str, Any]]:
        call = convert(item, _McpCall, path)
        error = call.error if isinstance(call.error, str) else json_text(call.error or {})
        text = (call.output or "") if not call.error else f"Error: {error}"
        name = _name(f"{call.server_label}_{call.name}")
        return _told(call.id, name, call.arguments, text)

    def approval_request(self, item: dict[str, Any], path: str) -> list[dict[str, Any]]:
        """A call that was not made is told as one; one that was has an item of its own."""
        asked = convert(item, _ApprovalRequest, path)
        if asked.id is None or asked.id not in self._denied:
            return []
        reason = self._denied[asked.id]
        text = f"The user did not approve this call: {reason}".removesuffix(": ")
        return _told(asked.id, _name(f"{asked.server_label}_{asked.name}"), asked.arguments, text)

    def approval_response(self, item: dict[str, Any], path: str) -> list[dict[str, Any]]:
        """Raises Refusal for one that asks this server to make the call."""
        answer = convert(item, _ApprovalResponse, path)
        is_made = self._is_part or answer.approval_request_id in self._made
        if answer.approve and not is_made:
            problem = "this server calls no MCP tools; expected the mcp_call that was approved."
            raise invalid_field(f"{path}.approve", problem, "unsupported_parameter")
        return []

    def code_call(self, item: dict[str, Any], path: str) -> list[dict[str, Any]]:
        call = convert(item, _CodeCall, path)
        arguments = json_text({"code": call.code or ""})
        logs = "\n".join(one.logs for one in call.outputs or () if one.logs)
        return _told(call.id, "code_interpreter", arguments, logs)

    def file_search(self, item: dict[str, Any], path: str) -> list[dict[str, Any]]:
        """Without results, as they come unless they are asked for, it is left out."""
        call = convert(item, _FileSearch, path)
        if not call.results:
            return []
        found = (f"{one.filename or ''}\n{one.text or ''}".strip() for one in call.results)
        arguments = json_text({"queries": call.queries})
        return _told(call.id, "file_search", arguments, "\n\n".join(found))

    def image_call(self, item: dict[str, Any], path: str) -> list[dict[str, Any]]:
        call = convert(item, _ImageCall, path)
        arguments = json_text({"prompt": call.revised_prompt or ""})
        return _told(call.id, "image_generation", arguments, "An image.")

    def client_call(self, item: dict[str, Any], path: str) -> list[dict[str, Any]]:
        call = convert(item, _ClientCall, path)
        given = {"code": call.code} if call.code is not None else call.action or call.operation
        name = str(item["type"]).removesuffix("_call")
        return [_call(call.call_id, name, json_text(given or {}))]

    def client_result(self, item: dict[str, Any], path: str) -> list[dict[str, Any]]:
        done = convert(item, _ClientResult, path)
        text = done.output if done.output is not None else done.result
        if isinstance(text, list):
            text = "\n".join(part for one in text for part in (one.stdout, one.stderr) if part)
        return [_result(done.call_id, text or done.status or "")]

    def local_shell_result(self, item: dict[str, Any], path: str) -> list[dict[str, Any]]:
        done = convert(item, _ShellResult, path)
        return [_result(done.call_id, done.output)]


def _translate(item: dict[str, Any]) -> Translate | None:
    kind = item.get("type")
    return KINDS.get(kind) if isinstance(kind, str) else None


def _name(text: str) -> str:
    return _NO_NAME.sub("_", text)[:_NAME_CHARS_MAX]


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def _result(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def _told(call_id: str | None, name: str, arguments: str, text: str) -> list[dict[str, Any]]:
    """Return a call and its result; without an id they get one by their place."""
    return [_call(call_id or "", name, arguments), _result(call_id or "", text)]


Translate = Callable[[_Translation, dict[str, Any], str], list[dict[str, Any]]]
KINDS: Mapping[str, Translate] = {
    **dict.fromkeys(LEFT_OUT, _Translation.left_out),
    "mcp_call": _Translation.mcp_call,
    "mcp_approval_request": _Translation.approval_request,
    "mcp_approval_response": _Translation.approval_response,
    "code_interpreter_call": _Translation.code_call,
    "file_search_call": _Translation.file_search,
    "image_generation_call": _Translation.image_call,
    **dict.fromkeys(
        ("shell_call", "local_shell_call", "apply_patch_call", "program"), _Translation.client_call
    ),
    **dict.fromkeys(
        ("shell_call_output", "apply_patch_call_output", "program_output"),
        _Translation.client_result,
    ),
    "local_shell_call_output": _Translation.local_shell_result,
}
"""What becomes of an item, by its type."""
