"""What OpenAI's endpoints share on the wire: strict decoding, generation fields, gathering an
answer's pieces, usage, errors. No endpoint knows another; all stand on this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from engine.api import Sampling
from gateway.dialects.canonical import (
    Begin,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    GenerationParameters,
    TokenText,
    ToolCall,
    UsageRecord,
)
from gateway.dialects.canonical import Text as Words
from gateway.dialects.validation import convert, unknown_field
from gateway.errors import Kind, Refusal

Text = Annotated[str, Meta(max_length=10_000_000)]
Short = Annotated[str, Meta(max_length=512)]
StopText = Annotated[str, Meta(min_length=1, max_length=1_000)]
TokenIds = Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...], Meta(max_length=4_000_000)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
CHOICES_MAX = 128
FAST_DECODE_BYTES_MAX = 65_536
"""Up to here a body is tried as if nothing were wrong with it: more would be too much in vain."""

CONSTRAINED = "Answers are constrained by response_format, in chat, or text.format, in responses."
SPECIALS = "Special tokens are never part of the text."
REFUSED_FIELDS: Mapping[str, str] = {
    "guided_json": CONSTRAINED,
    "guided_regex": CONSTRAINED,
    "guided_choice": CONSTRAINED,
    "guided_grammar": CONSTRAINED,
    "structured_outputs": CONSTRAINED,
    "logits_processors": "Requests bring no code.",
    "use_beam_search": "There is no beam search; n and best_of sample.",
    "length_penalty": "There is no beam search; n and best_of sample.",
    "early_stopping": "There is no beam search; n and best_of sample.",
    "include_stop_str_in_output": "A stop string is never part of the text.",
    "skip_special_tokens": SPECIALS,
    "spaces_between_special_tokens": SPECIALS,
    "truncate_prompt_tokens": "Prompts are never cut; one that is too long is refused.",
    "return_token_ids": "Token ids are not reported; logprobs has each token's bytes.",
}
"""Fields that neither endpoint can honour, and why. A refusal beats silence: an answer that was
made some other way than it was asked for looks right."""

REQUEST_NAME_FIELDS = frozenset({"request_id", "rid", "session_id"})
"""What self-hosted engines and routers let a client call its request, for logs and for choosing a
server: of an answer it changes nothing."""

NEUTRAL_VALUES: Mapping[str, object] = {
    "use_beam_search": False,
    "early_stopping": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "return_token_ids": False,
}
"""Refused fields that clients send at their default, where it asks for what we do anyway."""

T = TypeVar("T")
Body = TypeVar("Body", bound=Struct)


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_obfuscation` is accepted: we pad nothing, which is what false asks for."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(Struct, frozen=True, kw_only=True):
    """Fields of every endpoint, OpenAI's own and those that self-hosted engines added."""

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
    # What self-hosted engines have beside OpenAI's fields.
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=128)] | None
    ) = None
    cache_salt: Short | None = None
    extra_key: Short | None = None
    prompt_cache_key: Short | None = None
    priority: Annotated[int, Meta(ge=-100, le=0)] | None = None


class GenerationFields(SamplingFields, frozen=True, kw_only=True):
    """What chat and legacy completions have and responses do not."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=4)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None


def decode(
    body: bytes,
    kind: type[Body],
    refused: Mapping[str, str],
    neutral: Mapping[str, object],
    ignored: frozenset[str] = frozenset(),
    usual: type[Body] | None = None,
) -> Body:
    """A request body as `kind`. O(bytes). Raises Refusal that names the field.

    `usual`: `kind` with the types that most bodies have where it takes any, to be read in one go.
    `refused`: fields that cannot be honoured, and why; null, or the value in `neutral`, asks for
    nothing and is fine. `ignored`: fields that change nothing about the answer. A key that is
    there twice counts as it stands last.
    """
    if len(body) <= FAST_DECODE_BYTES_MAX:
        try:
            exact: Body = _exact(usual or kind).decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # looked at more closely below
        else:
            return exact
    try:
        tree = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"The body is not valid JSON: {error}."
        raise Refusal(Kind.BAD, "invalid_json", message) from None
    except RecursionError:
        raise Refusal(Kind.BAD, "invalid_json", "The body is nested too deeply.") from None
    if not isinstance(tree, dict):
        raise Refusal(Kind.BAD, "invalid_json", "The body has to be a JSON object.")
    known = _known(kind)
    fields = {}
    for name, value in tree.items():
        if name in known:
            fields[name] = value
        elif name in refused:
            if not _asks_nothing(value, neutral.get(name)):
                message = f"{name}: {refused[name]}"
                raise Refusal(Kind.BAD, "unsupported_parameter", message, param=name)
        elif name not in ignored:
            raise unknown_field(name, known)
    return convert(fields, kind, "")


@cache
def _exact(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    """Takes what has these fields and no others, as most bodies do: half the time."""
    exact = msgspec.defstruct(
        kind.__name__, (), bases=(kind,), frozen=True, kw_only=True, forbid_unknown_fields=True
    )
    return msgspec.json.Decoder[Body](exact)


@cache
def _known(kind: type[Struct]) -> set[str]:
    """The names of a body's fields; working them out takes a millisecond and more."""
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def _asks_nothing(value: object, neutral: object) -> bool:
    return value is None or (type(value) is type(neutral) and value == neutral)


def sampling(fields: SamplingFields, logprobs: int | None) -> Sampling:
    """The engine's terms. Raises Refusal for combinations that mean nothing."""
    bias = {}
    for key, value in (fields.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**31):
            raise Refusal(
                Kind.BAD, "invalid_value", "logit_bias: keys are token ids.", param="logit_bias"
            )
        bias[int(key)] = value
    temperature = 1.0 if fields.temperature is None else fields.temperature
    if fields.top_p == 0:
        temperature = 0.0  # an empty nucleus keeps the best token alone
    return Sampling(
        temperature=temperature,
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
    """The canonical settings of either endpoint."""
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


def partition(fields: SamplingFields) -> str:
    """Whatever narrows the sharing scope, unambiguously joined."""
    if not (fields.cache_salt or fields.prompt_cache_key or fields.extra_key):
        return ""
    parts = (fields.cache_salt or "", fields.prompt_cache_key or "", fields.extra_key or "")
    return "".join(f"{len(part)}:{part}" for part in parts)


def check_stream_options(fields: GenerationFields) -> None:
    """`stream_options` means nothing without `stream`."""
    if fields.stream_options is not None and not fields.stream:
        raise Refusal(
            Kind.BAD,
            "invalid_value",
            "stream_options is only allowed when stream is true.",
            param="stream_options",
        )


# --- answers -----------------------------------------------------------------------------------


class JoinedChoice:
    """One choice of an answer, its pieces joined."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[TokenText] = []
        self.calls: dict[int, ToolCall] = {}
        self.reason = ""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    def add(self, piece: Words | CallText | ChoiceEnd) -> None:
        """More of it."""
        if isinstance(piece, Words):
            self.texts.append(piece.text)
            self.tokens += piece.tokens
        elif isinstance(piece, ChoiceEnd):
            self.reason = piece.reason
        else:
            self._call(piece)

    def _call(self, piece: CallText) -> None:
        held = self.calls.get(piece.call)
        self.calls[piece.call] = (
            ToolCall(piece.call_id, piece.name, piece.arguments)
            if held is None
            else msgspec.structs.replace(held, arguments=held.arguments + piece.arguments)
        )


def gather(deltas: Sequence[Delta]) -> tuple[dict[int, JoinedChoice], dict[str, Any]]:
    """The fold of a stream: (its ended choices in order, the usage object)."""
    found: dict[int, JoinedChoice] = {}
    counted: dict[str, Any] = {}
    for delta in deltas:
        if isinstance(delta, End):
            counted = usage(delta.usage)
        elif not isinstance(delta, Begin):
            choice = found.get(delta.index)
            if choice is None:
                choice = found[delta.index] = JoinedChoice()
            choice.add(delta)
    return {index: choice for index, choice in sorted(found.items()) if choice.reason}, counted


def usage(record: UsageRecord) -> dict[str, Any]:
    """OpenAI's usage object; every number from the one record."""
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
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


_TYPES: dict[Kind, Literal["invalid_request_error", "server_error"] | str] = {
    Kind.AUTH: "authentication_error",
    Kind.PERMISSION: "permission_error",
    Kind.RATE: "rate_limit_error",
    Kind.QUOTA: "insufficient_quota",
    Kind.INTERNAL: "server_error",
    Kind.BUSY: "server_error",
    Kind.DEADLINE: "server_error",
}
_STATUS = {Kind.QUOTA: 429}


def error_object(refusal: Refusal) -> dict[str, Any]:
    """`{"error": {...}}` as OpenAI's SDKs read it."""
    return {
        "error": {
            "message": refusal.message,
            "type": _TYPES.get(refusal.kind, "invalid_request_error"),
            "param": refusal.param,
            "code": refusal.code,
        }
    }


def headers(request_id: str) -> dict[str, str]:
    """`X-Request-Id`, which every answer has, is what OpenAI's SDKs read."""
    return {}


def count_body(tokens: int, cached: int) -> bytes:
    """The answer to a call that only counts."""
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})


def error_body(refusal: Refusal, request_id: str) -> tuple[int, bytes]:
    """(HTTP status, body) of an error."""
    status = _STATUS.get(refusal.kind, refusal.kind.value)
    return status, msgspec.json.encode(error_object(refusal))
