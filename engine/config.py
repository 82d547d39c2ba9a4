"""The engine's settings: one strict struct, made from the gateway's TOML and passed by value.

It reads no file and no environment. Field names end with their unit.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one engine.

    `kv_memory_mib`: device memory for KV blocks; `kv_blocks` overrides it when not 0.
    `step_tokens_max`: the token budget of one step. `prefill_chunk_tokens_max`: the longest slice
    of one prompt in a step; 0: as long as the step allows. `gap_target_ms`: the longest time
    between two tokens of a stream that prompts of other requests may cause: a step gets as many
    prompt tokens as its measured cost allows. `threads` 0: one per core.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    kv_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    block_size: Literal[16] = 16
    kv_memory_mib: Positive = 512
    kv_blocks: Annotated[int, Meta(ge=0)] = 0
    context_tokens_max: Annotated[int, Meta(ge=0)] = 0
    step_tokens_max: Positive = 2048
    prefill_chunk_tokens_max: Annotated[int, Meta(ge=0)] = 0
    gap_target_ms: Annotated[float, Meta(gt=0)] = 50.0
    sequences_max: Positive = 64
    queue_requests_max: Positive = 512
    queue_tokens_max: Positive = 1_000_000
    preemptions_max: Positive = 3
    threads: Annotated[int, Meta(ge=0)] = 0
    heartbeat_s: Annotated[float, Meta(gt=0)] = 0.5
    step_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    check_interval_s: Annotated[float, Meta(gt=0)] = 600.0
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 60.0
