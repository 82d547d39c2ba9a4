"""Gemini's wire types: strict structs, both spellings of every field, errors.

Clients mix camelCase and snake_case in one body. Fields of the API are accepted in either spelling,
and with every value that protobuf's JSON mapping reads as the declared type (`proto_json`); the
client's data (arguments, responses, schemas) stays as sent. `gemini.prompt` translates these
types, and `gemini.schema` the schemas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, inspect
from msgspec.structs import fields

from gateway.dialects.gemini import proto_json
from gateway.dialects.tolerance import HINTS, Tolerance, asks_nothing
from gateway.dialects.validation import (
    alternatives,
    convert,
    decode_object,
    invalid_field,
    unknown_field,
)
from gateway.errors import TOO_LONG, Kind, Refusal

T = TypeVar("T", bound=Struct)
Text = Annotated[str, Meta(max_length=10_000_000)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.:-]{0,127}\Z")]
Fraction = Annotated[float, Meta(ge=0, le=1)]

ITEMS_MAX = 10_000
"""Most items of a list other than contents."""

CONTENTS_MAX = 25_000
"""Most contents: the SDK's chats send one content for each chunk of an earlier stream."""

# --- types ----------------------------------------------------------------------------------------


class FunctionCall(Struct, frozen=True):
    name: Name
    args: dict[str, Any] = {}
    id: str = ""


class FunctionResponse(Struct, frozen=True):
    name: Name
    response: dict[str, Any] = {}
    id: str = ""
    will_continue: bool = False
    scheduling: Annotated[str, Meta(max_length=64)] = ""
    parts: list[Any] = []


class ExecutableCode(Struct, frozen=True):
    """Code that Google's server ran."""

    code: Text = ""
    language: Any = None
    id: str = ""


class CodeExecutionResult(Struct, frozen=True):
    outcome: Any = None
    output: Text = ""
    id: str = ""


class HostedCall(Struct, frozen=True):
    """A call of another tool of Google's server."""

    tool_type: Name = "tool"
    args: dict[str, Any] = {}
    id: str = ""

    @property
    def function(self) -> str:
        """The name that the model reads."""
        return self.tool_type.lower()


class HostedResponse(Struct, frozen=True):
    tool_type: Name = "tool"
    response: dict[str, Any] = {}
    id: str = ""

    @property
    def function(self) -> str:
        """The name that the model reads."""
        return self.tool_type.lower()


class Blob(Struct, frozen=True):
    """Inline data: base64, of either alphabet."""

    mime_type: str = ""
    data: Text = ""
    display_name: Any = None


class Part(Struct, frozen=True):
    """A part of a content: exactly one kind of data is set."""

    text: Text | None = None
    thought: bool = False
    thought_signature: str | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    inline_data: Blob | None = None
    file_data: Any = None
    executable_code: ExecutableCode | None = None
    code_execution_result: CodeExecutionResult | None = None
    tool_call: HostedCall | None = None
    tool_response: HostedResponse | None = None
    video_metadata: Any = None
    part_metadata: Any = None


class Content(Struct, frozen=True):
    parts: Annotated[list[Part], Meta(max_length=ITEMS_MAX)] = []
    role: Literal["user", "model", "function", "tool", "system", ""] = "user"


class FunctionDeclaration(Struct, frozen=True):
    name: Name
    description: Text = ""
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None
    response: Any = None
    response_json_schema: Any = None
    behavior: Annotated[str, Meta(max_length=64)] = ""


class GeminiToolField(Struct, frozen=True):
    function_declarations: Annotated[list[FunctionDeclaration], Meta(max_length=512)] = []
    google_search: Any = None
    google_search_retrieval: Any = None
    code_execution: Any = None
    url_context: Any = None
    computer_use: Any = None
    google_maps: Any = None
    file_search: Any = None
    retrieval: Any = None
    enterprise_web_search: Any = None
    parallel_ai_search: Any = None
    mcp_servers: Any = None
    exa_ai_search: Any = None


class FunctionCalling(Struct, frozen=True):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] = "AUTO"
    allowed_function_names: list[Name] = []
    stream_function_call_arguments: bool = False


class ToolConfig(Struct, frozen=True):
    function_calling_config: FunctionCalling = FunctionCalling()
    retrieval_config: Any = None
    include_server_side_tool_invocations: bool = False


SERVICE_TIERS = ("", "standard", "unspecified", "SERVICE_TIER_UNSPECIFIED")
"""Tiers that the server has; any other tier is served as the standard one."""


class ThinkingConfig(Struct, frozen=True):
    thinking_budget: int | None = None
    include_thoughts: bool = False
    thinking_level: str | None = None


MimeType = Literal["", "text/plain", "application/json", "text/x.enum"]


class TextFormat(Struct, frozen=True):
    mime_type: MimeType | Literal["TEXT_PLAIN", "APPLICATION_JSON"] = ""
    schema: Any = None


class ResponseFormat(Struct, frozen=True):
    """One kind of output; this server has texts."""

    text: TextFormat | None = None
    audio: None = None
    image: None = None
    video: None = None


class GenerationConfig(Struct, frozen=True):
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    candidate_count: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=1_000)]], Meta(max_length=5)]
        | None
    ) = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    response_logprobs: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    response_mime_type: MimeType = ""
    response_schema: dict[str, Any] | None = None
    response_json_schema: Any = None
    response_format: Annotated[list[ResponseFormat], Meta(max_length=1)] = []
    response_modalities: list[Literal["TEXT"]] | None = None
    thinking_config: ThinkingConfig = ThinkingConfig()
    media_resolution: Annotated[str, Meta(max_length=64)] = ""
    speech_config: None = None
    enable_enhanced_civic_answers: bool | None = None
    image_config: None = None
    audio_timestamp: Literal[False] | None = None


class PromptFields(Struct, frozen=True, kw_only=True):
    """Fields of a prompt, in a request and in cached content."""

    contents: Annotated[list[Content], Meta(max_length=CONTENTS_MAX)] = []
    system_instruction: Content | str | None = None
    tools: Annotated[list[GeminiToolField], Meta(max_length=128)] = []
    tool_config: ToolConfig | None = None


class GenerateBody(PromptFields, frozen=True, kw_only=True):
    model: str = ""
    generation_config: GenerationConfig = GenerationConfig()
    safety_settings: list[Any] = []
    cached_content: Annotated[str, Meta(max_length=200)] = ""
    labels: dict[str, Any] = {}
    service_tier: Annotated[str, Meta(max_length=512)] = ""
    store: bool | None = None


class CountBody(PromptFields, frozen=True, kw_only=True):
    generate_content_request: GenerateBody | None = None


class CachedBody(PromptFields, frozen=True, kw_only=True):
    """A body that creates cached content or, with an expiry only, updates it.

    Output-only fields are ignored.
    """

    name: str = ""
    model: str = ""
    display_name: Annotated[str, Meta(max_length=128)] = ""
    ttl: str | None = None
    expire_time: str | None = None
    create_time: Any = None
    update_time: Any = None
    usage_metadata: Any = None


# --- spelling of fields ---------------------------------------------------------------------------

_UPPER = re.compile(r"(?<=[a-z0-9])[A-Z]")


@cache
def _shape_of(kind: type[Struct]) -> dict[str, Any]:
    """Return the fields of an API object by name: each with its own fields, a list with one shape,
    the reader of a scalar, or None if the value is the client's data and stays as sent."""
    return {
        field.encode_name: _shape(inspect.type_info(field.type), field.encode_name)
        for field in fields(kind)
    }


_READERS: dict[type[inspect.Type], Callable[[Any], Any]] = {
    inspect.IntType: proto_json.read_int,
    inspect.FloatType: proto_json.read_float,
    inspect.BoolType: proto_json.read_bool,
}


_ENUM_TYPES = (inspect.LiteralType, inspect.StrType)


def _shape(found: inspect.Type, name: str) -> Any:
    for alternative in alternatives(found):
        if isinstance(alternative, inspect.StructType):
            return _shape_of(alternative.cls)
        if isinstance(alternative, inspect.ListType):
            return [_shape(alternative.item_type, name)]
        if isinstance(alternative, _ENUM_TYPES) and name in proto_json.ENUMS:
            return partial(proto_json.read_enum, names=proto_json.ENUMS[name])
        if type(alternative) in _READERS:
            return _READERS[type(alternative)]
    return None


_CONTENT = _shape_of(Content)


def read_fields(
    tree: Any, shape: Any, tolerance: Tolerance, path: str = "", *, is_answer: bool = False
) -> Any:
    """Return the tree with the fields of `shape` (`_shape_of`) in snake_case, and with their values
    as protobuf's JSON mapping reads them.

    `is_answer`: the tree is a part of an earlier answer, which may have unknown fields. Cost:
    O(nodes). Changes: `tolerance` notes the ignored fields. Raises Refusal for a field that is
    unknown or present in both spellings.
    """
    if isinstance(shape, list):
        tree, item_shape = proto_json.read_list(tree), shape[0]
        items_max = CONTENTS_MAX if item_shape is _CONTENT else ITEMS_MAX
        if len(tree) > items_max:
            raise invalid_field(path, f"{len(tree)} items; expected at most {items_max}.")
        return [
            item
            if item_shape is _CONTENT and _is_plain(item)
            else read_fields(item, item_shape, tolerance, f"{path}[{number}]", is_answer=is_answer)
            for number, item in enumerate(tree)
        ]
    if not isinstance(shape, dict):
        return tree if shape is None else shape(tree)
    if not isinstance(tree, dict):
        return tree
    is_answer |= shape is _CONTENT and tree.get("role") == "model" and not tolerance.is_strict
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = _snake_case(key)
        field_path = f"{path}.{key}" if path else key
        if name not in shape:
            is_hint = name in HINTS and not tolerance.is_strict
            if not (is_answer or is_hint or tolerance.is_lenient):
                raise unknown_field(key, set(map(to_camel_case, shape)), field_path[:300])
            if not asks_nothing(value):
                tolerance.ignore(field_path)
            continue
        if value is None:
            continue
        if name in found:
            problem = "the field is present in camelCase and in snake_case; expected only one."
            raise invalid_field(field_path, problem)
        found[name] = read_fields(value, shape[name], tolerance, field_path, is_answer=is_answer)
    return found


def _is_plain(content: Any) -> bool:
    """Return whether a content is a role and one text, which need no conversion. Most are."""
    if type(content) is not dict or len(content) != 2 or type(content.get("role")) is not str:
        return False
    parts = content.get("parts")
    if type(parts) is not list or len(parts) != 1:
        return False
    (part,) = parts
    return type(part) is dict and len(part) == 1 and type(part.get("text")) is str


def _snake_case(name: str) -> str:
    return _UPPER.sub(lambda letter: "_" + letter[0].lower(), name)


def to_camel_case(name: str) -> str:
    """Return a field's name in the spelling of Gemini's documentation."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def decode(body: bytes, kind: type[T], tolerance: Tolerance) -> T:
    """Decode a body as `kind`.

    Cost: O(bytes). Changes: `tolerance` notes the ignored fields. Raises Refusal that names the
    field.
    """
    tree = decode_object(body or b"{}")
    try:
        fields = read_fields(tree, _shape_of(kind), tolerance)
    except RecursionError:
        raise Refusal(Kind.BAD, "invalid_json", "The body is nested too deeply.") from None
    try:
        return convert(fields, kind, "")
    except Refusal as refusal:
        path = _spelt(tree, refusal.param or "")
        told = refusal.message.removeprefix(refusal.param or "")
        message = path + told if told != refusal.message else refusal.message
        raise Refusal(refusal.kind, refusal.code, message, param=path or None) from None


def _spelt(tree: Any, path: str) -> str:
    """Return the path of a field, whose steps are in snake_case, as the client spells it."""
    found = []
    for step in path.split("."):
        name, bracket, index = step.partition("[")
        keys = tree if isinstance(tree, dict) else {}
        key = next((key for key in keys if _snake_case(key) == name), to_camel_case(name))
        tree, number = keys.get(key), index.rstrip("]")
        if bracket and isinstance(tree, list) and number.isdecimal() and int(number) < len(tree):
            tree = tree[int(number)]
        found.append(f"{key}{bracket}{index}")
    return ".".join(found)


# --- errors ---------------------------------------------------------------------------------------

_STATUS: dict[Kind, tuple[int, str]] = {
    Kind.AUTH: (401, "UNAUTHENTICATED"),
    Kind.PERMISSION: (403, "PERMISSION_DENIED"),
    Kind.NOT_FOUND: (404, "NOT_FOUND"),
    Kind.METHOD: (404, "NOT_FOUND"),
    Kind.CONFLICT: (409, "ABORTED"),
    Kind.TOO_BIG: (413, "INVALID_ARGUMENT"),
    Kind.UPGRADE: (426, "INVALID_ARGUMENT"),
    Kind.RATE: (429, "RESOURCE_EXHAUSTED"),
    Kind.QUOTA: (429, "RESOURCE_EXHAUSTED"),
    Kind.INTERNAL: (500, "INTERNAL"),
    Kind.BUSY: (503, "UNAVAILABLE"),
    Kind.DEADLINE: (504, "DEADLINE_EXCEEDED"),
}


def _message(refusal: Refusal) -> str:
    """Return the message, for a request that is too long after the words that clients look for."""
    if refusal.code != TOO_LONG:
        return refusal.message
    tokens = limit = ""
    if refusal.size is not None:
        tokens, limit = f" ({refusal.size[0]})", f" ({refusal.size[1]})"
    return (
        f"The input token count{tokens} exceeds the maximum number of tokens allowed{limit}."
        f" {refusal.message}"
    )


class GeminiError(Struct, frozen=True):
    """An error as Gemini's SDKs read it. `code`: the HTTP status."""

    code: int
    message: str
    status: str


class GeminiErrorAnswer(Struct, frozen=True):
    """An error of Gemini's dialect."""

    error: GeminiError


def error_object(refusal: Refusal) -> tuple[int, dict[str, Any]]:
    """Return the status and the error object of Google's SDKs. Its first key is `error`."""
    status, name = _STATUS.get(refusal.kind, (400, "INVALID_ARGUMENT"))
    message = _message(refusal)
    details: list[dict[str, Any]] = [
        {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": refusal.code.upper(),
            "domain": "trunkline",
        }
    ]
    if refusal.param:
        details.append(
            {
                "@type": "type.googleapis.com/google.rpc.BadRequest",
                "fieldViolations": [{"field": refusal.param, "description": message}],
            }
        )
    if refusal.retry_after_s is not None:
        details.append(
            {
                "@type": "type.googleapis.com/google.rpc.RetryInfo",
                "retryDelay": f"{max(1, math.ceil(refusal.retry_after_s))}s",
            }
        )
    error = {"code": status, "message": message, "status": name, "details": details}
    return status, {"error": error}
