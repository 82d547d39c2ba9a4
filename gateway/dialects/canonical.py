"""The one inner form between wire dialects and everything else.

A dialect is a pure translation: bytes → `Call`, and `Delta`s → bytes. It knows no socket, no engine
and no other dialect. A unary reply is the fold of the stream. Values are frozen.

    bytes ─ dialect.parse ─▶ Call ─ prompt.render ─▶ Rendered ─ admission ─▶ engine Request
    bytes ◀─ dialect.encode ── Delta… ◀─ stream (detokenizer, stop strings) ◀─ engine events
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from engine.api import Retention, Sampling

# --- the prompt --------------------------------------------------------------------------------


class Segment(Struct, frozen=True):
    """A piece of the prompt in API order, the smallest thing a breakpoint can follow.

    `path` is where it stood in the request ("messages[2].content[0]"), for errors and diagnosis.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    text: str
    path: str
    name: str | None = None
    message: int = 0
    """Index of the message it belongs to; segments of one message are joined by the template."""
    retention: Retention | None = None
    """A breakpoint stands after this segment: keep the prefix up to here."""


class Prompt(Struct, frozen=True):
    """Either chat `segments` for the template, or one raw `text`, or ready `token_ids`."""

    segments: tuple[Segment, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    add_generation_prompt: bool = True


class Boundary(Struct, frozen=True):
    """`tokens` prompt tokens end the segment at `path`."""

    tokens: int
    path: str
    retention: Retention | None = None


class Rendered(Struct, frozen=True):
    """What the engine computes: token ids and where each segment ends among them."""

    token_ids: tuple[int, ...]
    boundaries: tuple[Boundary, ...] = ()


class Generation(Struct, frozen=True):
    """How to continue. `samples` are computed and the best `choices` of them, by mean logprob,
    returned. `max_tokens` None: as many as the server gives. `echo`: the prompt's text is part of
    the answer. `report_logprobs`: logprobs were asked for, not only needed for ranking."""

    max_tokens: int | None = None
    choices: int = 1
    samples: int = 1
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    echo: bool = False
    prompt_logprobs: int | None = None
    report_logprobs: bool = True


class Call(Struct, frozen=True):
    """One request in the inner form. One HTTP request of /v1/completions with several prompts is
    several prompts here; every other call has one. `partition` narrows the namespace."""

    model: str
    prompts: tuple[Prompt, ...]
    generation: Generation
    operation: Literal["generate", "prewarm", "count"] = "generate"
    stream: bool = False
    include_usage: bool = False
    partition: str = ""
    client_user: str = ""
    priority: int = 0


# --- the answer --------------------------------------------------------------------------------


class UsageRecord(Struct, frozen=True):
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

    def read_tokens(self) -> int:
        return sum(self.read.values())

    def write_tokens(self) -> int:
        return sum(self.write.values())


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


class ChoiceEnd(Struct, frozen=True, tag="choice_end"):
    """`stop_sequence`: the stop string that ended it, if one did."""

    index: int
    reason: Literal["stop", "length"]
    stop_sequence: str | None = None


class End(Struct, frozen=True, tag="end"):
    """The answer is whole. Always last; a stream that fails ends with a `Refusal` instead."""

    usage: UsageRecord


class Begin(Struct, frozen=True, tag="begin"):
    """First delta: what is known before any token."""

    usage: UsageRecord


Delta = Begin | Text | ChoiceEnd | End


class Reply(Struct, frozen=True):
    """What a dialect needs to name its answer: ids and times are made by the gateway, once."""

    response_id: str
    model: str
    created_s: int
