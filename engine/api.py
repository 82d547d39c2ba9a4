"""The engine's interface: the commands that the gateway sends, and the events that answer them.

It knows nothing of HTTP, dialects, tenants, keys or prices, and nothing of tensors. The gateway
builds a `Request` and reads events; `engine.server.service` answers. Each value is frozen and
travels as msgpack (`engine.protocol`); the heartbeat's are in `engine.statistics`. Times are
durations in seconds, counted from the moment the engine receives the message, never instants: two
processes share no clock.

    gateway                                   engine
      Submit(Request) ───────────────────────▶ queued
              Started ◀─────────────────────── first scheduled: the cached tokens
               Tokens ◀─────────────────────── zero or more, per sample
          SampleEnded ◀─────────────────────── once per sample
             Finished ◀─────────────────────── exactly once per request, always last
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct

Clock = Callable[[], float]
"""Monotonic seconds. The engine reads no clock but the one it is given."""

Namespace = bytes
"""An opaque sharing scope: only requests with the same bytes find its blocks."""

Payer = bytes
"""Opaque bytes: the owner of a quota, over one namespace or many."""

Count = Annotated[int, Meta(ge=0, lt=2**53)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
EngineRole = Literal["any", "prefill", "decode"]
LevelName = Literal["device", "host", "disk", "remote", "peer"]
"""Where copies of blocks lie; `peer`: in another engine of the model."""
LEVELS_BELOW: Final[tuple[LevelName, ...]] = ("host", "disk", "remote", "peer")
"""The levels below the device, the fastest first."""
Fidelity = Literal["exact", "near", "rough"]
"""How far a copy is from what the model computed: not at all, by 8 bits, by 4 bits."""
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)
"""From the strictest to the laxest. Records and the slot table have their indices."""
AtRest = Literal["never", "local", "remote"]
"""Where KV may rest outside memory: nowhere, on this machine's disk, or in a remote store too."""
AT_REST: tuple[AtRest, ...] = get_args(AtRest)
"""From the strictest to the laxest. The slot table has their indices."""

AttentionPolicy = Literal["window"]
"""Policies of attention that a request may ask for: see `AttentionWindow`."""

LOGIT_BIAS_MAX = 1024
"""Most tokens that one request may bias."""

MARKS_MAX = 4
"""Most lengths of a prompt that one request may mark."""

FEW_IDS = 64
"""Token ids up to which `min` and `max` are faster than msgspec."""


def all_in_vocabulary(token_ids: tuple[int, ...], vocab_size: int) -> bool:
    """Return whether each id is a token of a vocabulary of `vocab_size`.

    O(tokens), at 11 ns each; `min` and `max` take three times that, but start at once."""
    if len(token_ids) <= FEW_IDS:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
    try:
        msgspec.convert(token_ids, _ids_below(vocab_size))
    except msgspec.ValidationError:
        return False
    return True


@lru_cache(maxsize=16)
def _ids_below(vocab_size: int) -> Any:
    return tuple[Annotated[int, Meta(ge=0, lt=vocab_size)], ...]


# --- commands ----------------------------------------------------------------------------------


class Retention(Struct, frozen=True, forbid_unknown_fields=True):
    """A retention class: how long a prefix is promised, and when it may no longer be matched."""

    name: str
    promise_s: float = 0.0
    """Not evicted before (within the payer's quota); 0 is plain best effort."""
    limit_s: float | None = None
    """Not matched at or after, and its blocks are freed; None: no limit."""
    clock: Literal["request_start", "last_use", "absolute"] = "last_use"
    """Both count from the start of the request that asked (`request_start`), from the last use
    (`last_use`), or from that request without ever moving (`absolute`)."""
    renewed_on_read: bool = True
    """A hit restarts the clock."""
    pinned: bool = False
    """The promise covers the whole limit."""


BEST_EFFORT = Retention(name="best_effort")


class LeaseRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Keep the first `tokens` prompt tokens under `retention`. `lease_id` names the lease for
    erasure. `age_s`: it began so long before the request, at another engine."""

    tokens: Count
    retention: Retention
    lease_id: str = ""
    age_s: Annotated[float, Meta(ge=0)] = 0.0


Bound = Literal["", "pool", "ceiling", "quota", "window", "attention"]


class LeaseGrant(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a `LeaseRequest`: promises are granted, clipped or refused, never lost."""

    lease_id: str
    retention: str
    outcome: Literal["granted", "clipped", "refused"]
    tokens: Count
    """How many are promised (fewer than asked when clipped, 0 if refused)."""
    bound: Bound = ""
    """The limit that clipped it: the payer's `ceiling`, its `quota` of promises, or the `pool`;
    `window`: a block that resuming there needs had been freed; `attention`: the prefix ends beyond
    what a request with an attention window shares."""


class Quota(Struct, frozen=True, forbid_unknown_fields=True):
    """A payer's share of device blocks. Floor: never taken by others. Ceiling: never exceeded.

    Between them the payer borrows in proportion to `weight`.
    """

    floor_blocks: Count = 0
    ceiling_blocks: Count | None = None
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    promised_blocks_max: Count | None = None
    """The most blocks that leases may promise it."""
    payer: Payer = b""
    """All namespaces that name the same payer share the quota and one turn in the queue; b"" means
    only the namespace itself."""
    promised_on_device_max: Count | None = None
    """The most blocks that leases may hold on the device, if a level below keeps promises."""


class CacheGrant(Struct, frozen=True, forbid_unknown_fields=True):
    """A request's rights in the cache. `read`/`write` false: neither match nor commit."""

    namespace: Namespace
    quota: Quota = Quota()
    leases: tuple[LeaseRequest, ...] = ()
    read: bool = True
    write: bool = True
    fidelity: Fidelity = "exact"
    """The fidelity of the copies that the namespace's blocks get below the device. It belongs to
    the namespace: all its requests name the same one."""
    at_rest: AtRest = "remote"
    """How far copies of what this request commits may go; where the operator has configured less,
    they go no further."""

    @property
    def payer(self) -> Payer:
        """Return the payer, by default the namespace itself."""
        return self.quota.payer or self.namespace


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters that choose a token from logits.

    Temperature 0 is greedy; every default changes nothing. Order: logit bias, penalties, grammar,
    temperature, top-k, top-p, min-p. Presence and frequency count output tokens; repetition counts
    prompt and output. With a `seed` the choice depends only on (seed, sample index, output
    position) and the logits, not on the rest of the batch.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=LOGIT_BIAS_MAX)
    ] = {}
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """How many alternatives to report with each token (0: only the chosen one; None: no logprobs),
    from the model's own distribution, before any of the above."""


class Grammar(Struct, frozen=True, forbid_unknown_fields=True):
    """A constraint on the whole output.

    The engine compiles it within bounds of size, time and memory, or refuses it as
    `grammar_invalid` or `grammar_too_big`. Keywords that cannot be enforced during generation are
    ignored in a lenient schema; in any other schema they refuse it, by name.
    """

    kind: Literal["json_schema", "lenient_json_schema", "json_object", "lark", "regex"]
    text: str = ""
    """A JSON schema, a Lark grammar in llguidance's dialect, or a regular expression; empty for
    `json_object`."""


class BlockWindow(Struct, frozen=True, gc=False):
    """The blocks that a sequence with an attention window reads.

    A token of block b reads, up to itself, the first `sinks` blocks, the `window` blocks before b,
    and b. That follows only from positions, not from what a step computes together. So the tokens
    of the first `shared_blocks` blocks read all tokens before them.
    """

    sinks: int
    window: int

    @property
    def shared_blocks(self) -> int:
        """Return how many leading blocks are computed as without a window."""
        return self.sinks + self.window + 1

    @property
    def blocks_max(self) -> int:
        """Return the most blocks that a sequence holds while a few of its tokens are computed at a
        time, however long it is: the shared ones are released together, when the window has passed
        them.
        """
        return self.shared_blocks + self.window + 2

    def first_read(self, block: int) -> int:
        """Return the first block behind the sinks that the tokens of `block` read."""
        return max(self.sinks, block - self.window)

    def blocks_of(self, runs: int, step_blocks: int = 1) -> int:
        """Return the most blocks that a sequence of `runs` blocks holds while `step_blocks` are
        computed at a time.
        """
        return min(runs, self.blocks_max + step_blocks - 1)


class AttentionWindow(Struct, frozen=True, forbid_unknown_fields=True):
    """A request's attention window: its tokens read the first `sink_tokens` tokens and the last
    `tokens` before their own block, and no others. Both are multiples of the block.

    What is computed beyond sinks, window and a block differs from what other requests compute: it
    is never shared.
    """

    tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    sink_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0

    def in_blocks(self, block_size: int) -> BlockWindow:
        """Return the window in blocks."""
        return BlockWindow(self.sink_tokens // block_size, self.tokens // block_size)

    def shared_tokens(self, block_size: int) -> int:
        """Return how many leading tokens are computed as without the window."""
        return self.in_blocks(block_size).shared_blocks * block_size


class Peer(Struct, frozen=True, forbid_unknown_fields=True):
    """Another engine of the model that has the first `tokens` tokens of a prompt, at an address.

    `ticket`: says to that engine that this one may have them (`engine.client.peer_tickets`).
    `is_near`: this one reads its pool (`EngineInfo.pool_domain`).
    """

    name: str
    host: str
    port: Count
    tokens: Count
    ticket: bytes
    is_near: bool = False


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """One generation request. `tokens` is the whole prompt, at least one token.

    `samples` sequences are forked from one prompt and share its blocks. `max_tokens` counts output
    tokens per sample; 0 means "prefill only" (a prewarm: it finishes with `length` and no output).
    A sample ends with reason `stop` on any of `stop_token_ids` (which contain the model's end
    tokens unless the gateway leaves them out) once it has `min_tokens`; the stop token itself is
    reported. A complete text ends as `stop`, with or without an end token, and before `min_tokens`
    if nothing can follow."""

    request_id: str
    tokens: tuple[TokenId, ...]
    max_tokens: Count
    grant: CacheGrant
    sampling: Sampling = Sampling()
    samples: Annotated[int, Meta(ge=1, le=128)] = 1
    stop_token_ids: tuple[TokenId, ...] = ()
    min_tokens: Count = 0
    priority: int = 0
    """Higher first."""
    turn: Payer = b""
    """The payer that gives its turn in the queue, batch slots and computing time; empty: the payer
    of its blocks."""
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """That payer's share of service."""
    deadline_s: float | None = None
    """Seconds from receipt after which a request not yet started is finished as `timeout`."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Report logprobs of prompt tokens (reads no cache: logits are needed)."""
    grammar: Grammar | None = None
    """Excluded tokens are never sampled, end tokens only if the text may end."""
    isolated_tokens: Count = 0
    """The request's steps contain no other request until each sample has so many output tokens; the
    gateway asks for it where it suspects a request of ending the process."""
    attention: AttentionWindow | None = None
    """A window of attention, None for all tokens."""
    resumed_tokens: Count = 0
    """So many tokens at the end of `tokens` are output that another engine has given out. It goes
    on behind them, and counts them as output, as after a preemption. One sample only."""
    expected_cached_tokens: Count = 0
    """So many leading tokens the gateway expects to be cached, with several engines. Reports of the
    load leave them out while the request waits; nothing else depends on it."""
    drafts: bool = True
    """Its steps may verify drafts, which change no token."""
    prediction: tuple[TokenId, ...] = ()
    """What its client expects as the answer: a source of drafts for this request alone."""
    marks: Annotated[tuple[Count, ...], Meta(max_length=MARKS_MAX)] = ()
    """Lengths of the prompt at which its client may come back, the likeliest first: ends of turns,
    of the system text, of tools. A model with recurrent layers keeps states there."""
    peer: Peer | None = None
    """Who has more of the prompt than this engine is said to have: it may be fetched from there."""
    adopts: bool = False
    """It is no client's: it takes promises over from an engine, or computes a prompt for one. It
    renews no other, counts as abandoned, keeps nothing where the same was erased here lately."""

    @property
    def sent_tokens(self) -> int:
        """Return the tokens that the request brings: its prompt and its prediction."""
        return len(self.tokens) + len(self.prediction)

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(self.tokens) - self.resumed_tokens

    @property
    def turn_payer(self) -> Payer:
        """Return the payer that the request takes its turn from."""
        return self.turn or self.grant.payer


class Submit(Struct, frozen=True, tag="submit", forbid_unknown_fields=True):
    """Submit a request."""

    request: Request


class Cancel(Struct, frozen=True, tag="cancel", forbid_unknown_fields=True):
    """End a request as `cancelled`. Unknown ids are ignored: the request may just have finished."""

    request_id: str


class EndSample(Struct, frozen=True, tag="end_sample", forbid_unknown_fields=True):
    """End sample `index` as `stop`: the gateway found a stop string.

    The sample is charged `output_tokens` (the tokens of the text up to the stop), however many the
    engine has sampled since.
    """

    request_id: str
    index: Count
    output_tokens: Count


class Peek(Struct, frozen=True, tag="peek", forbid_unknown_fields=True):
    """Ask what these tokens would match. Changes nothing: no pin, no renewal, no last use."""

    call_id: Count
    namespace: Namespace
    tokens: tuple[TokenId, ...]
    quota: Quota | None = None
    """The payer's; with it the answer tells how much a lease could promise."""


class SetQuotas(Struct, frozen=True, tag="set_quotas", forbid_unknown_fields=True):
    """Apply changed quotas now, not from their payers' next requests on.

    A payer that sends no further request must not keep its floor. Payers that hold nothing are
    ignored.
    """

    quotas: tuple[Quota, ...]


class Erase(Struct, frozen=True, tag="erase", forbid_unknown_fields=True):
    """Erase cached KV: a whole namespace, one lease of it, or everything under a token prefix.

    At most one of `lease_id` and `tokens` may be given. Blocks in use by running sequences leave
    the tree at once and are freed when the last of these sequences ends.
    """

    call_id: Count
    namespace: Namespace
    lease_id: str | None = None
    tokens: tuple[TokenId, ...] | None = None


class Survey(Struct, frozen=True, tag="survey", forbid_unknown_fields=True):
    """Ask for the shape of the namespace's tree: its `most` largest branches."""

    call_id: Count
    namespace: Namespace
    most: Annotated[int, Meta(ge=1, le=10_000)] = 1_000


class FindLease(Struct, frozen=True, tag="find_lease", forbid_unknown_fields=True):
    """Ask for the tokens that a lease covers. Changes nothing."""

    call_id: Count
    namespace: Namespace
    lease_id: str


class GetStats(Struct, frozen=True, tag="get_stats", forbid_unknown_fields=True):
    """Ask for statistics."""

    call_id: Count


class GetHeld(Struct, frozen=True, tag="get_held", forbid_unknown_fields=True):
    """Ask for the token-seconds that payers have held."""

    call_id: Count


class GetDeparted(Struct, frozen=True, tag="get_departed", forbid_unknown_fields=True):
    """Ask for the starts of gateways that have left, but for those whose books are settled."""

    call_id: Count
    settled: tuple[str, ...] = ()


class Disown(Struct, frozen=True, tag="disown", forbid_unknown_fields=True):
    """Count requests of this gateway as abandoned: their connection was lost, and with it their
    ends. Those that the engine has abandoned itself are ignored."""

    request_ids: tuple[str, ...]


class Drain(Struct, frozen=True, tag="drain", forbid_unknown_fields=True):
    """Take no new request, finish the running ones, and end the rest as `shutdown` after
    `timeout_s`."""

    timeout_s: float


class LetGo(Struct, frozen=True, tag="let_go", forbid_unknown_fields=True):
    """This gateway needs nothing more of an engine that drains: it need not wait for it."""


class WatchPrefixes(Struct, frozen=True, tag="watch_prefixes", forbid_unknown_fields=True):
    """Tell this connection all prefixes that the engine has, and from then on what changes of them
    and of its load. Asked again: all of them anew."""


Command = (
    Submit | Cancel | EndSample | Peek | SetQuotas | Erase | Survey | FindLease | GetStats | GetHeld
    | GetDeparted | Disown | Drain | LetGo | WatchPrefixes
)  # fmt: skip


# --- events and replies ------------------------------------------------------------------------

FinishReason = Literal["stop", "length"]
"""Why a sample ended by itself."""

Ending = Literal["done", "cancelled", "timeout", "refused", "failed", "shutdown"]
"""The ending of a request. `done`: every sample ended by itself or by `EndSample`."""


class TokenLogprob(Struct, frozen=True, forbid_unknown_fields=True):
    """One token and its logprob."""

    token_id: TokenId
    logprob: float


class SampledToken(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One output token. `logprob` and `top` (best first) are set when the request asked for
    them.
    """

    token_id: TokenId
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class DraftCount(Struct, frozen=True, forbid_unknown_fields=True):
    """The drafts of one source. Each accepted one is an output token, and a step saved."""

    source: str
    drafted: Count
    accepted: Count


PREDICTION = "prediction"
"""The source that drafts from a request's own `prediction`."""


class Usage(Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens and times of one request, as the engine counts them.

    prompt_tokens = cached_tokens + computed_tokens. `cached_tokens` is physical: prompt tokens
    whose KV was cached when the request first ran. A later preemption never lowers it:
    recomputation counts in `recomputed_tokens` (the operator's cost, not the client's).
    """

    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    computed_tokens: Count = 0
    output_tokens: Count = 0
    """The tokens of all samples."""
    recomputed_tokens: Count = 0
    preemptions: Count = 0
    queue_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0
    drafts: tuple[DraftCount, ...] = ()
    """Its drafts by source, for those that drafted any."""


LoadMiss = Literal["", "damaged", "level_failed", "not_worth_loading"]
"""Why a level below the device did not bring what it had, empty if it did. `damaged`: the bytes
were not those that were written. `level_failed`: a look, fetch or load failed or came too late, or
the level is off. `not_worth_loading`: computing was predicted to be faster."""


class LevelWait(Struct, frozen=True, forbid_unknown_fields=True):
    """What levels below the device cost a request, and what they did not bring."""

    load_s: float = 0.0
    """Seconds that it waited for its loads, a part of its time before the first step."""
    level: LevelName | None = None
    """The slowest level that they came from, None without a load."""
    missed_tokens: Count = 0
    """Further tokens that a level had, or may have had where it could not be asked."""
    cause: LoadMiss = ""
    """Why they were computed."""


class Started(Struct, frozen=True, tag="started", forbid_unknown_fields=True):
    """The request was first scheduled. Sent once, before any token, and not again after
    preemption."""

    request_id: str
    prompt_tokens: Count
    cached_tokens: Count
    leases: tuple[LeaseGrant, ...] = ()
    resume_gap_tokens: Count = 0
    """Further tokens that are cached, but computed again: behind the last point to resume at, where
    the blocks of a window, or the state of recurrent layers, were kept."""
    loaded_tokens: tuple[tuple[LevelName, Count], ...] = ()
    """The part of the cached tokens that was loaded for this request, by the level it was on."""
    fidelity: Fidelity = "exact"
    """How far from exact the cached tokens may be; laxer than exact only if the request allows
    it and a packed copy was loaded in its namespace."""
    wait: LevelWait | None = None
    """None if no level below the device had anything of it."""


class PromptLogprobs(Struct, frozen=True, tag="prompt_logprobs", forbid_unknown_fields=True):
    """Entries of the next prompt tokens; the very first has no logprob.

    Sent before any output token, in pieces that together have one entry per prompt token; a
    `RequestStream` joins them.
    """

    request_id: str
    tokens: tuple[SampledToken, ...]


class Tokens(Struct, frozen=True, tag="tokens", forbid_unknown_fields=True, gc=False):
    """New output tokens of one sample, in order."""

    request_id: str
    index: Count
    tokens: tuple[SampledToken, ...]


class SampleEnded(Struct, frozen=True, tag="sample_ended", forbid_unknown_fields=True):
    """One sample has ended."""

    request_id: str
    index: Count
    reason: FinishReason
    output_tokens: Count
    cumulative_logprob: float | None = None


class Finished(Struct, frozen=True, tag="finished", forbid_unknown_fields=True):
    """The one final event of a request.

    `code` and `message` (for operators and clients; no internal names) say why it was refused or
    failed; `code` is stable (`engine.errors`).
    """

    request_id: str
    ending: Ending
    usage: Usage
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None
    """When a full queue may have room for its payer, or when the first promise ends that holds the
    memory."""


class Peeked(Struct, frozen=True, tag="peeked", forbid_unknown_fields=True):
    """The answer to `Peek`."""

    call_id: Count
    cached_tokens: Count
    promised_tokens: Count = 0
    """Matched tokens that are promised on any level."""
    expires_in_s: float | None = None
    """Until the match ends by itself; None without a limit."""
    resume_gap_tokens: Count = 0
    """Further tokens that are cached, behind the last point to resume at, as in `Started`."""
    stored_tokens: tuple[tuple[LevelName, Count], ...] = ()
    """Further tokens that levels below the device are known to have; a disk may have more."""
    promisable_tokens: Count | None = None
    """How many leading tokens a lease could promise now, and the `bound` that would clip more; None
    without a quota in the call, or for a model with window groups."""
    bound: Bound = ""


class LeaseFound(Struct, frozen=True, tag="lease_found", forbid_unknown_fields=True):
    """The answer to `FindLease`: the tokens up to the end of its last block that is kept here, four
    bytes each; b"" where none is. `at_rest`: the strictest word of the namespace's requests."""

    call_id: Count
    token_ids: bytes = b""
    at_rest: AtRest = "remote"


class LevelErased(Struct, frozen=True, forbid_unknown_fields=True):
    """The copies that an erasure took from one level."""

    level: LevelName
    blocks: Count
    bytes: Count
    code: str = ""
    """Why that failed; empty if it did not."""
    is_shredded: bool = False
    """The key with which they were sealed is destroyed."""


class Erased(Struct, frozen=True, tag="erased", forbid_unknown_fields=True):
    """The answer to `Erase`: how many blocks left the tree, and copies the levels below it.

    It is sent when no level can serve what was named, nor can any later start.
    """

    call_id: Count
    blocks: Count
    levels: tuple[LevelErased, ...] = ()


class Branch(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A run of blocks without a fork."""

    parent: int
    """The index of the branch it grows from, -1 for none."""
    tokens: Count
    """The tokens of this branch."""
    total_tokens: Count
    """Its tokens with those of all branches below it."""
    hits: Count
    """Requests that matched its beginning."""
    promised_blocks: Count
    idle_s: float
    """Seconds since its latest use."""


class Surveyed(Struct, frozen=True, tag="surveyed", forbid_unknown_fields=True):
    """The answer to `Survey`, parents before children."""

    call_id: Count
    branches: tuple[Branch, ...]


class HeldTokens(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Token-seconds that a payer has held in a class since the engine's start."""

    payer: Payer
    retention: str
    """The name of the class that promises the blocks for longest; "" for no promise."""
    token_seconds: Count


class Held(Struct, frozen=True, tag="held", forbid_unknown_fields=True):
    """The answer to `GetHeld`. The sums never fall: a later answer has all of an earlier one."""

    call_id: Count
    readings: tuple[HeldTokens, ...]


class EndedCounts(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the engine has counted for a request that has ended."""

    request_id: str
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: int
    """Below 0 where a stop was found within what the request was resumed with."""


class DepartedGateway(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A start of a gateway that has no connection any more: what the engine has counted for its
    requests that ended, without those that it abandoned."""

    start: str
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: int
    ended: tuple[EndedCounts, ...]
    """The latest of them, one by one: their entries may be missing."""


class Departed(Struct, frozen=True, tag="departed", forbid_unknown_fields=True):
    """The answer to `GetDeparted`."""

    call_id: Count
    gateways: tuple[DepartedGateway, ...]


Event = Started | PromptLogprobs | Tokens | SampleEnded | Finished
"""The events of a request's stream."""


def most_runs(window: int, block_size: int, step_tokens: int = 1) -> int:
    """Return the most blocks that a sequence has in a KV group with a window, while `step_tokens`
    are computed at a time: the window, the step, and the blocks at their ends.
    """
    return -(-(window + step_tokens - 1) // block_size) + 2


def tokens_within(blocks: int, windows: tuple[int, ...], block_size: int) -> int:
    """Return the tokens of the longest sequence that never holds more than `blocks`, with a KV
    group for each of `windows` beside the first. O(windows log windows).
    """
    runs, left = 0, blocks
    bounds = sorted(most_runs(window, block_size) for window in windows)
    for index, bound in enumerate(bounds):
        each = 1 + len(bounds) - index
        if (bound - runs) * each > left:
            return (runs + left // each) * block_size
        left -= (bound - runs) * each
        runs = bound
    return (runs + left) * block_size


class EngineInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """Facts about a loaded engine that the gateway needs.

    Each start has its own `epoch`, with an empty cache. `model_digest` covers weights, tokenizer
    and KV format; every namespace contains it.
    """

    epoch: str
    model: str
    model_digest: str
    model_dir: str
    vocab_size: Count
    context_tokens: Count
    block_size: Count
    blocks: Count
    floor_blocks_max: Count
    """The most that floors together may take; floors that ask for more are cut."""
    kv_bytes_per_block: Count
    kv_format: str
    device: str
    pid: Count
    promisable_blocks: Count = 0
    """The most that promises and floors may take, on the lowest level that keeps promises."""
    kv_windows: tuple[Count, ...] = ()
    """The windows of the KV groups beside the first, in tokens: `block_size` tokens take a block in
    each of them as well."""
    kv_fidelity: Fidelity = "exact"
    """The fidelity of the KV that all answers are computed with."""
    promisable_on_device: Count = 0
    """The most that they may take on the device; 0 if that is the same."""
    attention_policies: tuple[AttentionPolicy, ...] = ()
    """The policies that requests may ask for by the configuration."""
    attention_lacks: str = ""
    """Why this engine or model computes none of them; empty if it does."""
    draft_model: str = ""
    """The small model that drafts beside it; empty: none."""
    role: EngineRole = "any"
    pool_domain: str = ""
    """Engines with the same one read each other's pools; empty if none can."""
