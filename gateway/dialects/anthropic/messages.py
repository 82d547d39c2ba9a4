"""Anthropic's Messages: bytes to a `Call`, deltas to bytes. Pure.

An answer is a list of blocks, text and tool uses in the order in which they began; a stream writes
them one after the other. A unary answer is the fold of the same deltas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine.api import Sampling
from gateway.dialects import sse
from gateway.dialects.anthropic import wire
from gateway.dialects.anthropic.prompt import bad, prompt_of
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
    OutputFormat,
    Prompt,
    Reply,
    RequestMetadata,
    Text,
)
from gateway.errors import Kind, Refusal

NOT_IN_PREWARM = "it is not allowed when max_tokens is 0."
ID_PREFIX = "msg_"


class AnthropicDialect:
    """The dialect of `/v1/messages` and, for counting, of `/v1/messages/count_tokens`."""

    name = "anthropic"
    stream_content_type = sse.CONTENT_TYPE
    error_body = staticmethod(wire.error_body)

    def __init__(self, *, counts: bool = False) -> None:
        self._counts = counts

    def parse(self, body: bytes, asked: RequestMetadata = NO_METADATA) -> Call:
        """Bytes to a call. Unknown betas are nothing to it. Raises Refusal."""
        version = asked.version or wire.VERSIONS[-1]
        if version not in wire.VERSIONS:
            message = (
                f"anthropic-version: {version[:64]!r} is not a version that is spoken here; there"
                f" are {' and '.join(wire.VERSIONS)}."
            )
            raise Refusal(Kind.BAD, "invalid_version", message, param="anthropic-version")
        fields = wire.decode(body)
        _check_settings(fields, version)
        prompt = msgspec.structs.replace(prompt_of(fields, version), output_format=_format(fields))
        _check_prompt(prompt)
        operation: Literal["generate", "prewarm", "count"] = "generate"
        if self._counts:
            operation = "count"
        elif fields.max_tokens is None:
            what = "it is required: how many tokens may the answer have?"
            raise bad("max_tokens", what, "missing_required_parameter")
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
        )

    def encoder(self, call: Call, reply: Reply) -> AnthropicEncoder:
        """Makes the answer's bytes."""
        return AnthropicEncoder(reply)

    def keep_alive(self) -> bytes:
        """An event that every client of it knows and ignores."""
        return sse.event(b'{"type":"ping"}', "ping")

    def headers(self, request_id: str) -> dict[str, str]:
        """What its SDKs read."""
        return {"request-id": f"req_{request_id}"}

    def count_body(self, tokens: int, cached: int) -> bytes:
        """The answer to a call that only counts."""
        return msgspec.json.encode({"input_tokens": tokens})


# --- a request's settings ----------------------------------------------------------------------


def _check_settings(fields: wire.Body, version: str) -> None:
    if version == wire.VERSION_WITHOUT_SAMPLING:
        for name in ("temperature", "top_p", "top_k"):
            if getattr(fields, name) is not None:
                what = f"there is no such setting in version {version}, not even at its default."
                raise bad(name, what, "unsupported_parameter")
    for number, stop in enumerate(fields.stop_sequences or ()):
        if not stop.strip():
            what = "each stop sequence must contain non-whitespace."
            raise bad(f"stop_sequences[{number}]", what)
    if fields.thinking is not None and fields.thinking.type == "enabled":
        what = "this model does not think in steps of its own; leave it out, or disable it."
        raise bad("thinking.type", what, "unsupported_parameter")


def _check_prompt(prompt: Prompt) -> None:
    if prompt.continues and prompt.output_format.kind != "text":
        what = "a last message of the assistant's cannot be continued as JSON of a schema."
        raise bad(prompt.output_format.path.removesuffix(".schema"), what)


def _check_prewarm(fields: wire.Body) -> None:
    """A prewarm computes a prompt and answers nothing; what shapes an answer has no place in it."""
    if fields.stream:
        raise bad("stream", NOT_IN_PREWARM)
    wanted, path = _wanted(fields)
    if wanted is not None:
        raise bad(path, NOT_IN_PREWARM)
    if fields.tool_choice is not None and fields.tool_choice.type in ("any", "tool"):
        raise bad("tool_choice", NOT_IN_PREWARM)


def _generation(fields: wire.Body) -> GenerationParameters:
    temperature = 1.0 if fields.temperature is None else fields.temperature
    if fields.top_p == 0:
        temperature = 0.0  # an empty nucleus keeps the best token alone
    return GenerationParameters(
        max_tokens=fields.max_tokens,
        sampling=Sampling(
            temperature=temperature,
            top_k=fields.top_k or 0,
            top_p=fields.top_p or 1.0,
            seed=fields.seed,
        ),
        stop=tuple(fields.stop_sequences or ()),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
    )


def _wanted(fields: wire.Body) -> tuple[wire.Format | None, str]:
    """The form of the answer and the field it came in: older SDKs have one of its own."""
    wanted = None if fields.output_config is None else fields.output_config.format
    if fields.output_format is None:
        return wanted, "output_config.format"
    if wanted is not None and wanted != fields.output_format:
        raise bad("output_format", "it differs from output_config.format; give one of them.")
    return fields.output_format, "output_format"


def _format(fields: wire.Body) -> OutputFormat:
    wanted, path = _wanted(fields)
    if wanted is None:
        return OutputFormat()
    return OutputFormat("json_schema", wire.json_text(wanted.schema), f"{path}.schema")


def _cache(fields: wire.Body) -> CacheDirectives:
    asked = fields.diagnostics
    return CacheDirectives(
        profile="anthropic",
        lookback=20,
        compare_with=(asked and asked.previous_message_id) or "",
        remember=asked is not None,
    )


def _digests(fields: wire.Body) -> tuple[tuple[str, str], ...]:
    """What belongs to a prompt without being written in it."""
    config = fields.output_config or wire.OutputConfig()
    settings = {
        "tool_choice": fields.tool_choice,
        "thinking": fields.thinking and fields.thinking.type,
        "output_config.effort": config.effort,
        "output_config.format": _wanted(fields)[0],
    }
    return tuple(
        (name, hashlib.blake2b(msgspec.json.encode(value), digest_size=16).hexdigest())
        for name, value in settings.items()
        if value is not None
    )


# --- answers -------------------------------------------------------------------------------------


class _Block:
    """A block of an answer, while it grows: text, or a tool's use."""

    def __init__(self, call: int | None, call_id: str = "", name: str = "") -> None:
        self.call = call
        self._call_id = call_id
        self._name = name
        self._parts: list[str] = []

    def add(self, piece: str) -> dict[str, Any]:
        """More of it; the delta that says so."""
        self._parts.append(piece)
        if self.call is None:
            return {"type": "text_delta", "text": piece}
        return {"type": "input_json_delta", "partial_json": piece}

    def start(self) -> dict[str, Any]:
        """How a stream announces it."""
        return self._made("", {})

    def whole(self) -> dict[str, Any]:
        """All of it."""
        text = "".join(self._parts)
        return self._made(text, _object(text) if self.call is not None else {})

    def _made(self, text: str, arguments: object) -> dict[str, Any]:
        if self.call is None:
            return {"type": "text", "text": text, "citations": None}
        return {"type": "tool_use", "id": self._call_id, "name": self._name, "input": arguments}


def _object(text: str) -> object:
    """A JSON object as it stands; nothing of one that was cut off or is none."""
    try:
        is_object = isinstance(msgspec.json.decode(text or "{}"), dict)
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    return msgspec.Raw(text.encode()) if text and is_object else {}


class AnthropicEncoder:
    """Deltas of one answer to bytes: events as they come, or one message of them all."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._blocks: list[_Block] = []
        self._is_open = False
        self._end = ChoiceEnd(0, "stop")

    def stream(self, delta: Delta) -> bytes:
        """The events of one delta; may be none."""
        match delta:
            case Begin(usage=usage, diagnosis=diagnosis):
                message = self._message([], None, None, wire.usage(usage), diagnosis)
                return _event("message_start", message=message)
            case Text(text=text):
                return self._grow(None, text) if text else b""
            case CallText(call=call, call_id=call_id, name=name, arguments=arguments):
                return self._grow(call, arguments, call_id, name)
            case ChoiceEnd():
                self._end = delta
                return self._stop()
            case End(usage=usage):
                reason, sequence = _reason(self._end)
                end = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
                return _event("message_delta", delta=end, usage=wire.delta_usage(usage))

    def close(self) -> bytes:
        """After the last delta of a whole answer."""
        return _event("message_stop")

    def error_event(self, refusal: Refusal) -> bytes:
        """The answer breaks off: what SDKs raise from inside a stream."""
        request_id = self._reply.response_id.removeprefix(ID_PREFIX)
        return sse.event(msgspec.json.encode(wire.error_object(refusal, request_id)), "error")

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """The fold of the stream."""
        diagnosis = None
        for delta in deltas:
            self.stream(delta)
            if isinstance(delta, Begin):
                diagnosis = delta.diagnosis
        last = deltas[-1]
        assert isinstance(last, End), "a whole answer ends with its usage"
        blocks = [block.whole() for block in self._blocks]
        usage = wire.usage(last.usage)
        return msgspec.json.encode(self._message(blocks, *_reason(self._end), usage, diagnosis))

    def _grow(self, call: int | None, piece: str, call_id: str = "", name: str = "") -> bytes:
        """A piece of the open block, or of a new one."""
        events = b""
        if not self._is_open or self._blocks[-1].call != call:
            assert call is None or call_id, "a call begins with its id"
            events = self._stop()
            self._blocks.append(_Block(call, call_id, name))
            self._is_open = True
            start = self._blocks[-1].start()
            events += _event("content_block_start", index=self._index, content_block=start)
        if piece:
            grown = self._blocks[-1].add(piece)
            events += _event("content_block_delta", index=self._index, delta=grown)
        return events

    def _stop(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return _event("content_block_stop", index=self._index)

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


def _reason(end: ChoiceEnd) -> tuple[str, str | None]:
    if end.reason == "tool_calls":
        return "tool_use", None
    if end.reason == "length":
        return "max_tokens", None
    if end.stop_sequence is not None:
        return "stop_sequence", end.stop_sequence
    return "end_turn", None


def _event(kind: str, **fields: object) -> bytes:
    return sse.event(msgspec.json.encode({"type": kind, **fields}), kind)


DIALECT = AnthropicDialect()
COUNT_DIALECT = AnthropicDialect(counts=True)
