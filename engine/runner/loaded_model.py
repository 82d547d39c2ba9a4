"""A loaded model: its runner, and the facts that core and the gateway need about it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.format import KvFormat
from engine.kv.storage import KvStorage
from engine.plan import Runner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`blocks`: KV blocks. `context`: tokens of the longest sequence. `pipeline_depth`: steps that
    may be in flight at once. `kv`: the memory of the blocks, where the CPU reaches it.
    `attention_lacks`: why the runner computes no attention windows, empty where it does."""

    runner: Runner
    kv_format: KvFormat
    blocks: int
    context: int
    device: str
    pipeline_depth: int
    kv: KvStorage | None = None
    attention_lacks: str = ""
