"""Gemini's generateContent: parse a body to a `Call`, encode deltas to bytes.

A stream consists of `data:` lines only or, without `alt=sse`, of one JSON array written element by
element. A function call is sent in one part: the encoder buffers its arguments until the call is
complete. Functions are pure: `gemini.family` binds the dialect to paths.
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
    OutputCount,
    OutputFormat,
    Reply,
    RequestMetadata,
    Text,
    Thinking,
    Thought,
    TokenText,
    UsageRecord,
    choice_format,
    temperature_of,
)
from gateway.dialects.gemini import wire
from gateway.dialects.gemini.prompt import prompt_of
from gateway.dialects.gemini.schema import json_schema, lowercase_types
from gateway.dialects.protocol import Dialect
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import decode_json, encode_json, invalid_field, json_text
from gateway.errors import Kind, Refusal

_EMBEDS = (
    "Gemini's embeddings are not supported; POST /v1/embeddings makes them where a model is set."
)
_NOT_SERVED = {
    **dict.fromkeys(("embedContent", "batchEmbedContents", "asyncBatchEmbedContent"), _EMBEDS),
    **dict.fromkeys(("embedText", "batchEmbedText"), _EMBEDS),
    "batchGenerateContent": "Batches are not supported; send the requests one by one.",
    **dict.fromkeys(
        ("predict", "predictLongRunning"),
        "Generating images and videos is not supported; this server generates text.",
    ),
    "bidiGenerateContent": "Live sessions are not supported; use streamGenerateContent.",
}
"""Methods of Google's models that this server lacks: the message."""


def _no_method(action: str) -> Refusal:
    """Return the refusal of a method that is not served."""
    if action in _NOT_SERVED:
        return Refusal(Kind.NOT_FOUND, "not_served", _NOT_SERVED[action])
    served = "generateContent, streamGenerateContent or countTokens"
    message = f"Unknown method {action[:64]!r}; expected {served}."
    return Refusal(Kind.NOT_FOUND, "not_found", message)


class GeminiDialect(Dialect):
    """The dialect of `/{v1,v1beta,v1alpha}/models/{model}:{action}`.

    `is_array`: a stream is a JSON array instead of server-sent events.
    """

    name = family = "gemini"
    operation = "generate_content"
    error = wire.GeminiErrorAnswer

    def __init__(self, *, is_array: bool = False) -> None:
        self._is_array = is_array
        self.stream_content_type = "application/json" if is_array else sse.CONTENT_TYPE

    def parse(self, body: bytes, metadata: RequestMetadata = NO_METADATA) -> Call:
        """Return the call of a body and its path's action. Raises Refusal."""
        if metadata.action == "countTokens":
            return _count(body, metadata)
        if metadata.action not in ("generateContent", "streamGenerateContent"):
            raise _no_method(metadata.action)
        tolerance = Tolerance(metadata.tolerance)
        fields = wire.decode(body, wire.GenerateBody, tolerance)
        is_stream = metadata.action == "streamGenerateContent"
        return _call(fields, metadata.model, tolerance, is_stream=is_stream)

    def encoder(self, call: Call, reply: Reply) -> GeminiEncoder:
        """Return the encoder of one answer."""
        return GeminiEncoder(call, reply, is_array=self._is_array)

    def keep_alive(self) -> bytes:
        """Return an empty line, the only filler that Gemini's SDK does not reject."""
        return b"\n"

    def error_body(self, refusal: Refusal, request_id: str) -> tuple[int, bytes]:
        """Return the HTTP status and the JSON body of an error."""
        status, body = wire.error_object(refusal)
        return status, msgspec.json.encode(body)

    def count_body(self, tokens: int, cached: int) -> bytes:
        """Return the answer of countTokens."""
        counts = {"totalTokens": tokens}
        if cached:
            counts["cachedContentTokenCount"] = cached
        return msgspec.json.encode(counts)


def _count(body: bytes, metadata: RequestMetadata) -> Call:
    tolerance = Tolerance(metadata.tolerance)
    fields = wire.decode(body, wire.CountBody, tolerance)
    inner = fields.generate_content_request
    if inner is not None and (fields.contents or fields.system_instruction or fields.tools):
        problem = "contents, systemInstruction or tools are set too; expected only one of the two."
        raise invalid_field("generateContentRequest", problem)
    request = inner or wire.GenerateBody(
        contents=fields.contents,
        system_instruction=fields.system_instruction,
        tools=fields.tools,
        tool_config=fields.tool_config,
    )
    call = _call(request, metadata.model, tolerance, is_stream=False)
    return msgspec.structs.replace(call, operation="count")


def _call(fields: wire.GenerateBody, model: str, tolerance: Tolerance, *, is_stream: bool) -> Call:
    settings = fields.generation_config
    _take_hints(fields, tolerance)
    prompt = prompt_of(fields, tolerance, needs_contents=True)
    resource = fields.cached_content
    if resource:
        if fields.system_instruction is not None or fields.tools or fields.tool_config is not None:
            problem = (
                "the cached content holds the system instruction, the tools and their"
                " configuration; omit systemInstruction, tools and toolConfig."
            )
            raise invalid_field("cachedContent", problem)
        name = resource if resource.startswith("cachedContents/") else f"cachedContents/{resource}"
        prompt = msgspec.structs.replace(prompt, resource=name)
    choices = settings.candidate_count or 1
    return Call(
        model=model.removeprefix("models/"),
        prompts=(
            msgspec.structs.replace(
                prompt,
                output_format=_format(settings),
                thinking=_thinking(settings.thinking_config),
            ),
        ),
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
        ignored=tolerance.ignored,
    )


def _take_hints(fields: wire.GenerateBody, tolerance: Tolerance) -> None:
    """Note the hints that have no effect here. Raises Refusal in the strict mode."""
    settings = fields.generation_config
    tolerance.take_hint("serviceTier", fields.service_tier, wire.SERVICE_TIERS)
    tolerance.take_hint("store", fields.store, (False,))
    resolution = settings.media_resolution
    unset = ("MEDIA_RESOLUTION_UNSPECIFIED",)
    tolerance.take_hint("generationConfig.mediaResolution", resolution, unset)
    civic = settings.enable_enhanced_civic_answers
    tolerance.take_hint("generationConfig.enableEnhancedCivicAnswers", civic, (False,))
    if settings.thinking_config not in _NO_THINKING:
        tolerance.ignore("generationConfig.thinkingConfig")
    for name, value in (("safetySettings", fields.safety_settings), ("labels", fields.labels)):
        if value:
            tolerance.ignore(name)


_NO_LEVEL = "THINKING_LEVEL_UNSPECIFIED"
_NO_THINKING = (
    wire.ThinkingConfig(),
    wire.ThinkingConfig(thinking_budget=0),
    wire.ThinkingConfig(thinking_level=_NO_LEVEL),
)


def _thinking(wanted: wire.ThinkingConfig) -> Thinking:
    """Return what the request asks for. A negative budget leaves it to the model."""
    budget, level = wanted.thinking_budget, wanted.thinking_level or ""
    return Thinking(
        effort="" if level == _NO_LEVEL else level.lower(),
        budget_tokens=budget if budget is not None and budget >= 0 else None,
        is_shown=wanted.include_thoughts,
    )


def _sampling(settings: wire.GenerationConfig) -> Sampling:
    if settings.logprobs and not settings.response_logprobs:
        problem = "only allowed when responseLogprobs is true."
        raise invalid_field("generationConfig.logprobs", problem)
    return Sampling(
        temperature=temperature_of(settings.temperature, settings.top_p),
        top_k=settings.top_k or 0,
        top_p=settings.top_p or 1.0,
        presence_penalty=settings.presence_penalty or 0.0,
        frequency_penalty=settings.frequency_penalty or 0.0,
        seed=settings.seed,
        logprobs=(settings.logprobs or 0) if settings.response_logprobs else None,
    )


def _format(settings: wire.GenerationConfig) -> OutputFormat:
    text = settings.response_format[0].text if settings.response_format else None
    if text is not None:
        return _text_format(settings, text)
    schema = lowercase_types(settings.response_json_schema)
    path = "generationConfig.responseJsonSchema"
    if settings.response_schema is not None and schema is not None:
        problem = "responseSchema and responseJsonSchema are both set; expected only one."
        raise invalid_field("generationConfig.responseSchema", problem)
    if settings.response_schema is not None:
        schema = json_schema(settings.response_schema)
        path = "generationConfig.responseSchema"
    if settings.response_mime_type == "text/x.enum":
        return _choice(schema, path)
    if settings.response_mime_type != "application/json":
        if schema is not None:
            problem = "a response schema requires the MIME type 'application/json'."
            raise invalid_field("generationConfig.responseMimeType", problem)
        return OutputFormat()
    if schema is None:
        return OutputFormat("json_object")
    # responseSchema has a closed set of keywords; unknown ones in responseJsonSchema are ignored.
    is_strict = settings.response_schema is not None
    return OutputFormat("json_schema", json_text(schema), path, is_strict)


def _text_format(settings: wire.GenerationConfig, text: wire.TextFormat) -> OutputFormat:
    """Return the format that `responseFormat` says, the new name of the MIME type and schema."""
    path = "generationConfig.responseFormat"
    for name in ("response_mime_type", "response_schema", "response_json_schema"):
        if getattr(settings, name):
            problem = f"{wire.to_camel_case(name)} is set too; expected only one of the two."
            raise invalid_field(path, problem)
    schema, path = lowercase_types(text.schema), f"{path}[0].text.schema"
    mime_type = text.mime_type.lower().replace("_", "/")
    if mime_type == "text/x.enum":
        return _choice(schema, path)
    if schema is None:
        return OutputFormat("json_object" if mime_type == "application/json" else "text")
    if mime_type == "text/plain":
        problem = "'text/plain' has no schema; expected 'application/json'."
        raise invalid_field("generationConfig.responseFormat[0].text.mimeType", problem)
    return OutputFormat("json_schema", json_text(schema), path, strict=False)


def _choice(schema: Any, path: str) -> OutputFormat:
    """Return the format of one of a schema's values as plain text."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    if not isinstance(values, list) or not values or any(not isinstance(v, str) for v in values):
        problem = "the MIME type 'text/x.enum' requires a schema with an enum of strings."
        raise invalid_field(path, problem)
    return choice_format(values, path)


# --- the answer --------------------------------------------------------------------------------


class _Candidate:
    """Buffered deltas of one candidate. `has_content`: at least one part has been written."""

    def __init__(self) -> None:
        self.has_content = False
        self.call: CallText | None = None
        self.arguments: list[str] = []
        self.tokens: list[TokenText] = []
        self.end: ChoiceEnd | None = None
        self.is_malformed = False

    def add_call(self, delta: CallText) -> dict[str, Any] | None:
        """Buffer a piece of a call. Return the part of the previous call if this one is new."""
        previous = None
        if self.call is None or self.call.call != delta.call:
            previous = self.flush_call()
            self.call = delta
        self.arguments.append(delta.arguments)
        return previous

    def flush_call(self) -> dict[str, Any] | None:
        """Remove the buffered call and return its part; None if its arguments are truncated."""
        if self.call is None:
            return None
        call, text = self.call, "".join(self.arguments)
        self.call, self.arguments = None, []
        try:
            arguments = decode_json(text or "{}")
        except (msgspec.DecodeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            self.is_malformed = True
            return None
        return {"functionCall": {"id": call.call_id, "name": call.name, "args": arguments}}


class GeminiEncoder:
    """Encodes the deltas of one answer as stream chunks or as one object."""

    def __init__(self, call: Call, reply: Reply, *, is_array: bool) -> None:
        self._call = call
        self._reply = reply
        self._is_array = is_array
        self._has_begun = False
        self._usage = UsageRecord(0)
        self._candidates = [_Candidate() for _ in range(call.generation.choices)]

    def stream(self, delta: Delta) -> bytes:
        """Return the chunks of one delta, which may be none."""
        return b"".join(self._frame(chunk) for chunk in self._chunks(delta))

    def close(self) -> bytes:
        """Return the end of the JSON array; server-sent events have no last marker."""
        return b"]" if self._is_array else b""

    def error_event(self, refusal: Refusal) -> bytes:
        """Return the chunk that ends a failed stream; its first key is `error`."""
        framed = self._frame(wire.error_object(refusal)[1])
        return framed + (b"]" if self._is_array else b"")

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Return the answer in one object: the fold of the stream."""
        candidates: dict[int, dict[str, Any]] = {}
        last: dict[str, Any] = {}
        for delta in deltas:
            for chunk in self._chunks(delta):
                last = chunk
                for candidate in chunk["candidates"]:
                    _merge_candidate(candidates.setdefault(candidate["index"], {}), candidate)
        return encode_json(
            {**last, "candidates": [candidates[index] for index in sorted(candidates)]}
        )

    def _frame(self, chunk: dict[str, Any]) -> bytes:
        data = encode_json(chunk)
        if not self._is_array:
            return sse.event(data)
        start, self._has_begun = (b"," if self._has_begun else b"["), True
        return start + data + b"\n"

    def _chunks(self, delta: Delta) -> list[dict[str, Any]]:
        match delta:
            case Begin(usage=usage):
                self._usage = usage
                return []
            case OutputCount():
                return []
            case Text(index=index, text=text, tokens=tokens):
                self._candidates[index].tokens.extend(tokens)
                return [self._part(index, {"text": text})] if text else []
            case Thought(index=index, text=text):
                return [self._part(index, {"text": text, "thought": True})]
            case CallText(index=index):
                part = self._candidates[index].add_call(delta)
                return [] if part is None else [self._part(index, part)]
            case ChoiceEnd(index=index):
                self._candidates[index].end = delta
                return []
            case End(usage=usage):
                self._usage = usage
                return [self._chunk([self._final(i) for i in range(len(self._candidates))])]

    def _part(self, index: int, part: dict[str, Any]) -> dict[str, Any]:
        self._candidates[index].has_content = True
        return self._chunk([{"content": {"role": "model", "parts": [part]}, "index": index}])

    def _final(self, index: int) -> dict[str, Any]:
        """Return a candidate's last chunk, with its last call or an empty text.

        The SDK's chats drop a whole turn if one of its chunks has no parts.
        """
        candidate = self._candidates[index]
        part = candidate.flush_call()
        if part is None and candidate.has_content:
            part = {"text": ""}
        found: dict[str, Any] = {
            "content": {"role": "model", "parts": [] if part is None else [part]},
            "finishReason": _finish_reason(candidate),
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


def _merge_candidate(merged: dict[str, Any], piece: dict[str, Any]) -> None:
    """Append a piece of a candidate to `merged`; neighbouring texts become one text."""
    parts = merged["content"]["parts"] if merged else []
    for part in piece["content"]["parts"]:
        if parts and part == {"text": ""}:
            continue
        last = parts[-1] if parts else {}
        is_same = part.get("thought") == last.get("thought")
        if "text" in part and "text" in last and is_same:
            parts[-1] = {**part, "text": last["text"] + part["text"]}
        else:
            parts.append(part)
    merged |= {**piece, "content": {"role": "model", "parts": parts}}


def _finish_reason(candidate: _Candidate) -> str:
    if candidate.is_malformed:
        return "MALFORMED_FUNCTION_CALL"
    is_truncated = candidate.end is not None and candidate.end.reason == "length"
    return "MAX_TOKENS" if is_truncated else "STOP"


def _logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    def shown(token: TokenText) -> dict[str, Any]:
        text = token.data.decode("utf-8", "replace")
        return {"token": text, "tokenId": token.token_id, "logProbability": token.logprob}

    known = [token.logprob for token in tokens if token.logprob is not None]
    return {
        "avgLogprobs": math.fsum(known) / len(known) if known else 0.0,
        "logprobsResult": {
            "chosenCandidates": [shown(token) for token in tokens],
            "topCandidates": [{"candidates": [shown(t) for t in token.top]} for token in tokens],
        },
    }


def usage(record: UsageRecord) -> dict[str, Any]:
    """Return Gemini's usage object."""
    counts: dict[str, Any] = {
        "promptTokenCount": record.total_in,
        "candidatesTokenCount": record.out - record.thinking,
        "totalTokenCount": record.total_in + record.out,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": record.total_in}],
        **record.extras(),
    }
    if record.thinking:
        counts["thoughtsTokenCount"] = record.thinking
    cached = record.read_tokens()
    if cached:
        counts["cachedContentTokenCount"] = cached
        counts["cacheTokensDetails"] = [{"modality": "TEXT", "tokenCount": cached}]
    return counts


DIALECT = GeminiDialect()
ARRAY_DIALECT = GeminiDialect(is_array=True)
