"""Decide whether a call may run, and turn tokens and an identity into engine requests.

Pure: admission reads the engine's latest heartbeat and counters that other modules keep, and makes
no calls. The tenant's own limits answer 429, the server's 503, and requests that can never run 400;
the first two include a retry time. A tenant becomes a namespace, a quota, a weight and a priority
only here. `gateway.generation.generation` and the quote handler call it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from engine.api import (
    AttentionWindow,
    CacheGrant,
    EngineInfo,
    LeaseRequest,
    Namespace,
    Quota,
    Request,
    all_in_vocabulary,
    tokens_within,
)
from engine.statistics import Stats
from gateway.caching.breakpoints import marks_of
from gateway.caching.namespaces import fidelity_of, payer_of, quota_of, rest_of, scaled
from gateway.config import LimitsConfig
from gateway.dialects.canonical import Call, GenerationParameters, Rendered
from gateway.engines.waiting_requests import WaitingRequests
from gateway.errors import TOO_LONG, Kind, Refusal
from tenancy.types import Identity

ECHO_ENTRIES_MAX = 1_000_000
"""Most logprobs of prompts that one answer repeats: some 15 MB, which take 45 ms to encode."""
SEQUENCES_PER_CALL_MAX = 128
RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 1.0, 60.0
"""Bounds of `Retry-After`, in seconds; clients that have to wait longer give up."""


class AdmissionContext(Struct, frozen=True):
    """The state that admission checks a call against.

    `promised_blocks_default`, `on_device_default`, `quota_scale`: see `gateway.caching.namespaces`.
    """

    info: EngineInfo
    model_key: str
    """The model as its namespaces name it."""
    stats: Stats
    limits: LimitsConfig
    template_digest: str
    model_stop_token_ids: tuple[int, ...]
    running: int
    """The tenant's running requests, each prompt one."""
    waiting: WaitingRequests
    """All tenants' requests to the model that have not started."""
    promised_blocks_default: int | None = None
    on_device_default: int | None = None
    quota_scale: float = 1.0


def quota_now(identity: Identity, now: AdmissionContext) -> Quota:
    """Return the engine's quota of a request's payer."""
    default, scale = now.promised_blocks_default, now.quota_scale
    policy, payer = identity.blocks_policy, payer_of(identity)
    return quota_of(policy, payer, default, scale, now.on_device_default)


def admit(
    call: Call,
    rendered: Sequence[Rendered],
    identity: Identity,
    request_id: str,
    now: AdmissionContext,
    namespace: Namespace,
    leases: Sequence[tuple[LeaseRequest, ...]],
) -> tuple[Request, ...]:
    """Build one engine request per prompt, with its leases, in `namespace`.

    O(tokens), for the bounds check of token ids that a client sent; else O(prompts). Raises
    Refusal: BAD for a call that can never run, RATE for the tenant's limit, BUSY for the server's.
    """
    generation = call.generation
    budgets = output_tokens(call, rendered, identity, now)
    _check_tenant(rendered, identity, now)
    _check_queue(rendered, identity, now)
    quota = quota_now(identity, now)
    fidelity = fidelity_of(identity, call.fidelity, now.info.kv_fidelity)
    requests = [
        Request(
            request_id=request_id if len(rendered) == 1 else f"{request_id}-{number}",
            tokens=prompt.token_ids,
            max_tokens=budget,
            grant=CacheGrant(
                namespace, quota, leases[number], fidelity=fidelity, at_rest=rest_of(identity)
            ),
            sampling=generation.sampling,
            samples=generation.samples,
            stop_token_ids=_stops(generation, now),
            min_tokens=min(generation.min_tokens, budget),
            priority=identity.policy.priority + call.priority,
            turn=b"" if identity.scope is None else str(identity.tenant.tenant_id).encode(),
            weight=identity.policy.weight,
            deadline_s=now.limits.queue_timeout_s,
            prompt_logprobs=generation.prompt_logprobs,
            grammar=prompt.grammar,
            attention=call.attention,
            drafts=call.drafts,
            prediction=prompt.prediction if call.drafts else (),
            marks=marks_of(prompt.boundaries),
        )
        for number, (prompt, budget) in enumerate(zip(rendered, budgets, strict=True))
    ]
    return tuple(requests)


def output_tokens(
    call: Call, rendered: Sequence[Rendered], identity: Identity, now: AdmissionContext
) -> list[int]:
    """Return the output tokens that each prompt may use. Raises Refusal (BAD) if none fit."""
    generation = call.generation
    _check_sequences(generation, len(rendered), now.limits)
    for asked, prompt in zip(call.prompts, rendered, strict=True):
        if not prompt.token_ids:
            message = "prompt: empty; expected at least one token."
            raise Refusal(Kind.BAD, "invalid_value", message, param="prompt")
        if asked.token_ids is not None:
            check_ids("prompt", prompt.token_ids, now.info)
    _check_more_ids(generation, now.info)
    _check_echo(generation, rendered)
    return [_output_tokens(prompt, call, identity, now) for prompt in rendered]


def retry_after_s(wait_s: float) -> float:
    """Return a wait as a retry time within its bounds, in seconds."""
    return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, wait_s))


# --- calls that can never run --------------------------------------------------------------------


def _check_sequences(generation: GenerationParameters, prompts: int, limits: LimitsConfig) -> None:
    if generation.samples > limits.choices_max:
        are_choices = generation.choices == generation.samples
        param = generation.choices_field if are_choices else "best_of"
        message = f"{param}: {generation.samples}; expected at most {limits.choices_max}."
        raise Refusal(Kind.BAD, "invalid_value", message, param=param)
    if prompts * generation.samples > SEQUENCES_PER_CALL_MAX:
        raise Refusal(
            Kind.BAD,
            "invalid_value",
            f"prompt: {prompts} prompts of {generation.samples} samples each; expected at most"
            f" {SEQUENCES_PER_CALL_MAX} samples per request.",
            param="prompt",
        )


def _check_echo(generation: GenerationParameters, rendered: Sequence[Rendered]) -> None:
    """Refuse an answer that would repeat too many logprobs of its prompts, once per choice."""
    if generation.prompt_logprobs is None:
        return
    tokens = sum(len(prompt.token_ids) for prompt in rendered)
    entries = tokens * (1 + generation.prompt_logprobs) * generation.choices
    if entries > ECHO_ENTRIES_MAX:
        message = (
            f"logprobs: with echo the answer has {entries} entries ({tokens} prompt tokens,"
            f" {generation.prompt_logprobs} logprobs, {generation.choices} choices); expected at"
            f" most {ECHO_ENTRIES_MAX}."
        )
        raise Refusal(Kind.BAD, "invalid_value", message, param="logprobs")


def _check_more_ids(generation: GenerationParameters, info: EngineInfo) -> None:
    """Check token ids that a client sent: an unchecked id must not index anything. The engine
    checks all ids; ids from the tokenizer are checked only there."""
    if generation.stop_token_ids:
        check_ids("stop_token_ids", generation.stop_token_ids, info)
    if generation.sampling.logit_bias:
        check_ids("logit_bias", tuple(generation.sampling.logit_bias), info)


def check_ids(param: str, token_ids: tuple[int, ...], info: EngineInfo) -> None:
    """Check token ids that a client sent in the field `param`. O(tokens). Raises Refusal."""
    if not all_in_vocabulary(token_ids, info.vocab_size):
        least, most = min(token_ids), max(token_ids)
        wrong = least if least < 0 else most
        raise Refusal(
            Kind.BAD,
            "invalid_value",
            f"{param}: token id {wrong} is outside the vocabulary (0 to {info.vocab_size - 1}).",
            param=param,
        )


def _output_tokens(prompt: Rendered, call: Call, identity: Identity, now: AdmissionContext) -> int:
    """Return the output tokens of one prompt: the requested number, cut to the room that is left.

    A refusal would be about the prompt, which clients then shorten: agents compact their history,
    and ask for as many output tokens again. Raises Refusal if even the prompt leaves no room.
    """
    wanted, given = call.generation.max_tokens, len(prompt.token_ids)
    room, reason = _room(identity, now, call.attention)
    if given + (wanted != 0) > room:
        what = f"the prompt has {given}"
        if given == room:
            what += ", which leaves no room for the answer"
        field = call.prompts[0].field if call.prompts else "prompt"
        size = (given + (wanted != 0), room)
        raise Refusal(Kind.BAD, TOO_LONG, f"{reason}, and {what}.", param=field, size=size)
    return min(now.limits.output_tokens_default if wanted is None else wanted, room - given)


def _room(
    identity: Identity, now: AdmissionContext, attention: AttentionWindow | None
) -> tuple[int, str]:
    """Return the tokens that one sequence may have, and the reason as text: the model's context or
    the cache memory, whichever is smaller. Under an attention window that fits, memory is no bound:
    blocks behind the window are released."""
    context = now.info.context_tokens
    ceiling = identity.blocks_policy.ceiling_blocks
    if ceiling is not None:
        ceiling = scaled(identity.blocks_policy, now.quota_scale).ceiling_blocks
    blocks = now.info.blocks if ceiling is None else min(now.info.blocks, ceiling)
    memory = tokens_within(blocks, now.info.kv_windows, now.info.block_size)
    size = now.info.block_size
    is_bounded = attention is not None and attention.in_blocks(size).blocks_max * size <= memory
    if memory < context and not is_bounded:
        return memory, f"The available cache memory holds {memory} tokens"
    return context, f"This model's maximum context length is {context} tokens"


# --- calls that cannot run now -------------------------------------------------------------------


def _check_tenant(rendered: Sequence[Rendered], identity: Identity, now: AdmissionContext) -> None:
    """Refuse a call with more prompts than the tenant may run at once; a single call may."""
    limit = now.limits.requests_per_tenant_max
    if now.running and now.running + len(rendered) > limit:
        raise Refusal(
            Kind.RATE,
            "rate_limit_exceeded",
            f"Rate limit reached for requests at once: {now.running} running, limit {limit}.",
            retry_after_s=retry_after_s(_wait_s(identity, now)),
        )


def _check_queue(rendered: Sequence[Rendered], identity: Identity, now: AdmissionContext) -> None:
    """Refuse a call that would time out in the queue, or for which a full queue has no room.

    The wait and the counts are those of the tenant's own requests: another tenant's requests delay
    it only by their share.
    """
    tenant_id, wait_s = identity.tenant.tenant_id, _wait_s(identity, now)
    tokens = sum(prompt.sent_tokens for prompt in rendered)
    reason = ""
    if wait_s > now.limits.queue_timeout_s:
        reason = (
            f"estimated wait of this tenant's requests {wait_s:.0f} s, limit"
            f" {now.limits.queue_timeout_s:g} s; this request has {tokens} prompt tokens"
        )
    elif now.waiting.is_full_for(tenant_id, identity.policy.weight, len(rendered), tokens):
        waiting = now.waiting.requests_of(tenant_id)
        reason = f"the queue is full, and {waiting} requests of this tenant are waiting"
    if reason:
        raise Refusal(
            Kind.BUSY,
            "overloaded",
            f"The server is overloaded: {reason}.",
            retry_after_s=retry_after_s(wait_s),
        )


def _wait_s(identity: Identity, now: AdmissionContext) -> float:
    return now.waiting.wait_s(
        identity.tenant.tenant_id, identity.policy.weight, now.stats.prefill_tokens_per_s
    )


def _stops(generation: GenerationParameters, now: AdmissionContext) -> tuple[int, ...]:
    own = () if generation.ignore_eos else now.model_stop_token_ids
    if not generation.stop_token_ids:
        return own  # the usual case
    return tuple(dict.fromkeys((*own, *generation.stop_token_ids)))
