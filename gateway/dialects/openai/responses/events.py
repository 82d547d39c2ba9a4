"""Encoder of OpenAI's responses: deltas to numbered events, or one object.

A response is a list of items: text goes into a message item, thoughts into a reasoning item, each
call is a separate item, and one item is open at a time. A unary answer is the response in the last
event of the stream. `openai.responses.dialect` makes an encoder for each answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gateway.dialects import sse
from gateway.dialects.canonical import (
    Begin,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    Diagnosis,
    End,
    OutputCount,
    Reply,
    StoredItem,
    Text,
    Thought,
    TokenText,
    UsageRecord,
)
from gateway.dialects.openai import tools, wire
from gateway.dialects.openai.responses.conversations import named_items
from gateway.errors import Kind, Refusal

Event = dict[str, Any]


class ResponsesEncoder:
    """Encodes the deltas of one answer as numbered events or as one response."""

    def __init__(self, call: Call, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._echo: dict[str, Any] = msgspec.json.decode(dict(call.cache.echo)["response"])
        self._sequence = 0
        self._has_begun = False
        self._output: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._tokens: list[TokenText] = []
        self._open: Literal["message", "reasoning"] | int | None = None
        """The open item: its kind, or the number of a call; None between items."""
        self._is_truncated = False
        self._diagnosis: Diagnosis | None = None
        self.is_stored = False
        self.is_appended = bool(call.thread.conversation_id)

    def stream(self, delta: Delta) -> bytes:
        """Return the events of one delta, which may be none."""
        return b"".join(map(self._frame, self._events(delta)))

    def close(self) -> bytes:
        """Return no bytes: the type of the last event marks the end."""
        return b""

    def error_event(self, refusal: Refusal) -> bytes:
        """Return the `response.failed` event, which ends a failed stream."""
        events = self._begin()
        code = _CODES.get(refusal.kind, "server_error")
        failed = self._response(
            "failed", error={"code": code, "message": wire.error_message(refusal)}
        )
        events.append({"type": "response.failed", "response": failed})
        return b"".join(map(self._frame, events))

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Return the response of the stream's last event."""
        last: Event = {}
        for delta in deltas:
            for event in self._events(delta):
                last = event
        return msgspec.json.encode(last["response"])

    def response(self, end: End) -> bytes:
        """Return the complete response, after all deltas before the end."""
        return msgspec.json.encode(self._last(end.usage)["response"])

    def turn(self) -> list[StoredItem]:
        """Return the request's items and the output, as a conversation keeps them. O(bytes)."""
        own = msgspec.json.decode(self._call.thread.input, type=list[dict[str, Any]])
        output = [StoredItem(item["id"], msgspec.json.encode(item)) for item in self._output]
        return named_items(own, self._reply.response_id.removeprefix("resp_")) + output

    def _frame(self, event: Event) -> bytes:
        name = event["type"]
        numbered = {"type": name, "sequence_number": self._sequence, **event}
        self._sequence += 1
        return sse.event(msgspec.json.encode(numbered), name)

    def _events(self, delta: Delta) -> list[Event]:
        match delta:
            case Begin(diagnosis=diagnosis):
                self._diagnosis = diagnosis
                return self._begin()
            case OutputCount():
                return []
            case Text():
                return self._text(delta) if delta.text or delta.tokens else []
            case Thought():
                return self._thought(delta)
            case CallText():
                return self._call_text(delta)
            case ChoiceEnd(reason=reason):
                self._is_truncated = reason == "length" and self._call.operation != "prewarm"
                return self._end_of_choice()
            case End(usage=usage):
                return [self._last(usage)]

    # -- the response -------------------------------------------------------------------------

    def _begin(self) -> list[Event]:
        """Return the first two events on the first call, and none later."""
        if self._has_begun:
            return []
        self._has_begun = True
        response = self._response("in_progress")
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        ]

    def _end_of_choice(self) -> list[Event]:
        """Close the open item; an answer without output becomes an empty message."""
        events: list[Event] = []
        if not self._output and self._call.operation != "prewarm":
            events += self._open_message()
        return events + self._close_item()

    def _last(self, record: UsageRecord) -> Event:
        status = "incomplete" if self._is_truncated else "completed"
        details = {"reason": "max_output_tokens"} if self._is_truncated else None
        found = diagnostics(self._diagnosis, record)
        response = self._response(
            status,
            incomplete_details=details,
            usage=usage(record),
            **({} if found is None else {"prompt_cache_diagnostics": found}),
        )
        return {"type": f"response.{status}", "response": response}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": self._reply.response_id,
            "object": "response",
            "created_at": self._reply.created_s,
            "status": status,
            "background": False,
            **self._conversation(),
            "error": None,
            "incomplete_details": None,
            "model": self._reply.model,
            "output": list(self._output),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": self.is_stored,
            "truncation": "disabled",
            **self._echo,
            **more,
        }

    def _conversation(self) -> dict[str, Any]:
        """Return the conversation that the response belongs to: null, if it was not appended."""
        name = self._call.thread.conversation_id
        if not name:
            return {}
        return {"conversation": {"id": name} if self.is_appended else None}

    # -- items ------------------------------------------------------------------------------------

    def _add(self, kind: str, item: dict[str, Any]) -> Event:
        """Open a new item. Its id is made of the response's id and the item's index."""
        index = len(self._output)
        suffix = self._reply.response_id.removeprefix("resp_")
        self._output.append({"id": f"{kind}_{suffix}_{index}", **item})
        self._pieces, self._tokens = [], []
        added = dict(self._output[-1])
        return {"type": "response.output_item.added", "output_index": index, "item": added}

    def _item_reference(self, **more: Any) -> dict[str, Any]:
        """Return the id and the index of the open item, with `more` fields."""
        index = len(self._output) - 1
        return {"item_id": self._output[index]["id"], "output_index": index, **more}

    def _close_item(self) -> list[Event]:
        if self._open is None:
            return []
        item = self._output[-1]
        item["status"] = "incomplete" if self._is_truncated else "completed"
        if self._open == "reasoning":
            closing = self._thought_done()
        else:
            closing = self._message_done() if self._open == "message" else self._call_done()
        self._open = None
        done = {"output_index": len(self._output) - 1, "item": dict(item)}
        return [*closing, {"type": "response.output_item.done", **done}]

    # -- text -------------------------------------------------------------------------------------

    def _open_message(self) -> list[Event]:
        message = {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
        events = [*self._close_item(), self._add("msg", message)]
        self._open = "message"
        return [*events, self._part_added(self._part("", ()))]

    def _part_added(self, part: dict[str, Any]) -> Event:
        """Return the event of the first content part of the open item."""
        reference = self._item_reference(content_index=0)
        return {"type": "response.content_part.added", **reference, "part": part}

    def _part_done(self, part: dict[str, Any], **more: Any) -> list[Event]:
        """Set the content of the open item, and return the events that end its text."""
        self._output[-1]["content"] = [part]
        reference, text = self._item_reference(content_index=0), {"text": part["text"], **more}
        return [
            {"type": f"response.{part['type']}.done", **reference, **text},
            {"type": "response.content_part.done", **reference, "part": part},
        ]

    def _text(self, delta: Text) -> list[Event]:
        events: list[Event] = []
        if self._open != "message":
            events = self._open_message()
        self._pieces.append(delta.text)
        self._tokens.extend(delta.tokens)
        events.append(
            {
                "type": "response.output_text.delta",
                **self._item_reference(content_index=0),
                "delta": delta.text,
                "logprobs": self._logprobs(delta.tokens),
            }
        )
        return events

    def _message_done(self) -> list[Event]:
        part = self._part("".join(self._pieces), self._tokens)
        return self._part_done(part, logprobs=part["logprobs"])

    def _part(self, text: str, tokens: Sequence[TokenText]) -> dict[str, Any]:
        logprobs = self._logprobs(tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenText]) -> list[dict[str, Any]]:
        if self._call.generation.sampling.logprobs is None:
            return []
        return wire.token_entries(tokens)

    # -- thoughts ---------------------------------------------------------------------------------

    def _thought(self, delta: Thought) -> list[Event]:
        events: list[Event] = []
        if self._open != "reasoning":
            item = {"type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
            events = [*self._close_item(), self._add("rs", item)]
            self._open = "reasoning"
            events.append(self._part_added({"type": "reasoning_text", "text": ""}))
        self._pieces.append(delta.text)
        reference = self._item_reference(content_index=0)
        kind = "response.reasoning_text.delta"
        return [*events, {"type": kind, **reference, "delta": delta.text}]

    def _thought_done(self) -> list[Event]:
        return self._part_done({"type": "reasoning_text", "text": "".join(self._pieces)})

    # -- calls ------------------------------------------------------------------------------------

    def _call_text(self, delta: CallText) -> list[Event]:
        events: list[Event] = []
        if self._open != delta.call:
            events = self._close_item()
            namespace, name = tools.split_name(delta.name)
            item = {
                "type": "function_call",
                "status": "in_progress",
                "call_id": delta.call_id,
                **({"namespace": namespace} if namespace else {}),
                "name": name,
                "arguments": "",
            }
            events.append(self._add("fc", item))
            self._open = delta.call
        if delta.arguments:
            self._pieces.append(delta.arguments)
            kind = "response.function_call_arguments.delta"
            events.append({"type": kind, **self._item_reference(delta=delta.arguments)})
        return events

    def _call_done(self) -> list[Event]:
        item = self._output[-1]
        item["arguments"] = "".join(self._pieces)
        done = self._item_reference(arguments=item["arguments"], name=item["name"])
        return [{"type": "response.function_call_arguments.done", **done}]


_CODES = {Kind.RATE: "rate_limit_exceeded", Kind.QUOTA: "rate_limit_exceeded"}
"""Error codes of a failed response, a closed list; other kinds are `server_error`."""


def usage(record: UsageRecord) -> dict[str, Any]:
    """Return the usage object. Writes of a class other than 30m and 12h count as 30m.

    The written tokens are split by class only if there are any: clients read the details as a
    record of numbers, in which an object has no place.
    """
    long, written = record.write.get("12h", 0), record.write_tokens()
    split = {"ttl_30m_tokens": written - long, "ttl_12h_tokens": long}
    return {
        "input_tokens": record.total_in,
        "input_tokens_details": {
            "cached_tokens": record.read_tokens(),
            "cache_write_tokens": written,
            **({"cache_write_tokens_details": split} if written else {}),
        },
        "output_tokens": record.out,
        "output_tokens_details": {"reasoning_tokens": record.thinking},
        "total_tokens": record.total_in + record.out,
        **record.extras(),
    }


_REASONS = {
    "model": "model_changed",
    "partition": "prompt_cache_key_changed",
    "tools": "tools_changed",
    "system": "input_changed",
    "messages": "input_changed",
}
"""OpenAI's reason of a miss by cause; other causes are `unavailable`."""

_SETTINGS = {"text.format": "text_format_changed"}
"""OpenAI's reason of a miss by the setting that changed."""


def diagnostics(found: Diagnosis | None, record: UsageRecord) -> dict[str, Any] | None:
    """Return a diagnosis in OpenAI's terms; None if the request asked for none.

    OpenAI's reasons compare two requests. If the prompts agree and the engine lost the tokens, the
    diagnosis is `unavailable`. A changed output format invalidates no cached tokens, so it is the
    reason of a miss only if nothing was read.
    """
    if found is None:
        return None
    if found.outcome == "unknown":
        return {"type": "comparison_response_not_found"}
    read = record.read_tokens()
    if found.outcome == "hit" or found.setting:
        if read:
            return {"type": "cache_hit"}
        reason, missed = _SETTINGS.get(found.setting), record.total_in
    else:
        reason, missed = _REASONS.get(str(found.cause)), found.missed_tokens
    if reason is None:
        return {"type": "unavailable"}
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": missed,
        "comparison_reusable_tokens": found.reusable_tokens,
    }
