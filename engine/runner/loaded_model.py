"""A loaded model: its runner, and the facts that core and the gateway need about it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.format import KvFormat
from engine.kv.storage import KvStorage
from engine.plan import Runner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`kv`: the memory of the KV blocks, `blocks` of them. `context`: tokens of the longest
    sequence. `pipeline_depth`: steps that may be in flight at once. `attention_lacks`: why the
    runner computes no attention windows, empty where it does."""

    runner: Runner
    kv: KvStorage
    blocks: int
    context: int
    device: str
    pipeline_depth: int
    attention_lacks: str = ""

    @property
    def kv_format(self) -> KvFormat:
        """Return the format of a block."""
        return self.kv.format
