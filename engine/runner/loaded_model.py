"""A loaded model: its runner, and the facts that core and the gateway need about it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.kv.format import KvFormat
from engine.kv.storage import KvStorage
from engine.model_store import Architecture
from engine.plan import Runner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    runner: Runner
    kv: KvStorage
    """The memory of the KV blocks."""
    context: int
    """Tokens of the longest sequence."""
    pipeline_depth: int
    """Steps that may be in flight at once."""
    attention_lacks: str = ""
    """Why the runner computes no attention windows, empty if it does."""

    @property
    def kv_format(self) -> KvFormat:
        """Format of a block."""
        return self.kv.format

    @property
    def blocks(self) -> int:
        """Blocks of the KV memory."""
        return len(self.kv.data)

    @property
    def device(self) -> str:
        """Type of the device that has the KV: "cpu" or "cuda"."""
        return self.kv.data.device.type


def context_of(model: Architecture, config: EngineConfig) -> int:
    """Return the tokens of the longest sequence that an engine serves of a model."""
    return min(model.context, config.context_tokens_max or model.context)


def blocks_of(form: KvFormat, config: EngineConfig) -> int:
    """Return the blocks of an engine's KV memory: `kv_blocks`, or what `kv_memory_mib` holds."""
    return config.kv_blocks or max(1, config.kv_memory_mib * 2**20 // form.block_bytes)
