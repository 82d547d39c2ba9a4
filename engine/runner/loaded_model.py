"""A loaded model: its runner, and the facts that core and the gateway need about it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kv.format import KvFormat
from engine.kv.storage import KvPool
from engine.model_store import Architecture
from engine.plan import Runner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    runner: Runner
    kv: KvPool
    """The memory of the KV blocks."""
    context: int
    """Tokens of the longest sequence."""
    pipeline_depth: int
    """Steps that may be in flight at once."""
    attention_lacks: str = ""
    """Why the runner computes no attention windows, empty if it does."""
    state_blocks: int = 0
    """Blocks that a kept state of recurrent layers takes; 0 for a model that keeps none."""
    draft_step_s: tuple[float, ...] = ()
    """Seconds of steps of 1, 2, 3… tokens; empty if the runner verifies no drafts."""

    @property
    def kv_format(self) -> KvFormat:
        """Format of a block."""
        return self.kv.format

    @property
    def blocks(self) -> int:
        """Blocks of the KV memory."""
        return len(self.kv.shards[0].data)

    @property
    def device(self) -> str:
        """Type of the device that has the KV: "cpu" or "cuda"."""
        return self.kv.shards[0].data.device.type


def context_of(model: Architecture, config: EngineConfig) -> int:
    """Return the tokens of the longest sequence that an engine serves of a model."""
    return min(model.context, config.context_tokens_max or model.context)


def blocks_of(form: KvFormat, config: EngineConfig, beside_bytes: int = 0) -> int:
    """Return the blocks of an engine's KV memory: `kv_blocks`, or what `kv_memory_mib` holds beside
    so many bytes of running sequences' states; at least one."""
    left = config.kv_memory_mib * 2**20 - beside_bytes
    return config.kv_blocks or max(1, left // form.block_bytes)


def check_room_for_states(
    model: Architecture, state_blocks: int, form: KvFormat, config: EngineConfig,
    beside_bytes: int = 0,
) -> None:  # fmt: skip
    """Raise ModelError `no_memory` where a pool has no room for a kept state beside a sequence.
    `state_blocks`: of a kept state; `beside_bytes`: see `blocks_of`."""
    blocks, least = blocks_of(form, config, beside_bytes), state_blocks + 2
    if not state_blocks or blocks >= least:
        return
    if config.kv_blocks:
        raise ModelError(
            "no_memory",
            f"engine.kv_blocks is {config.kv_blocks}; a state of {model.family} takes"
            f" {state_blocks}: expected at least {least}",
        )
    beside_mib = -(-beside_bytes // 2**20)
    mib = -(-(beside_bytes + least * form.block_bytes) // 2**20)
    running = ""
    if beside_bytes:
        running = f", of which states of {config.sequences_max} running sequences take {beside_mib}"
    raise ModelError(
        "no_memory",
        f"engine.kv_memory_mib is {config.kv_memory_mib}{running}; a state of {model.family} that"
        f" is kept takes {state_blocks} blocks: expected at least {mib}"
        + (", or a lower engine.sequences_max" if beside_bytes else ""),
    )
