"""Gemini's generateContent: bytes to a `Call`, deltas to bytes. Pure.

A stream is `data:` lines and nothing else, or, where a client did not ask for server-sent events,
one JSON array written piece by piece. Function calls come whole: a piece of arguments is held back
until the call is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.api import Sampling
from gateway.dialects import sse
from gateway.dialects.canonical import (
    NO_METADATA,
    Begin,
    CacheDirectives,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    GenerationParameters,
    OutputFormat,
    Reply,
    RequestMetadata,
    Text,
    TokenText,
    UsageRecord,
)
from gateway.dialects.gemini import wire
from gateway.dialects.gemini.prompt import prompt_of
from gateway.dialects.gemini.schema import json_schema, lowercase_types
from gateway.errors import Kind, Refusal


class GeminiDialect:
    """The dialect of `/{v1,v1beta}/models/{model}:{action}`. `is_array`: streams without SSE."""

    name = "gemini"

    def __init__(self, *, is_array: bool = False) -> None:
        self._is_array = is_array
        self.stream_content_type = "application/json" if is_array else sse.CONTENT_TYPE

    def parse(self, body: bytes, asked: RequestMetadata = NO_METADATA) -> Call:
        """Bytes to a call. Raises Refusal."""
        if asked.action == "countTokens":
            return _count(body, asked)
        if asked.action not in ("generateContent", "streamGenerateContent"):
            message = f"There is no method {asked.action[:64]!r} on a model here."
            raise Refusal(Kind.NOT_FOUND, "not_found", message)
        fields = wire.decode(body, wire.GENERATE, wire.GenerateBody)
        return _call(fields, asked.model, is_stream=asked.action == "streamGenerateContent")

    def encoder(self, call: Call, reply: Reply) -> GeminiEncoder:
        """Makes the answer's bytes."""
        return GeminiEncoder(call, reply, is_array=self._is_array)

    def keep_alive(self) -> bytes:
        """An empty line: whatever else one writes, its SDK raises."""
        return b"\n"

    def error_body(self, refusal: Refusal, request_id: str) -> tuple[int, bytes]:
        """(HTTP status, JSON)."""
        status, body = wire.error_object(refusal)
        return status, msgspec.json.encode(body)

    def headers(self, request_id: str) -> dict[str, str]:
        """The answer's body names it."""
        return {}

    def count_body(self, tokens: int, cached: int) -> bytes:
        """The answer to countTokens."""
        found = {"totalTokens": tokens}
        if cached:
            found["cachedContentTokenCount"] = cached
        return msgspec.json.encode(found)


def _count(body: bytes, asked: RequestMetadata) -> Call:
    fields = wire.decode(body, wire.COUNT, wire.CountBody)
    inner = fields.generate_content_request
    if inner is not None and (fields.contents or fields.system_instruction or fields.tools):
        message = "Either generateContentRequest or the fields of one, not both."
        raise Refusal(Kind.BAD, "invalid_value", message, param="generateContentRequest")
    whole = inner or wire.GenerateBody(
        contents=fields.contents,
        system_instruction=fields.system_instruction,
        tools=fields.tools,
        tool_config=fields.tool_config,
    )
    return msgspec.structs.replace(_call(whole, asked.model, is_stream=False), operation="count")


def _call(fields: wire.GenerateBody, model: str, *, is_stream: bool) -> Call:
    settings = fields.generation_config
    prompt = prompt_of(fields, needs_contents=True)
    resource = fields.cached_content
    if resource:
        if fields.system_instruction is not None or fields.tools or fields.tool_config is not None:
            message = (
                "cachedContent already holds the system instruction, the tools and their"
                " configuration; a request that uses it cannot set them."
            )
            raise Refusal(Kind.BAD, "invalid_value", message, param="cachedContent")
        name = resource if resource.startswith("cachedContents/") else f"cachedContents/{resource}"
        prompt = msgspec.structs.replace(prompt, resource=name)
    choices = settings.candidate_count or 1
    return Call(
        model=model.removeprefix("models/"),
        prompts=(msgspec.structs.replace(prompt, output_format=_format(settings)),),
        generation=GenerationParameters(
            max_tokens=settings.max_output_tokens,
            choices=choices,
            samples=choices,
            choices_field="generationConfig.candidateCount",
            sampling=_sampling(settings),
            stop=tuple(settings.stop_sequences or ()),
        ),
        stream=is_stream,
        include_usage=True,
        cache=CacheDirectives(profile="gemini"),
    )


def _sampling(settings: wire.GenerationConfig) -> Sampling:
    if settings.logprobs is not None and not settings.response_logprobs:
        message = "logprobs is only allowed when responseLogprobs is true."
        raise Refusal(Kind.BAD, "invalid_value", message, param="generationConfig.logprobs")
    temperature = 1.0 if settings.temperature is None else settings.temperature
    return Sampling(
        temperature=0.0 if settings.top_p == 0 else temperature,
        top_k=int(settings.top_k or 0),
        top_p=settings.top_p or 1.0,
        presence_penalty=settings.presence_penalty or 0.0,
        frequency_penalty=settings.frequency_penalty or 0.0,
        seed=settings.seed,
        logprobs=(settings.logprobs or 0) if settings.response_logprobs else None,
    )


def _format(settings: wire.GenerationConfig) -> OutputFormat:
    schema = lowercase_types(settings.response_json_schema)
    path = "generationConfig.responseJsonSchema"
    if settings.response_schema is not None and schema is not None:
        message = "Set responseSchema or responseJsonSchema, not both."
        raise Refusal(Kind.BAD, "invalid_value", message, param="generationConfig.responseSchema")
    if settings.response_schema is not None:
        schema = json_schema(settings.response_schema)
        path = "generationConfig.responseSchema"
    if settings.response_mime_type != "application/json":
        if schema is not None:
            message = "A response schema needs responseMimeType application/json."
            raise Refusal(
                Kind.BAD, "invalid_value", message, param="generationConfig.responseMimeType"
            )
        return OutputFormat()
    if schema is None:
        return OutputFormat("json_object")
    text = msgspec.json.encode(schema).decode()
    # The older field knows a closed set of words; of the newer one the others are passed over.
    return OutputFormat("json_schema", text, path, strict=settings.response_schema is not None)


# --- the answer --------------------------------------------------------------------------------


class _Candidate:
    """What is known of one candidate and not written yet. `has_said`: a part of it was."""

    def __init__(self) -> None:
        self.has_said = False
        self.calls: dict[int, CallText] = {}
        self.tokens: list[TokenText] = []
        self.end: ChoiceEnd | None = None
        self.is_malformed = False

    def take_call(self, delta: CallText) -> dict[str, Any] | None:
        """The call before this one, if it is complete now."""
        before = self.take() if self.calls and delta.call not in self.calls else None
        held = self.calls.get(delta.call)
        if held is None:
            self.calls[delta.call] = delta
        else:
            self.calls[delta.call] = msgspec.structs.replace(
                held, arguments=held.arguments + delta.arguments
            )
        return before

    def take(self) -> dict[str, Any] | None:
        """The held call as a part."""
        if not self.calls:
            return None
        _, call = self.calls.popitem()
        self.calls.clear()
        try:
            arguments = msgspec.json.decode(call.arguments or "{}")
        except msgspec.DecodeError:
            self.is_malformed = True
            return None
        return {"functionCall": {"id": call.call_id, "name": call.name, "args": arguments}}


class GeminiEncoder:
    """Deltas of one answer to bytes: chunks as they come, or one object of them all."""

    def __init__(self, call: Call, reply: Reply, *, is_array: bool) -> None:
        self._call = call
        self._reply = reply
        self._is_array = is_array
        self._has_begun = False
        self._usage = UsageRecord(0)
        self._candidates = [_Candidate() for _ in range(call.generation.choices)]

    def stream(self, delta: Delta) -> bytes:
        """The chunks of one delta; may be none."""
        return b"".join(self._framed(chunk) for chunk in self._chunks(delta))

    def close(self) -> bytes:
        """Nothing ends a stream; an array is closed."""
        return b"]" if self._is_array else b""

    def error_event(self, refusal: Refusal) -> bytes:
        """The answer breaks off: a chunk whose first key is `error`."""
        framed = self._framed(wire.error_object(refusal)[1])
        return framed + (b"]" if self._is_array else b"")

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """The fold of the stream."""
        candidates: dict[int, dict[str, Any]] = {}
        whole: dict[str, Any] = {}
        for delta in deltas:
            for chunk in self._chunks(delta):
                whole = chunk
                for candidate in chunk["candidates"]:
                    _fold(candidates.setdefault(candidate["index"], {}), candidate)
        return msgspec.json.encode(
            {**whole, "candidates": [candidates[index] for index in sorted(candidates)]}
        )

    def _framed(self, chunk: dict[str, Any]) -> bytes:
        data = msgspec.json.encode(chunk)
        if not self._is_array:
            return sse.event(data)
        start, self._has_begun = (b"," if self._has_begun else b"["), True
        return start + data + b"\n"

    def _chunks(self, delta: Delta) -> list[dict[str, Any]]:
        match delta:
            case Begin(usage=usage):
                self._usage = usage
                return []
            case Text(index=index, text=text, tokens=tokens):
                self._candidates[index].tokens.extend(tokens)
                return [self._part(index, {"text": text})] if text else []
            case CallText(index=index):
                part = self._candidates[index].take_call(delta)
                return [] if part is None else [self._part(index, part)]
            case ChoiceEnd(index=index):
                self._candidates[index].end = delta
                return []
            case End(usage=usage):
                self._usage = usage
                return [self._chunk([self._last(i) for i in range(len(self._candidates))])]

    def _part(self, index: int, part: dict[str, Any]) -> dict[str, Any]:
        self._candidates[index].has_said = True
        return self._chunk([{"content": {"role": "model", "parts": [part]}, "index": index}])

    def _last(self, index: int) -> dict[str, Any]:
        """With the last call, or an empty text: to the SDK's chats a chunk without parts makes the
        whole turn invalid, and they forget it."""
        candidate = self._candidates[index]
        part = candidate.take()
        if part is None and candidate.has_said:
            part = {"text": ""}
        found: dict[str, Any] = {
            "content": {"role": "model", "parts": [] if part is None else [part]},
            "finishReason": _reason(candidate),
            "index": index,
        }
        if self._call.generation.sampling.logprobs is not None:
            found |= _logprobs(candidate.tokens)
        return found

    def _chunk(self, candidates: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "candidates": candidates,
            "usageMetadata": usage(self._usage),
            "modelVersion": self._reply.model,
            "responseId": self._reply.response_id,
        }


def _fold(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """One candidate's pieces to one: neighbouring texts are one text."""
    parts = whole["content"]["parts"] if whole else []
    for part in piece["content"]["parts"]:
        if parts and part == {"text": ""}:
            continue
        if parts and "text" in part and "text" in parts[-1]:
            parts[-1] = {"text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(part)
    whole |= {**piece, "content": {"role": "model", "parts": parts}}


def _reason(candidate: _Candidate) -> str:
    if candidate.is_malformed:
        return "MALFORMED_FUNCTION_CALL"
    cut = candidate.end is not None and candidate.end.reason == "length"
    return "MAX_TOKENS" if cut else "STOP"


def _logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    def one(token: TokenText) -> dict[str, Any]:
        text = token.data.decode("utf-8", "replace")
        return {"token": text, "tokenId": token.token_id, "logProbability": token.logprob}

    known = [token.logprob for token in tokens if token.logprob is not None]
    return {
        "avgLogprobs": math.fsum(known) / len(known) if known else 0.0,
        "logprobsResult": {
            "chosenCandidates": [one(token) for token in tokens],
            "topCandidates": [{"candidates": [one(t) for t in token.top]} for token in tokens],
        },
    }


def usage(record: UsageRecord) -> dict[str, Any]:
    """Gemini's usage object; every number from the one record."""
    found: dict[str, Any] = {
        "promptTokenCount": record.total_in,
        "candidatesTokenCount": record.out,
        "totalTokenCount": record.total_in + record.out,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": record.total_in}],
    }
    cached = record.read_tokens()
    if cached:
        found["cachedContentTokenCount"] = cached
        found["cacheTokensDetails"] = [{"modality": "TEXT", "tokenCount": cached}]
    return found


DIALECT = GeminiDialect()
ARRAY_DIALECT = GeminiDialect(is_array=True)
