"""Request checks: refuse a request that can never run, or that comes while the engine drains.

The checks read core's state once, before anything is allocated. Every refusal names the limit that
was exceeded and the value that was received.
"""

from __future__ import annotations

from typing import Protocol

from engine.api import AttentionWindow, Request, all_in_vocabulary
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.errors import (
    DRAINING_MESSAGE,
    DUPLICATE_MESSAGE,
    EngineUnavailable,
    RequestRefused,
)
from engine.scheduler.request_table import RequestTable


class CheckContext(Protocol):
    """The part of core that the checks read."""

    cache: PrefixCache
    config: EngineConfig
    vocab_size: int
    context_tokens: int
    attention_lacks: str
    requests: RequestTable

    @property
    def is_draining(self) -> bool: ...


def check_request(core: CheckContext, request: Request) -> None:
    """Raise RequestRefused (can never run here) or EngineUnavailable (try again). O(tokens)."""
    if core.is_draining:
        raise EngineUnavailable("draining", DRAINING_MESSAGE)
    if request.request_id in core.requests:
        raise RequestRefused("duplicate_request", DUPLICATE_MESSAGE)
    _check_tokens(core, request)
    if request.attention is not None:
        _check_attention(core, request, request.attention)
    _check_size(core, request)
    _check_resumed(request)


def _check_tokens(core: CheckContext, request: Request) -> None:
    if not request.tokens:
        raise RequestRefused("prompt_empty", "The prompt has no tokens.")
    ids = (
        *(request.tokens, request.prediction),
        *(request.stop_token_ids, tuple(request.sampling.logit_bias)),
    )
    for some in ids:
        if some and not all_in_vocabulary(some, core.vocab_size):
            wrong = min(some) if min(some) < 0 else max(some)
            raise RequestRefused(
                "token_out_of_range",
                f"Token id {wrong} is outside the vocabulary: expected 0 to {core.vocab_size - 1}.",
            )


def _check_attention(core: CheckContext, request: Request, asked: AttentionWindow) -> None:
    if "window" not in core.config.attention_policies:
        raise RequestRefused(
            "attention_not_allowed",
            "Attention windows are not allowed here: expected a request without one.",
        )
    if core.attention_lacks:
        raise RequestRefused(
            "attention_not_available",
            f"Attention windows are not available: {core.attention_lacks}; expected a request"
            " without one.",
        )
    size = core.cache.block_size
    if asked.tokens % size or asked.sink_tokens % size:
        raise RequestRefused(
            "attention_invalid",
            f"An attention window of {asked.tokens} tokens and {asked.sink_tokens} sinks: expected"
            f" multiples of the block of {size} tokens.",
        )
    own = max(core.cache.windows.windows, default=0)
    if asked.tokens + 1 < own:
        raise RequestRefused(
            "attention_invalid",
            f"An attention window of {asked.tokens} tokens: expected at least {own - 1}, what the"
            " model's own sliding windows read.",
        )
    shared, prompt = asked.shared_tokens(size), len(request.tokens)
    if request.prompt_logprobs is not None and prompt > shared:
        raise RequestRefused(
            "attention_with_prompt_logprobs",
            f"Logprobs of a prompt of {prompt} tokens under an attention window would not be the"
            f" model's: expected at most {shared} tokens, or no window.",
        )


def _check_size(core: CheckContext, request: Request) -> None:
    prompt = request.prompt_tokens
    total = prompt + max(request.max_tokens, request.resumed_tokens)
    if total > core.context_tokens:
        raise RequestRefused(
            "context_exceeded",
            f"The request needs {total} tokens ({prompt} of prompt, {request.max_tokens} of"
            f" max_tokens); this model's context is {core.context_tokens}.",
        )
    if request.samples > core.config.sequences_max:
        raise RequestRefused(
            "kv_exceeded",
            f"{request.samples} samples requested; at most {core.config.sequences_max} sequences"
            " run at once.",
        )
    grant = request.grant
    room = core.cache.max_sequence_tokens(grant.namespace, grant.quota)
    size, attention = core.cache.block_size, request.attention
    if attention is not None and attention.in_blocks(size).blocks_max * size <= room:
        return  # it never holds more, however long it is
    if total > room:
        raise RequestRefused(
            "kv_exceeded",
            f"The request needs cache memory for {total} tokens; this tenant may use {room}.",
        )


def _check_resumed(request: Request) -> None:
    """Refuse to resume what has no single next token, or no prompt."""
    if not request.resumed_tokens:
        return
    if request.samples > 1 or request.prompt_logprobs is not None or request.prompt_tokens < 1:
        raise RequestRefused(
            "answer_lost",
            f"A request with {request.resumed_tokens} resumed tokens of {len(request.tokens)}:"
            " expected a prompt before them, one sample and no logprobs of the prompt.",
        )
