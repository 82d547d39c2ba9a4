"""The canonical form of requests and answers, which every wire dialect translates to and from.

A dialect parses bytes to a `Call` and encodes `Delta`s to bytes. It knows no socket, no engine and
no other dialect. A unary reply is the fold of the stream. All values are frozen.

    bytes ─ dialect.parse ─▶ Call ─ prompt.render ─▶ Rendered ─ admission ─▶ engine Request
    bytes ◀─ dialect.encode ── Delta… ◀─ stream (detokenizer, stop strings) ◀─ engine events
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from engine.api import AttentionWindow, Grammar, Sampling
from gateway.dialects.tolerance import Mode
from tenancy.types import Fidelity, TokenCounts

TOOLS_MAX = 512
"""Most functions of one request, in any dialect: each costs a rendering and a schema, and agents
with many servers of tools declare some 100."""

# --- the prompt --------------------------------------------------------------------------------

Tier = Literal["tools", "system", "messages"]
"""The three parts of a prompt, in API order."""

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ToolCall(Struct, frozen=True):
    """A tool call in a conversation's history. `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str


class Segment(Struct, frozen=True):
    """A piece of the prompt in API order, the smallest unit that a breakpoint can follow.

    `path` is the segment's field in the request ("messages[2].content[0]"), for errors and miss
    diagnosis. A segment holds either `text` or a `call` that the assistant made. In a tool's
    result, `answers` is the id of the call.
    """

    role: Role
    text: str
    path: str
    name: str | None = None
    message: int = 0
    """Index of the segment's message; the template joins the segments of one message."""
    retention: str | None = None
    """Retention class of a breakpoint after this segment; None: no breakpoint."""
    call: ToolCall | None = None
    answers: str | None = None
    is_thought: bool = False
    """The text is what the assistant thought before an earlier answer; the template decides whether
    the model sees it again."""

    @property
    def tier(self) -> Tier:
        return "system" if self.role in ("system", "developer") else "messages"


class Tool(Struct, frozen=True):
    """A function that the model may call.

    `parameters` is its JSON Schema as JSON text, with the client's key order.
    """

    name: str
    description: str = ""
    parameters: str = '{"type":"object","properties":{}}'
    path: str = "tools"
    """Its field in the request, of which `schema_field` is the schema."""
    strict: bool = False
    """Decoding is constrained so that arguments satisfy the whole schema."""
    retention: str | None = None
    """Class of a breakpoint after the tool."""
    schema_field: str = "parameters"

    @property
    def schema_path(self) -> str:
        """The field of the schema in the request."""
        return f"{self.path}.{self.schema_field}"


class ToolChoice(Struct, frozen=True):
    """Which tools the model may or must call.

    `required`: at least one call.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    """The tools that may be called; empty means all."""
    parallel: bool = True
    """One answer may hold several calls."""


class OutputFormat(Struct, frozen=True):
    """The required format of the answer's text.

    `schema` is JSON Schema as JSON text, a regular expression or a grammar in Lark or GBNF; `path`
    is its field in the request.
    """

    kind: Literal["text", "json_object", "json_schema", "regex", "lark"] = "text"
    schema: str = ""
    path: str = "schema"
    strict: bool = True
    """Keywords that no grammar can enforce are refused; otherwise they are ignored."""


class Thinking(Struct, frozen=True):
    """How long the model should think before it answers; models that do not think ignore it.

    `is_on` None: as `effort` says, or else as the model does by default.
    """

    is_on: bool | None = None
    effort: str = ""
    """"none" to "xhigh", "" for none given."""
    budget_tokens: int | None = None
    """Most tokens of thought."""
    is_shown: bool = True
    """Whether the answer has the thoughts; they are counted in usage in any case."""

    def is_on_for(self, off_efforts: Collection[str]) -> bool | None:
        """Return whether the model should think; None: as it does by default."""
        if self.is_on is not None:
            return self.is_on
        if self.budget_tokens is not None:
            return self.budget_tokens > 0
        return self.effort not in off_efforts if self.effort else None


DEFAULT_THINKING = Thinking()
"""For requests that say nothing about thinking."""


class Prompt(Struct, frozen=True):
    """A prompt: chat `segments` after `tools` for the template, one raw `text`, or `token_ids`.

    `resource` is the id of cached content that precedes the prompt.
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
    """The last message is an assistant prefill, and the answer continues it."""
    thinking: Thinking = DEFAULT_THINKING
    prediction: str = ""
    """What the client expects as the answer, from which the engine may draft."""

    @property
    def field(self) -> str:
        """The request's field that errors about the whole prompt name."""
        if not self.segments:
            return "prompt"
        return self.segments[-1].path.partition("[")[0].partition(".")[0]


class Boundary(Struct, frozen=True, omit_defaults=True):
    """The token offset at which a segment or tool ends in the rendered prompt.

    The first `tokens` prompt tokens hold the segment at `path` and every segment before it in API
    order. Where a template writes parts in another order, the offset is the furthest of theirs.
    Consecutive boundaries with the same non-empty `run` count as one position of a lookback.
    """

    tokens: int
    path: str
    retention: str | None = None
    tier: Tier = "messages"
    role: str = "user"
    ends_message: bool = True
    run: Literal["", "call", "result"] = ""
    own_tokens: int = 0
    """Where the part itself ends, if an earlier part ends behind it; else 0."""

    @property
    def end(self) -> int:
        """Where the part itself ends: a template may write the tools behind the system text."""
        return self.own_tokens or self.tokens


def path_behind(boundaries: Iterable[Boundary], tokens: int) -> str:
    """Return the path of the part that has the token after the first `tokens`, in the order in
    which the template wrote the parts; "" behind the last. O(boundaries)."""
    behind = [mark for mark in boundaries if mark.end > tokens]
    return min(behind, key=lambda mark: mark.end).path if behind else ""


class Rendered(Struct, frozen=True, omit_defaults=True):
    """A rendered prompt: its token ids, its segment boundaries, and the answer's grammar."""

    token_ids: tuple[int, ...]
    boundaries: tuple[Boundary, ...] = ()
    grammar: Grammar | None = None
    thought: Literal["", "possible", "open"] = ""
    """"open" if the prompt ends inside a thought, "possible" if the answer may begin with one, ""
    if it does not think."""
    prediction: tuple[int, ...] = ()
    """The prompt's prediction, in tokens."""

    @property
    def sent_tokens(self) -> int:
        """The tokens that the engine is sent."""
        return len(self.token_ids) + len(self.prediction)


class GenerationParameters(Struct, frozen=True):
    """Generation settings of one call.

    The engine computes `samples` and the gateway returns the best `choices` of them by mean
    logprob; `choices_field` is the request's field for that number. `max_tokens` None: the server's
    limit; one beyond the room that the prompt leaves is cut to that room.
    """

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
    """The answer begins with the prompt's text."""
    prompt_logprobs: int | None = None
    report_logprobs: bool = True
    """The client asked for logprobs; False if only ranking needs them."""


_META = frozenset(r"\.+*?()|[]{}^$#&-~/")
"""Characters that mean something in a pattern."""


def choice_format(choices: Iterable[str], path: str) -> OutputFormat:
    """Return the format of an answer that is one of these texts. O(characters)."""
    quoted = ("".join(f"\\{char}" if char in _META else char for char in one) for one in choices)
    return OutputFormat("regex", "|".join(quoted), path)


def temperature_of(temperature: float | None, top_p: float | None) -> float:
    """Return the temperature of a request. An empty nucleus keeps only the best token."""
    if top_p == 0:
        return 0.0
    return 1.0 if temperature is None else temperature


UNNAMED = "?"
"""Ends the retention class of a breakpoint whose request names none: `5m?` is the tenant's default
class, or `5m` for a tenant without one."""


class CacheDirectives(Struct, frozen=True):
    """A call's cache settings, which `gateway.caching` applies by the rules of one profile.

    A profile configures a minimum length, reporting and retention classes.
    """

    profile: str = "openai"
    lookup: Literal["longest", "written", "none"] | None = None
    """"longest" reads any cached prefix, "written" only a prefix that an earlier call wrote at a
    breakpoint, "none" nothing (breakpoints are still written); None means the profile's default.
    With "written", each breakpoint tries `lookback` positions, the first of which is its own."""
    lookback: int = 20
    implicit: str | None = None
    """The retention class of an implicit breakpoint at the end of the latest user message, tool
    result or leading developer message; its lookup tries the `lookback` latest ends of such
    messages."""
    writes_max: int | None = None
    """At most this many breakpoints are written, the latest ones; None: all."""
    compare_with: str = ""
    """Id of the response whose prompt a miss is diagnosed against; "": no diagnosis."""
    remember: bool = False
    """Keep this call's prompt digests for a later diagnosis."""
    echo: tuple[tuple[str, str], ...] = ()
    """Settings (name, value) that the dialect repeats in its answer."""


class ItemReference(Struct, frozen=True):
    """A stored item that a request names by id: number `number` of the input or of the output of
    the stored response `response_id`, which the dialect reads from the item's id."""

    item_id: str
    response_id: str
    part: Literal["input", "output"]
    number: int


class ThreadDirectives(Struct, frozen=True):
    """Which stored items a call continues, and what of the call is stored.

    A call with `is_pending` has no prompt: it must be parsed again with the earlier items in
    `RequestMetadata.earlier`.
    """

    previous_id: str = ""
    """The stored response that it continues; "" for none."""
    conversation_id: str = ""
    """The conversation that it continues, to which its own items and its output are appended."""
    references: tuple[ItemReference, ...] = ()
    """Stored items that its input names."""
    store: bool = False
    """Whether to store the response."""
    input: bytes = b""
    """The request's own items as a JSON list."""
    is_pending: bool = False


NO_THREAD = ThreadDirectives()
"""Directives of a call that continues nothing and is not stored."""


class Call(Struct, frozen=True):
    """One request in canonical form.

    A request of /v1/completions may have several `prompts`; every other call has one. `partition`
    narrows the namespace.
    """

    model: str
    prompts: tuple[Prompt, ...]
    generation: GenerationParameters
    operation: Literal["generate", "prewarm", "count", "quote"] = "generate"
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Every chunk of a stream has usage."""
    partition: str = ""
    client_user: str = ""
    priority: int = 0
    cache: CacheDirectives = CacheDirectives()
    digests: tuple[tuple[str, str], ...] = ()
    """Settings (name, digest) that a miss diagnosis compares beside the prompt; they have no other
    effect."""
    ignored: tuple[str, ...] = ()
    """Names of fields that were taken and have no effect (`gateway.dialects.tolerance`)."""
    thread: ThreadDirectives = NO_THREAD
    fidelity: Fidelity | None = None
    """That the request asks of copies of its KV; None leaves it to the tenant."""
    attention: AttentionWindow | None = None
    """The attention window that it asks for."""
    asks_full_attention: bool = False
    """It asks for none, also where its tenant has one by default."""
    drafts: bool = True
    """The engine may draft its answer, which changes no token of it."""


def digest_of(setting: object) -> str:
    """Return the digest of a setting, for `Call.digests`."""
    return hashlib.blake2b(msgspec.json.encode(setting), digest_size=16).hexdigest()


class StoredItem(Struct, frozen=True):
    """An item as a conversation keeps it."""

    item_id: str
    data: bytes
    """Its JSON, with its id."""


class EarlierItems(Struct, frozen=True):
    """The stored items that a request needs."""

    history: tuple[dict[str, Any], ...] = ()
    """The items that it continues, in order."""
    referenced: Mapping[str, dict[str, Any]] = {}
    """The items that it names, by id; an item that is not stored is left out."""


NO_EARLIER_ITEMS = EarlierItems()
"""For requests that continue nothing and name no stored item."""


class RequestMetadata(Struct, frozen=True):
    """Path and header fields of a request that a dialect may read, and its key's modes.

    `model` and `action` come from the path, `version` from a header.
    """

    model: str = ""
    action: str = ""
    version: str = ""
    tolerance: Mode = "standard"
    separates_cache_key: bool = False
    """OpenAI's `prompt_cache_key` narrows the namespace."""
    earlier: EarlierItems | None = None
    """The stored items that the request needs (`ThreadDirectives`); None before they are loaded."""


NO_METADATA = RequestMetadata()
"""Metadata of a request that has all its fields in the body."""


# --- the answer --------------------------------------------------------------------------------


class ShortLease(Struct, frozen=True):
    """A lease that the engine did not grant whole: `granted_tokens` of `tokens` are promised in the
    class `retention`."""

    outcome: Literal["clipped", "refused"]
    bound: str
    """The limit, as in `engine.api.LeaseGrant`."""
    retention: str
    tokens: int
    granted_tokens: int


class UsageRecord(Struct, frozen=True, omit_defaults=True):
    """Token counts, the single source of every dialect's usage fields.

    Invariant: total_in = read + write + fresh. `read` and `write` are the contract's logical
    counts by retention class, which are billed; `physical_cached` counts the prompt tokens that the
    engine did not recompute. In plain prefix caching (no breakpoints) read is physical_cached,
    write is 0 and fresh is the rest.
    """

    total_in: int
    read: dict[str, int] = {}
    write: dict[str, int] = {}
    fresh: int = 0
    out: int = 0
    physical_cached: int = 0
    recomputed_promised: int = 0
    """Tokens read by contract but computed again: eviction or a restart broke their promise."""
    loaded: dict[str, int] = {}
    """The part of `physical_cached` that came from levels below the device, by level."""
    short_lease: ShortLease | None = None
    """The first lease that was not granted whole: why a write is smaller than requested."""
    thinking: int = 0
    """Tokens of `out` that are thoughts."""
    prediction: tuple[int, int] = (0, 0)
    """Tokens of `out` that were drafted from the client's prediction, and drafts from it that were
    not the answer: these are not in `out`, and not billed."""

    def extras(self) -> dict[str, Any]:
        """Return what this server says beyond a dialect's usage object: empty, or `trunkline`."""
        lease = self.short_lease
        if lease is None:
            return {}
        told = {
            "lease": lease.outcome,
            "bound": lease.bound,
            "retention": lease.retention,
            "requested_tokens": lease.tokens,
            "granted_tokens": lease.granted_tokens,
        }
        return {"trunkline": {"cache": told}}

    def counts(self) -> TokenCounts:
        """Return the counts as the ledger has them, without classes that have no tokens."""
        read, write = (
            {name: tokens for name, tokens in classes.items() if tokens}
            for classes in (self.read, self.write)
        )
        # What a peer has sent was loaded from host memory.
        host = self.loaded.get("host", 0) + self.loaded.get("peer", 0)
        levels = (host, self.loaded.get("disk", 0), self.loaded.get("remote", 0))
        return TokenCounts(
            *(read, write, self.fresh, self.out, self.physical_cached, self.recomputed_promised),
            *levels,
        )

    def read_tokens(self) -> int:
        """Return the tokens read, over all retention classes."""
        return sum(self.read.values()) if self.read else 0

    def write_tokens(self) -> int:
        """Return the tokens written, over all retention classes."""
        return sum(self.write.values()) if self.write else 0


class TokenText(Struct, frozen=True):
    """A token with its bytes and logprob. The first token of an echoed prompt has no logprob."""

    token_id: int
    data: bytes
    logprob: float | None
    top: tuple[TokenText, ...] = ()


class Text(Struct, frozen=True, tag="text"):
    """More text of choice `index`: whole characters, and no part of a possible stop string."""

    index: int
    text: str
    tokens: tuple[TokenText, ...] = ()


class Thought(Struct, frozen=True, tag="thought"):
    """More of what choice `index` thinks before its answer."""

    index: int
    text: str


class CallText(Struct, frozen=True, tag="call_text"):
    """More of tool call number `call` of choice `index`.

    The first piece of a call has its `call_id` and `name`; the `arguments` of all pieces, joined,
    are its JSON text.
    """

    index: int
    call: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class OutputCount(Struct, frozen=True, tag="output_count"):
    """The output tokens of choice `index` up to the deltas that follow.

    Only calls with `continuous_usage` have this delta.
    """

    index: int
    tokens: int


class ChoiceEnd(Struct, frozen=True, tag="choice_end"):
    """The end of choice `index`. `stop_sequence` is the stop string that ended it, if any."""

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
    "window_gone",
    "state_gap",
    "attention",
    "damaged",
    "level_failed",
    "not_worth_loading",
    "erased",
    "lost_below",
    "restarted",
    "below_minimum",
    "other_namespace",
    "never_written",
    "unknown",
]
"""Why tokens were not read. The operator causes the first two and the request the next five; only
the gateway knows the rest."""


class Diagnosis(Struct, frozen=True):
    """Where and why a prompt diverged from an earlier response's prompt.

    `outcome` "unknown": the earlier response was not found. `missed_tokens` and `reusable_tokens`
    count this prompt's tokens after and before the first difference. `path` is the first segment
    that differs; `setting` is the name in `Call.digests` that differs.
    """

    outcome: Literal["hit", "miss", "unknown", "unavailable"]
    cause: Cause | None = None
    missed_tokens: int = 0
    reusable_tokens: int = 0
    path: str = ""
    setting: str = ""


class End(Struct, frozen=True, tag="end"):
    """The last delta of a complete answer. A stream that fails ends with a `Refusal` instead."""

    usage: UsageRecord


class Begin(Struct, frozen=True, tag="begin"):
    """The first delta, known before any token. `diagnosis` is set if the client asked for one."""

    usage: UsageRecord
    diagnosis: Diagnosis | None = None


Delta = Begin | Text | Thought | CallText | OutputCount | ChoiceEnd | End


class Reply(Struct, frozen=True):
    """Identity of an answer: the gateway makes its id and creation time once."""

    response_id: str
    model: str
    created_s: int
