"""Anthropic's Messages: parse a body to a `Call`, encode deltas to bytes.

An answer is a list of content blocks, text and tool use, in the order of their first delta. A
stream writes one block after the other; a unary answer is the fold of the same deltas. Functions
are pure: `anthropic.family` binds the dialect to paths.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from engine.api import Sampling
from gateway.dialects import sse
from gateway.dialects.anthropic import wire
from gateway.dialects.anthropic.prompt import prompt_of
from gateway.dialects.canonical import (
    NO_METADATA,
    Begin,
    CacheDirectives,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    Diagnosis,
    End,
    GenerationParameters,
    OutputCount,
    OutputFormat,
    Prompt,
    Reply,
    RequestMetadata,
    Text,
    Thinking,
    Thought,
    digest_of,
    temperature_of,
)
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import invalid_field, json_text
from gateway.errors import Refusal
from tenancy.limits import LimitState, Meter

NOT_IN_PREWARM = "not allowed when max_tokens is 0; omit it, or set max_tokens to at least 1."
ID_PREFIX = "msg_"
"""Prefix of a message's id."""


class AnthropicDialect:
    """The dialect of `/v1/messages` and, for counting, of `/v1/messages/count_tokens`."""

    name = family = "anthropic"
    operation = "chat"
    error = wire.AnthropicErrorAnswer
    stream_content_type = sse.CONTENT_TYPE
    error_body = staticmethod(wire.error_body)

    def __init__(self, *, counts: bool = False) -> None:
        self._counts = counts

    def parse(self, body: bytes, metadata: RequestMetadata = NO_METADATA) -> Call:
        """Return the call of a body. Raises Refusal."""
        version = metadata.version or wire.VERSIONS[-1]
        if version not in wire.VERSIONS:
            problem = (
                f"unsupported version {version[:64]!r}; expected {' or '.join(wire.VERSIONS)}."
            )
            raise invalid_field("anthropic-version", problem, "invalid_version")
        tolerance = Tolerance(metadata.tolerance)
        fields = wire.decode(body, tolerance)
        _check_settings(fields)
        _take_hints(fields, tolerance)
        prompt = msgspec.structs.replace(
            prompt_of(fields, version, tolerance),
            output_format=_format(fields),
            thinking=_thinking(fields),
        )
        _check_prompt(prompt)
        operation: Literal["generate", "prewarm", "count"] = "generate"
        if self._counts:
            operation = "count"
        elif fields.max_tokens is None:
            problem = "this field is required; expected the most output tokens of the answer."
            raise invalid_field("max_tokens", problem, "missing_required_parameter")
        elif fields.max_tokens == 0:
            operation = "prewarm"
            _check_prewarm(fields)
        return Call(
            model=fields.model,
            prompts=(prompt,),
            generation=_generation(fields),
            operation=operation,
            stream=bool(fields.stream),
            include_usage=True,
            partition=fields.cache_salt or "",
            client_user=(fields.metadata and fields.metadata.user_id) or "",
            priority=fields.priority or 0,
            cache=_cache(fields),
            digests=_digests(fields),
            ignored=tolerance.ignored,
        )

    def encoder(self, call: Call, reply: Reply) -> AnthropicEncoder:
        """Return the encoder of one answer."""
        return AnthropicEncoder(reply, call.generation.max_tokens)

    def keep_alive(self) -> bytes:
        """Return a `ping` event, which Anthropic's clients ignore."""
        return sse.event(b'{"type":"ping"}', "ping")

    def headers(self, request_id: str) -> dict[str, str]:
        """Return the request id in the header that Anthropic's SDKs read."""
        return {"request-id": f"req_{request_id}"}

    def limit_headers(self, states: Mapping[Meter, LimitState], now_ms: int) -> dict[str, str]:
        """Return all limits; the reset is the instant at which the full limit is available
        again."""
        headers = {}
        for meter, state in states.items():
            name = f"Anthropic-RateLimit-{meter.replace('_', '-').title()}"
            at = datetime.fromtimestamp(math.ceil(now_ms / 1000 + state.reset_s), UTC)
            headers[f"{name}-Limit"] = str(state.limit)
            headers[f"{name}-Remaining"] = str(state.remaining)
            headers[f"{name}-Reset"] = at.isoformat().replace("+00:00", "Z")
        return headers

    def count_body(self, tokens: int, cached: int) -> bytes:
        """Return the answer of `/v1/messages/count_tokens`."""
        return msgspec.json.encode({"input_tokens": tokens})


# --- a request's settings ----------------------------------------------------------------------


def _check_settings(fields: wire.Body) -> None:
    for number, stop in enumerate(fields.stop_sequences or ()):
        if not stop.strip():
            problem = "each stop sequence must contain non-whitespace."
            raise invalid_field(f"stop_sequences[{number}]", problem)


def _take_hints(fields: wire.Body, tolerance: Tolerance) -> None:
    """Note the hints that have no effect here. Raises Refusal in the strict mode."""
    thinking = fields.thinking
    if thinking is not None and thinking.type == "enabled" and tolerance.is_strict:
        problem = "'enabled' is not supported: the model has no extended thinking; expected"
        problem += " 'disabled', 'adaptive' or 'between_tools', or no thinking field."
        raise invalid_field("thinking.type", problem, "unsupported_parameter")
    if thinking is not None and thinking.type != "disabled":
        tolerance.ignore("thinking")
    if fields.output_config is not None:
        if fields.output_config.effort is not None:
            tolerance.ignore("output_config.effort")
        tolerance.take_hint("output_config.task_budget", fields.output_config.task_budget)
    tolerance.take_hint("service_tier", fields.service_tier, wire.SERVICE_TIERS)
    tolerance.take_hint("speed", fields.speed, ("standard",))


def _thinking(fields: wire.Body) -> Thinking:
    """Return what the request asks for: without `thinking` the model answers at once."""
    wanted = fields.thinking
    if wanted is None or wanted.type == "disabled":
        return Thinking(is_on=False, is_shown=False)
    effort = "" if fields.output_config is None else fields.output_config.effort or ""
    return Thinking(
        is_on=True,
        effort=effort,
        budget_tokens=wanted.budget_tokens,
        is_shown=wanted.display != "omitted",
    )


def _check_prompt(prompt: Prompt) -> None:
    if prompt.continues and prompt.output_format.kind != "text":
        problem = "a JSON format cannot continue an assistant prefill; end with a user message."
        raise invalid_field(prompt.output_format.path.removesuffix(".schema"), problem)


def _check_prewarm(fields: wire.Body) -> None:
    """Refuse fields that shape an answer: a prewarm computes the prompt and answers nothing."""
    if fields.stream:
        raise invalid_field("stream", NOT_IN_PREWARM)
    requested, path = _requested_format(fields)
    if requested is not None:
        raise invalid_field(path, NOT_IN_PREWARM)
    if fields.tool_choice is not None and fields.tool_choice.type in ("any", "tool"):
        raise invalid_field("tool_choice", NOT_IN_PREWARM)


def _generation(fields: wire.Body) -> GenerationParameters:
    return GenerationParameters(
        max_tokens=fields.max_tokens,
        sampling=Sampling(
            temperature=temperature_of(fields.temperature, fields.top_p),
            top_k=fields.top_k or 0,
            top_p=fields.top_p or 1.0,
            seed=fields.seed,
        ),
        stop=tuple(fields.stop_sequences or ()),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
    )


def _requested_format(fields: wire.Body) -> tuple[wire.Format | None, str]:
    """Return the answer's format and its field: older SDKs send `output_format`."""
    requested = None if fields.output_config is None else fields.output_config.format
    if fields.output_format is None:
        return requested, "output_config.format"
    if requested is not None and requested != fields.output_format:
        problem = "the value differs from output_config.format; expected only one of the two."
        raise invalid_field("output_format", problem)
    return fields.output_format, "output_format"


def _format(fields: wire.Body) -> OutputFormat:
    requested, path = _requested_format(fields)
    if requested is None:
        return OutputFormat()
    return OutputFormat("json_schema", json_text(requested.schema), f"{path}.schema")


def _cache(fields: wire.Body) -> CacheDirectives:
    diagnostics = fields.diagnostics
    return CacheDirectives(
        profile="anthropic",
        lookback=20,
        compare_with=(diagnostics and diagnostics.previous_message_id) or "",
        remember=diagnostics is not None,
    )


def _digests(fields: wire.Body) -> tuple[tuple[str, str], ...]:
    """Return digests of the settings that a miss diagnosis compares beside the prompt."""
    config = fields.output_config or wire.OutputConfig()
    settings = {
        "tool_choice": fields.tool_choice,
        "thinking": fields.thinking and fields.thinking.type,
        "output_config.effort": config.effort,
        "output_config.format": _requested_format(fields)[0],
    }
    return tuple((name, digest_of(value)) for name, value in settings.items() if value is not None)


# --- answers -------------------------------------------------------------------------------------


class _Block:
    """A content block of an answer under construction: text, a thought, or a tool use."""

    def __init__(self, call: int | None, call_id: str, name: str, *, is_thought: bool) -> None:
        self.call = call
        self.is_thought = is_thought
        self._call_id = call_id
        self._name = name
        self._parts: list[str] = []

    def add(self, piece: str) -> dict[str, Any]:
        """Append a piece and return its stream delta."""
        self._parts.append(piece)
        if self.is_thought:
            return {"type": "thinking_delta", "thinking": piece}
        if self.call is None:
            return {"type": "text_delta", "text": piece}
        return {"type": "input_json_delta", "partial_json": piece}

    def start(self) -> dict[str, Any]:
        """Return the empty block that `content_block_start` carries."""
        return self._content(text="", arguments={})

    def complete(self) -> dict[str, Any]:
        """Return the complete block of a unary answer."""
        text = "".join(self._parts)
        return self._content(text, _parse_object(text) if self.call is not None else {})

    def signature(self) -> str:
        """Return the signature of a thought: a digest, by which clients tell thoughts apart.

        The thought itself comes back in the history, so nothing is hidden in the signature.
        """
        return hashlib.sha256("".join(self._parts).encode()).hexdigest()

    def _content(self, text: str, arguments: object) -> dict[str, Any]:
        if self.is_thought:
            return {
                "type": "thinking",
                "thinking": text,
                "signature": self.signature() if text else "",
            }
        if self.call is None:
            return {"type": "text", "text": text}
        return {"type": "tool_use", "id": self._call_id, "name": self._name, "input": arguments}


def _parse_object(text: str) -> object:
    """Return a JSON object as raw text; `{}` if it is truncated or no object."""
    try:
        is_object = isinstance(msgspec.json.decode(text or "{}"), dict)
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    return msgspec.Raw(text.encode()) if text and is_object else {}


class AnthropicEncoder:
    """Encodes the deltas of one answer as stream events or as one message.

    `max_tokens`: the request's. An answer of fewer tokens that is cut off has filled the context.
    """

    def __init__(self, reply: Reply, max_tokens: int | None) -> None:
        self._reply = reply
        self._max_tokens = max_tokens
        self._blocks: list[_Block] = []
        self._is_open = False
        self._end = ChoiceEnd(0, "stop")

    def stream(self, delta: Delta) -> bytes:
        """Return the events of one delta, which may be none."""
        match delta:
            case Begin(usage=usage, diagnosis=diagnosis):
                message = self._message([], None, None, wire.usage(usage), diagnosis)
                return _event("message_start", message=message)
            case OutputCount():
                return b""
            case Text(text=text):
                return self._append(None, text) if text else b""
            case Thought(text=text):
                return self._append(None, text, is_thought=True)
            case CallText(call=call, call_id=call_id, name=name, arguments=arguments):
                return self._append(call, arguments, call_id, name)
            case ChoiceEnd():
                self._end = delta
                return self._close_block()
            case End(usage=usage):
                reason, sequence = self._stop_reason(usage.out)
                end = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
                return _event("message_delta", delta=end, usage=wire.delta_usage(usage))

    def close(self) -> bytes:
        """Return the `message_stop` event, which follows the last delta of a complete answer."""
        return _event("message_stop")

    def error_event(self, refusal: Refusal) -> bytes:
        """Return the event that ends a failed stream and that SDKs raise."""
        request_id = self._reply.response_id.removeprefix(ID_PREFIX)
        return sse.event(msgspec.json.encode(wire.error_object(refusal, request_id)), "error")

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Return the message: the fold of the stream."""
        diagnosis = None
        for delta in deltas:
            self.stream(delta)
            if isinstance(delta, Begin):
                diagnosis = delta.diagnosis
        last = deltas[-1]
        assert isinstance(last, End), "a complete answer ends with its usage"
        blocks = [block.complete() for block in self._blocks]
        usage = wire.usage(last.usage)
        reason, sequence = self._stop_reason(last.usage.out)
        return msgspec.json.encode(self._message(blocks, reason, sequence, usage, diagnosis))

    def _append(
        self,
        call: int | None,
        piece: str,
        call_id: str = "",
        name: str = "",
        *,
        is_thought: bool = False,
    ) -> bytes:
        """Append a piece to the open block, or to a new one, and return its events."""
        events = b""
        last = self._blocks[-1] if self._is_open else None
        if last is None or (last.call, last.is_thought) != (call, is_thought):
            assert call is None or call_id, "the first piece of a call has its id"
            events = self._close_block()
            self._blocks.append(_Block(call, call_id, name, is_thought=is_thought))
            self._is_open = True
            start = self._blocks[-1].start()
            events += _event("content_block_start", index=self._index, content_block=start)
        if piece:
            grown = self._blocks[-1].add(piece)
            events += _event("content_block_delta", index=self._index, delta=grown)
        return events

    def _close_block(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        signed = b""
        if self._blocks[-1].is_thought:
            delta = {"type": "signature_delta", "signature": self._blocks[-1].signature()}
            signed = _event("content_block_delta", index=self._index, delta=delta)
        return signed + _event("content_block_stop", index=self._index)

    def _stop_reason(self, output_tokens: int) -> tuple[str, str | None]:
        """Return the stop reason and the stop sequence of a complete answer."""
        end = self._end
        if end.reason == "tool_calls":
            return "tool_use", None
        if end.reason == "length":
            is_full = self._max_tokens is not None and output_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if end.stop_sequence is not None:
            return "stop_sequence", end.stop_sequence
        return "end_turn", None

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _message(
        self,
        content: list[dict[str, Any]],
        stop_reason: str | None,
        stop_sequence: str | None,
        usage: dict[str, Any],
        diagnosis: Diagnosis | None,
    ) -> dict[str, Any]:
        return {
            "id": self._reply.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._reply.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "stop_details": None,
            "container": None,
            "diagnostics": wire.diagnostics(diagnosis),
            "usage": usage,
        }


def _event(kind: str, **fields: object) -> bytes:
    return sse.event(msgspec.json.encode({"type": kind, **fields}), kind)


DIALECT = AnthropicDialect()
COUNT_DIALECT = AnthropicDialect(counts=True)
