"""Wire types that OpenAI's endpoints share: decoding, generation fields, usage and errors.

`openai.chat`, `openai.completions` and `openai.responses` build on it; none of them knows another.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from engine.api import Sampling
from gateway.dialects import sse
from gateway.dialects.canonical import (
    Begin,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    GenerationParameters,
    OutputCount,
    Reply,
    RequestMetadata,
    Thought,
    TokenText,
    ToolCall,
    UsageRecord,
    temperature_of,
)
from gateway.dialects.canonical import Text as TextDelta
from gateway.dialects.protocol import ErrorShape
from gateway.dialects.tolerance import HINTS, REASONING_HINTS, Tolerance, asks_nothing
from gateway.dialects.validation import (
    convert,
    decode_object,
    exact_number,
    invalid_field,
    unknown_field,
)
from gateway.errors import TOO_LONG, Kind, Refusal
from tenancy.limits import LimitState, Meter

Text = Annotated[str, Meta(max_length=10_000_000)]
Short = Annotated[str, Meta(max_length=512)]
StopText = Annotated[str, Meta(min_length=1, max_length=1_000)]
TokenIds = Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...], Meta(max_length=4_000_000)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PatternText = Annotated[str, Meta(max_length=32_768)]
GrammarText = Annotated[str, Meta(max_length=131_072)]
Choices = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=1_000)]], Meta(max_length=1_000)
]
CHOICES_MAX = 128
"""Most choices of one prompt."""

FAST_DECODE_BYTES_MAX = 65_536
"""Most bytes of a body that is first decoded strictly: a failed attempt on more costs too much."""

CHAT_FIELD = "this field belongs to /v1/chat/completions."
NO_INFILL = "the model only continues text and cannot fill a gap; omit it."
NO_BEAM_SEARCH = "beam search is not supported; expected n or best_of, which sample."
TEMPLATES = "the chat template comes from the model, never from a request; omit it."
SPECIALS = "special tokens are never part of the text; omit it."
REFUSED_FIELDS: Mapping[str, str] = {
    "chat_template": TEMPLATES,
    "chat_template_kwargs": TEMPLATES,
    "documents": TEMPLATES,
    "logits_processors": "requests cannot carry code; omit it.",
    "use_beam_search": NO_BEAM_SEARCH,
    "length_penalty": NO_BEAM_SEARCH,
    "early_stopping": NO_BEAM_SEARCH,
    "include_stop_str_in_output": "a stop string is never part of the text; expected false.",
    "skip_special_tokens": SPECIALS,
    "spaces_between_special_tokens": SPECIALS,
    "truncate_prompt_tokens": "prompts are never truncated; a prompt that is too long is refused.",
    "return_token_ids": "token ids are not reported; expected logprobs, which hold token bytes.",
}
"""Fields that no endpoint can honour, with the reason. They are refused, not ignored, because an
answer that ignores a setting looks correct."""

SERVICE_TIERS = ("auto", "default")
"""Tiers that the server has; any other tier is served as the default one."""

RECORD_FIELDS = frozenset({"request_id", "rid", "session_id", "safety_identifier"})
"""Records of a request that every endpoint takes in every mode. They do not change the answer."""

NEUTRAL_VALUES: Mapping[str, Sequence[object]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "return_token_ids": (False,),
    "documents": ([],),
    "chat_template_kwargs": ({},),
    "logits_processors": ([],),
}
"""Values at which a refused field has no effect and is accepted; clients send such defaults."""

OTHER_SETTINGS: Mapping[str, Sequence[object]] = {
    # vLLM
    **dict.fromkeys(("prompt_logprobs", "logprob_token_ids", "allowed_token_ids"), ()),
    **dict.fromkeys(("bad_words", "media_io_kwargs", "mm_processor_kwargs", "vllm_xargs"), ()),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "repetition_detection"), ()),
    **dict.fromkeys(("watermarking", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("return_token_offsets", "return_prompt_text"), (False,)),
    "truncation_side": ("left", "right"),
    "routed_experts_prompt_start": (0,),
    "return_mm_kwargs": (True, False),
    # SGLang
    **dict.fromkeys(("stop_regex", "lora_path", "custom_logit_processor", "custom_params"), ()),
    **dict.fromkeys(("no_stop_trim", "return_hidden_states", "return_routed_experts"), (False,)),
    # llama.cpp and those that took its samplers
    **dict.fromkeys(("typical_p", "tfs_z"), (1.0, 1)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "dynatemp_range", "top_a"), (0.0, 0)),
    **dict.fromkeys(("mirostat", "mirostat_mode", "n_probs"), (0,)),
}
"""Settings of other engines that this one does not have, with the values at which they do nothing:
clients send them as defaults. Null and empty values do nothing either."""

T = TypeVar("T")
Body = TypeVar("Body", bound=Struct)


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Stream options. `include_obfuscation` is accepted without effect: chunks are not padded.

    `continuous_usage_stats`, a field of vLLM: every chunk has the usage so far.
    """

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


ALIASES: Mapping[str, str] = {"repeat_penalty": "repetition_penalty", "random_seed": "seed"}
"""Fields of other engines that every endpoint honours under its own name."""

LIMIT_ALIASES: Mapping[str, str] = {"n_predict": "max_tokens", "num_predict": "max_tokens"}
"""Limits of output tokens under the names of other engines, where a negative one means none."""


class FieldRules(Struct, frozen=True, kw_only=True):
    """How an endpoint treats top-level fields that its body does not know.

    Outside the strict mode, `aliases` are fields of other servers with their equal here; of refused
    objects, `switches` may hold hints on reasoning; and `cleaned` are fields whose content is
    cleaned before it is decoded.
    """

    refused: Mapping[str, str] = {}
    """Fields that cannot be honoured, with the reason."""
    neutral: Mapping[str, Sequence[object]] = {}
    """Values without effect, which are accepted, of refused fields and of those of no list."""
    records: frozenset[str] = RECORD_FIELDS
    """Fields that are ignored in every mode."""
    aliases: Mapping[str, str] = {}
    switches: frozenset[str] = frozenset()
    cleaned: Mapping[str, Callable[[Any, Tolerance], Any]] = {}


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's newer form of the `guided_*` fields. Those of `STRUCTURED_HINTS` have no effect."""

    json: Any = None
    json_object: bool | None = None
    regex: PatternText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    structural_tag: None = None
    whitespace_pattern: Short | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


STRUCTURED_HINTS = (
    "whitespace_pattern",
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
)
"""Fields of `StructuredOutputs` that are taken without effect."""


class SamplingFields(Struct, frozen=True, kw_only=True):
    """Fields of every endpoint: OpenAI's, and then those of self-hosted engines.

    `openai.constraints` reads the constraints on the answer.
    """

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None
    ) = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    user: Short | None = None
    # Fields that self-hosted engines added.
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=128)] | None
    ) = None
    cache_salt: Short | None = None
    extra_key: Short | None = None
    prompt_cache_key: Short | None = None
    priority: Annotated[int, Meta(ge=-100, le=0)] | None = None
    guided_json: Any = None
    json_schema: Any = None
    guided_regex: PatternText | None = None
    regex: PatternText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    ebnf: GrammarText | None = None
    grammar: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None


class GenerationFields(SamplingFields, frozen=True, kw_only=True):
    """Fields that chat and legacy completions share and responses lacks."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None


def decode(
    body: bytes,
    kind: type[Body],
    rules: FieldRules,
    tolerance: Tolerance,
    fast_kind: type[Body] | None = None,
) -> Body:
    """Decode a request body as `kind`.

    `fast_kind`: a subclass of `kind` with narrower types, which the fast path decodes instead. Of a
    duplicate key the last value counts. Cost: O(bytes). Changes: `tolerance` notes the ignored
    fields. Raises Refusal that names the field.
    """
    if len(body) <= FAST_DECODE_BYTES_MAX:
        try:
            decoded: Body = _strict_decoder(fast_kind or kind).decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # The slow path below finds the error.
        else:
            return decoded
    fields = _known_fields(decode_object(body), kind, rules, tolerance)
    if not tolerance.is_strict:
        for name, clean in rules.cleaned.items():
            if name in fields:
                fields[name] = clean(fields[name], tolerance)
        if "stream_options" in fields:  # unknown ones cannot change the answer's text
            options = tolerance.prune(fields["stream_options"], StreamOptions, "stream_options")
            fields["stream_options"] = options
    if tolerance.is_lenient:
        fields = tolerance.prune(fields, kind, "")
    return convert(fields, kind, "")


def _known_fields(
    tree: Mapping[str, Any], kind: type[Struct], rules: FieldRules, tolerance: Tolerance
) -> dict[str, Any]:
    """Return the fields that `kind` knows, with aliases under their own names. Raises Refusal."""
    known, is_strict = _known(kind), tolerance.is_strict
    fields = {name: value for name, value in tree.items() if name in known}
    for name, value in tree.items():
        if name in known:
            continue
        if name in REASONING_HINTS or name in rules.switches:
            tolerance.hints[name] = value
        if name in rules.aliases and not is_strict:
            _apply_alias(fields, name, value, rules)
        elif name in rules.records or (name in HINTS and not is_strict):
            if not asks_nothing(value) and not _is_neutral(value, rules.neutral.get(name, ())):
                tolerance.ignore(name)
        elif name in rules.refused:
            if name in rules.switches and not is_strict and _are_hints(value):
                for switch in value:
                    tolerance.ignore(f"{name}.{switch}")
            elif not _is_neutral(value, rules.neutral.get(name, ())):
                raise invalid_field(name, rules.refused[name], "unsupported_parameter")
        elif name in OTHER_SETTINGS and _does_nothing(value, OTHER_SETTINGS[name]):
            continue
        elif tolerance.is_lenient:
            tolerance.ignore(name)
        elif name in OTHER_SETTINGS:
            expected = json.dumps(next(iter(OTHER_SETTINGS[name]), None))
            problem = f"this setting of another engine is not supported; expected {expected}."
            raise invalid_field(name, problem, "unsupported_parameter")
        else:
            raise unknown_field(name, known)
    return fields


def _are_hints(value: object) -> bool:
    """Return whether an object holds only hints on reasoning."""
    return isinstance(value, dict) and value.keys() <= REASONING_HINTS


def _apply_alias(fields: dict[str, Any], name: str, value: Any, rules: FieldRules) -> None:
    """Put the value of an alias under the name of its equal. Raises Refusal if that differs."""
    if value is None or (name in LIMIT_ALIASES and isinstance(value, int) and value < 0):
        return
    target = rules.aliases[name]
    held = fields.get(target)
    if held is not None and held != value:
        raise invalid_field(name, f"the value differs from {target}; expected only one of the two.")
    fields[target] = value


@cache
def _strict_decoder(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    """Return a decoder without unknown fields, which takes half the time on most bodies."""
    strict = msgspec.defstruct(
        kind.__name__, (), bases=(kind,), frozen=True, kw_only=True, forbid_unknown_fields=True
    )
    return msgspec.json.Decoder[Body](strict, float_hook=exact_number)


@cache
def _known(kind: type[Struct]) -> set[str]:
    """Return the names of a body's fields. Cached, because collecting them takes over 1 ms."""
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def _is_neutral(value: object, neutral: Sequence[object]) -> bool:
    return value is None or any(type(value) is type(one) and value == one for one in neutral)


def _does_nothing(value: object, neutral: Sequence[object]) -> bool:
    return asks_nothing(value) or _is_neutral(value, neutral)


def sampling(fields: SamplingFields, logprobs: int | None) -> Sampling:
    """Return the engine's sampling settings. Raises Refusal for an invalid `logit_bias` key."""
    bias = {}
    for key, value in (fields.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**31):
            raise invalid_field("logit_bias", f"invalid key {key[:32]!r}; expected a token id.")
        bias[int(key)] = value
    return Sampling(
        temperature=temperature_of(fields.temperature, fields.top_p),
        top_k=max(0, fields.top_k or 0),
        top_p=fields.top_p or 1.0,
        min_p=fields.min_p or 0.0,
        repetition_penalty=fields.repetition_penalty or 1.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=bias,
        seed=fields.seed,
        logprobs=logprobs,
    )


def generation(
    fields: GenerationFields, *, max_tokens: int | None, logprobs: int | None, samples: int
) -> GenerationParameters:
    """Return the canonical generation settings of chat or completions. Raises Refusal."""
    stop = fields.stop
    return GenerationParameters(
        max_tokens=max_tokens,
        choices=fields.n or 1,
        samples=samples,
        sampling=sampling(fields, logprobs),
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
    )


TextOrIds = str | tuple[int, ...]
"""A text, or its token ids."""


def texts_or_ids(value: Any, field: str, noun: str, most: int) -> tuple[TextOrIds, ...]:
    """Return what a field holds: a text, token ids, or a list of either, none of them empty.

    `noun`: what errors call one of them. `most`: the longest list. Raises Refusal.
    """
    if isinstance(value, str):
        return (_text_or_ids(value, field, noun),)
    if not isinstance(value, list) or not value:
        problem = "invalid or empty value; expected a text, token ids, or a list of either."
        raise invalid_field(field, problem)
    if isinstance(value[0], int):
        return (_text_or_ids(value, field, noun),)
    if len(value) > most:
        raise invalid_field(field, f"{len(value)} {field}s; expected at most {most}.")
    return tuple(_text_or_ids(one, f"{field}[{at}]", noun) for at, one in enumerate(value))


def _text_or_ids(value: Any, path: str, noun: str) -> TextOrIds:
    found: TextOrIds = value if isinstance(value, str) else convert(value, TokenIds, path)
    if not found:
        unit = "character" if isinstance(found, str) else "token id"
        raise invalid_field(path, f"the {noun} is empty; expected at least one {unit}.")
    return found


def partition(fields: SamplingFields, metadata: RequestMetadata) -> str:
    """Return the fields that narrow the namespace, joined without ambiguity; "" if none is set."""
    cache_key = fields.prompt_cache_key if metadata.separates_cache_key else None
    parts = (fields.cache_salt or "", cache_key or "", fields.extra_key or "")
    if not any(parts):
        return ""
    return "".join(f"{len(part)}:{part}" for part in parts)


def wants_continuous_usage(fields: GenerationFields) -> bool:
    """Return whether every chunk of the stream has usage."""
    return fields.stream_options is not None and fields.stream_options.continuous_usage_stats


def check_stream_options(options: object, *, stream: bool | None) -> None:
    """Raise Refusal for `stream_options` without `stream`."""
    if options is not None and not stream:
        problem = "only allowed when stream is true."
        raise invalid_field("stream_options", problem)


# --- answers -----------------------------------------------------------------------------------

Piece = TextDelta | Thought | CallText | ChoiceEnd
"""A piece of one choice."""


class JoinedChoice:
    """One choice of a unary answer, with its pieces joined."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.tokens: list[TokenText] = []
        self.calls: dict[int, ToolCall] = {}
        self.reason = ""

    @property
    def text(self) -> str:
        """The complete text."""
        return "".join(self.texts)

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        if isinstance(piece, Thought):
            self.thoughts.append(piece.text)
        elif isinstance(piece, TextDelta):
            self.texts.append(piece.text)
            self.tokens += piece.tokens
        elif isinstance(piece, ChoiceEnd):
            self.reason = piece.reason
        else:
            self._add_call(piece)

    def _add_call(self, piece: CallText) -> None:
        held = self.calls.get(piece.call)
        self.calls[piece.call] = (
            ToolCall(piece.call_id, piece.name, piece.arguments)
            if held is None
            else msgspec.structs.replace(held, arguments=held.arguments + piece.arguments)
        )


def gather(deltas: Sequence[Delta]) -> tuple[dict[int, JoinedChoice], dict[str, Any]]:
    """Fold a stream: return its ended choices by index, in order, and the usage object."""
    found: dict[int, JoinedChoice] = {}
    counted: dict[str, Any] = {}
    for delta in deltas:
        if isinstance(delta, End):
            counted = usage(delta.usage)
        elif not isinstance(delta, Begin | OutputCount):
            choice = found.get(delta.index)
            if choice is None:
                choice = found[delta.index] = JoinedChoice()
            choice.add(delta)
    return {index: choice for index, choice in sorted(found.items()) if choice.reason}, counted


def usage(record: UsageRecord) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": record.total_in,
        "completion_tokens": record.out,
        "total_tokens": record.total_in + record.out,
        "prompt_tokens_details": {
            "cached_tokens": record.read_tokens(),
            "cache_write_tokens": record.write_tokens(),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": record.thinking,
            "audio_tokens": 0,
            "accepted_prediction_tokens": record.prediction[0],
            "rejected_prediction_tokens": record.prediction[1],
        },
        **record.extras(),
    }


_TYPES = {
    Kind.AUTH: "authentication_error",
    Kind.PERMISSION: "permission_error",
    Kind.RATE: "rate_limit_error",
    Kind.QUOTA: "insufficient_quota",
    Kind.INTERNAL: "server_error",
    Kind.BUSY: "server_error",
    Kind.DEADLINE: "server_error",
}


def error_message(refusal: Refusal) -> str:
    """Return the message, for a request that is too long after the words that clients look for."""
    if refusal.code != TOO_LONG:
        return refusal.message
    limit = "" if refusal.size is None else f" of {refusal.size[1]} tokens"
    return f"Input tokens exceed the configured limit{limit}. {refusal.message}"


def error_object(refusal: Refusal) -> dict[str, Any]:
    """Return the error object that OpenAI's SDKs read."""
    return {
        "error": {
            "message": error_message(refusal),
            "type": _TYPES.get(refusal.kind, "invalid_request_error"),
            "param": refusal.param,
            "code": refusal.code,
        }
    }


def token_entries(tokens: Sequence[TokenText]) -> list[dict[str, Any]]:
    """Return the entries of logprobs: each token with its alternatives."""
    return [
        {**_token(token), "top_logprobs": [_token(top) for top in token.top]} for token in tokens
    ]


def _token(token: TokenText) -> dict[str, Any]:
    text = token.data.decode("utf-8", "replace")
    return {"token": text, "logprob": token.logprob, "bytes": list(token.data)}


class OpenAIError(Struct, frozen=True):
    """An error as OpenAI's SDKs read it."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorAnswer(Struct, frozen=True):
    """An error of OpenAI's dialects."""

    error: OpenAIError


class OpenAIErrors(ErrorShape):
    """The errors of OpenAI's API under the name of one of its dialects."""

    family = "openai"
    error = OpenAIErrorAnswer

    def __init__(self, name: str, operation: str = "chat") -> None:
        self.name = name
        self.operation = operation

    def error_body(self, refusal: Refusal, request_id: str) -> tuple[int, bytes]:
        """Return the HTTP status and the JSON body of an error."""
        return refusal.kind.status, msgspec.json.encode(error_object(refusal))

    def limit_headers(self, states: Mapping[Meter, LimitState], now_ms: int) -> dict[str, str]:
        """Return the request and token headers; the tighter limit if only one token kind is
        limited. Outside of all dialects there are none."""
        of_tokens: LimitState | None = None
        for meter in _TOKENS:
            state = states.get(meter)
            if state is not None and (of_tokens is None or state.remaining < of_tokens.remaining):
                of_tokens = state
        headers: dict[str, str] = {}
        for names, shown in ((_REQUESTS_NAMES, states.get("requests")), (_TOKENS_NAMES, of_tokens)):
            if shown is not None and self.name:
                limit, remaining, reset = names
                headers[limit] = str(shown.limit)
                headers[remaining] = str(shown.remaining)
                headers[reset] = _duration(shown.reset_s)
        return headers


_TOKENS: tuple[Meter, ...] = ("tokens", "input_tokens", "output_tokens")
_REQUESTS_NAMES, _TOKENS_NAMES = (
    (f"X-RateLimit-Limit-{name}", f"X-RateLimit-Remaining-{name}", f"X-RateLimit-Reset-{name}")
    for name in ("Requests", "Tokens")
)


def _duration(seconds: float) -> str:
    """Format a duration, rounded up, as 1m12.5s or 500ms."""
    ms = math.ceil(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms / 1000, 60)
    return (f"{minutes:.0f}m" if minutes else "") + f"{rest:.3f}".rstrip("0").rstrip(".") + "s"


class OpenAIDialect(OpenAIErrors):
    """What the dialects of OpenAI's endpoints have in common."""

    stream_content_type = sse.CONTENT_TYPE

    def keep_alive(self) -> bytes:
        """Return a comment, which keeps the connection open and which clients skip."""
        return sse.KEEP_ALIVE

    def count_body(self, tokens: int, cached: int) -> bytes:
        """Return the answer to a token count."""
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})


class CompletionsEncoder(ABC):
    """What the encoders of both completions endpoints have in common: usage, and a stream's end."""

    def __init__(self, call: Call, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._begun: UsageRecord | None = None
        self._output_tokens: dict[int, int] = {}

    def stream(self, delta: Delta) -> bytes:
        """Return the events of one delta, which may be none."""
        match delta:
            case Begin(usage=record):
                self._begun = record
                return b""
            case OutputCount(index=index, tokens=tokens):
                self._output_tokens[index] = tokens
                return b""
            case End(usage=record):
                return self._event([], usage=usage(record)) if self._call.include_usage else b""
            case _:
                return self._piece(delta)

    def close(self) -> bytes:
        """Return the `[DONE]` event, which follows the last delta of a complete answer."""
        return sse.event(b"[DONE]")

    def error_event(self, refusal: Refusal) -> bytes:
        """Return the event that ends a failed stream and that SDKs raise."""
        return sse.event(msgspec.json.encode(error_object(refusal)))

    @abstractmethod
    def _piece(self, piece: Piece) -> bytes:
        """Return the events of a piece of a choice."""

    @abstractmethod
    def _encode(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Return the JSON of a chunk."""

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse.event(self._encode(choices, **more))

    def _running_usage(self) -> dict[str, Any] | None:
        """Return the usage so far; None before the prompt is counted."""
        if self._begun is None:
            return None
        out = sum(self._output_tokens.values())
        return usage(msgspec.structs.replace(self._begun, out=out))
