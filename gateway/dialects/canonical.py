"""The one inner form between wire dialects and everything else.

A dialect is a pure translation: bytes → `Call`, and `Delta`s → bytes. It knows no socket, no engine
and no other dialect. A unary reply is the fold of the stream. Values are frozen.

    bytes ─ dialect.parse ─▶ Call ─ prompt.render ─▶ Rendered ─ admission ─▶ engine Request
    bytes ◀─ dialect.encode ── Delta… ◀─ stream (detokenizer, stop strings) ◀─ engine events
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from engine.api import Grammar, Sampling

# --- the prompt --------------------------------------------------------------------------------

Tier = Literal["tools", "system", "messages"]
"""The three parts of a prompt, in API order."""

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ToolCall(Struct, frozen=True):
    """An assistant's call of a tool, as it stands in a history. `arguments`: JSON text."""

    call_id: str
    name: str
    arguments: str


class Segment(Struct, frozen=True):
    """A piece of the prompt in API order, the smallest thing a breakpoint can follow.

    `path` is where it stood in the request ("messages[2].content[0]"), for errors and diagnosis.
    It is either `text`, or a `call` that the assistant made. A tool's result is text that
    `answers` a call's id.
    """

    role: Role
    text: str
    path: str
    name: str | None = None
    message: int = 0
    """Index of the message it belongs to; segments of one message are joined by the template."""
    retention: str | None = None
    """A breakpoint stands after this segment: keep the prefix up to here, in this class."""
    call: ToolCall | None = None
    answers: str | None = None

    @property
    def tier(self) -> Tier:
        return "system" if self.role in ("system", "developer") else "messages"


class Tool(Struct, frozen=True):
    """A function the model may call. `parameters`: its JSON Schema, as JSON text in the order it
    came. `strict`: arguments must satisfy all of the schema, so they are constrained to."""

    name: str
    description: str = ""
    parameters: str = '{"type":"object","properties":{}}'
    path: str = "tools"
    strict: bool = False
    retention: str | None = None


class ToolChoice(Struct, frozen=True):
    """`required`: at least one call. `names`: only these may be called; none means any.
    `parallel`: several calls in one answer are fine."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


class OutputFormat(Struct, frozen=True):
    """What the text of the answer has to be. `schema`: JSON Schema as JSON text; `path`: the field
    it came in. `strict`: what of it nobody can promise is refused, not passed over."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: str = ""
    path: str = "schema"
    strict: bool = True


class Prompt(Struct, frozen=True):
    """Chat `segments` (after `tools`) for the template, or one raw `text`, or ready `token_ids`.

    `resource`: an id of cached content that the prompt begins with. `continues`: the last message
    is the assistant's and the answer goes on where it stops.
    """

    segments: tuple[Segment, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    add_generation_prompt: bool = True
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    output_format: OutputFormat = OutputFormat()
    resource: str = ""
    continues: bool = False

    @property
    def field(self) -> str:
        """The request's field that most of it came in, for errors about all of it."""
        if not self.segments:
            return "prompt"
        return self.segments[-1].path.partition("[")[0].partition(".")[0]


class Boundary(Struct, frozen=True, omit_defaults=True):
    """`tokens` prompt tokens end the segment (or tool) at `path`, and everything before it in API
    order: where a template writes parts in another order, this is the furthest of them.

    `run`: consecutive boundaries with the same one count as one position when looking back.
    """

    tokens: int
    path: str
    retention: str | None = None
    tier: Tier = "messages"
    role: str = "user"
    ends_message: bool = True
    run: Literal["", "call", "result"] = ""


class Rendered(Struct, frozen=True, omit_defaults=True):
    """What the engine computes: token ids, where each segment ends among them, and what text the
    answer has to be."""

    token_ids: tuple[int, ...]
    boundaries: tuple[Boundary, ...] = ()
    grammar: Grammar | None = None


class GenerationParameters(Struct, frozen=True):
    """How to continue. `samples` are computed and the best `choices` of them, by mean logprob,
    returned; `choices_field` is where a client says how many. `max_tokens` None: as many as the
    server gives. `echo`: the prompt's text is part of the answer. `report_logprobs`: logprobs were
    asked for, not only needed for ranking."""

    max_tokens: int | None = None
    choices: int = 1
    samples: int = 1
    choices_field: str = "n"
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    echo: bool = False
    prompt_logprobs: int | None = None
    report_logprobs: bool = True


class CacheDirectives(Struct, frozen=True):
    """What a call asks of the cache; `gateway.retention` applies it, by the rules of one
    configured profile (its minimum length, its reporting, its classes).

    `lookup`: "longest" reads whatever is there, "written" only what an earlier call wrote at a
    breakpoint, "none" nothing (its breakpoints are written all the same); None leaves it to the
    profile. From each breakpoint of "written", `lookback` positions are tried, itself the first.
    `implicit`: a class in which the end of the latest user message, tool result or leading
    developer message is kept without being asked; its lookup tries the `lookback` latest ends of
    such messages. `writes_max`: of more breakpoints
    only the latest are written; None: all.
    `compare_with`: the response id whose prompt a miss is explained against ("": none; this call's
    own is remembered in any case when `remember` is set).
    """

    profile: str = "openai"
    lookup: Literal["longest", "written", "none"] | None = None
    lookback: int = 20
    implicit: str | None = None
    writes_max: int | None = None
    compare_with: str = ""
    remember: bool = False
    echo: tuple[tuple[str, str], ...] = ()
    """What the answer repeats of these settings (name, value), where the dialect wants that."""


class Call(Struct, frozen=True):
    """One request in the inner form. One HTTP request of /v1/completions with several prompts is
    several prompts here; every other call has one. `partition` narrows the namespace.

    `digests`: further settings that count as part of the prompt when a miss is explained
    (name, digest or value): they change nothing else.
    """

    model: str
    prompts: tuple[Prompt, ...]
    generation: GenerationParameters
    operation: Literal["generate", "prewarm", "count", "quote"] = "generate"
    stream: bool = False
    include_usage: bool = False
    partition: str = ""
    client_user: str = ""
    priority: int = 0
    cache: CacheDirectives = CacheDirectives()
    digests: tuple[tuple[str, str], ...] = ()


class RequestMetadata(Struct, frozen=True):
    """What of a request stands outside its body, as far as a dialect may know: the `model` and
    `action` of a path, and a `version` header."""

    model: str = ""
    action: str = ""
    version: str = ""
    betas: tuple[str, ...] = ()


NO_METADATA = RequestMetadata()
"""A request whose body says it all."""


# --- the answer --------------------------------------------------------------------------------


class UsageRecord(Struct, frozen=True, omit_defaults=True):
    """The one source of every dialect's usage fields: total_in = read + write + fresh.

    Logical counts are what the contract says was read and written, by retention class, and what is
    billed; `physical_cached` is what the engine did not recompute. In plain prefix caching
    (no breakpoints) read is physical_cached, write is 0 and fresh the rest.
    """

    total_in: int
    read: dict[str, int] = {}
    write: dict[str, int] = {}
    fresh: int = 0
    out: int = 0
    physical_cached: int = 0
    breached_tokens: int = 0
    """Read by contract, but computed again: a promise that eviction or a restart had broken."""

    def read_tokens(self) -> int:
        return sum(self.read.values()) if self.read else 0

    def write_tokens(self) -> int:
        return sum(self.write.values()) if self.write else 0


class TokenText(Struct, frozen=True):
    """A token with its logprob, for dialects that report them. `data` is its bytes; the first
    token of an echoed prompt has no logprob."""

    token_id: int
    data: bytes
    logprob: float | None
    top: tuple[TokenText, ...] = ()


class Text(Struct, frozen=True, tag="text"):
    """More text of choice `index`: whole characters only, nothing of a possible stop string."""

    index: int
    text: str
    tokens: tuple[TokenText, ...] = ()


class CallText(Struct, frozen=True, tag="call_text"):
    """More of the tool call number `call` of choice `index`. The first piece of each has its
    `call_id` and `name`; `arguments` of all pieces join to its JSON."""

    index: int
    call: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class ChoiceEnd(Struct, frozen=True, tag="choice_end"):
    """`stop_sequence`: the stop string that ended it, if one did."""

    index: int
    reason: Literal["stop", "length", "tool_calls"]
    stop_sequence: str | None = None


Cause = Literal[
    "model",
    "template",
    "tools",
    "system",
    "messages",
    "partition",
    "settings",
    "expired",
    "evicted_own_quota",
    "evicted_pressure",
    "erased",
    "restarted",
    "below_minimum",
    "other_namespace",
    "never_written",
    "unknown",
]
"""Why tokens were not read. The first two are the operator's doing, the next five in the request;
the rest only we know."""


class Diagnosis(Struct, frozen=True):
    """Where and why a prompt left an earlier one. `outcome` "unknown": no such earlier response.

    `missed_tokens`: of this prompt, behind the first difference. `reusable_tokens`: before it.
    `path`: the first segment that differs. `setting`: of `digests`, the one that does.
    """

    outcome: Literal["hit", "miss", "unknown", "unavailable"]
    cause: Cause | None = None
    missed_tokens: int = 0
    reusable_tokens: int = 0
    path: str = ""
    setting: str = ""


class End(Struct, frozen=True, tag="end"):
    """The answer is whole. Always last; a stream that fails ends with a `Refusal` instead."""

    usage: UsageRecord


class Begin(Struct, frozen=True, tag="begin"):
    """First delta: what is known before any token. `diagnosis`: where one was asked for."""

    usage: UsageRecord
    diagnosis: Diagnosis | None = None


Delta = Begin | Text | CallText | ChoiceEnd | End


class Reply(Struct, frozen=True):
    """What a dialect needs to name its answer: ids and times are made by the gateway, once."""

    response_id: str
    model: str
    created_s: int
