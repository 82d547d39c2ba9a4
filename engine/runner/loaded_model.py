"""What loading a model gives: a runner, and what core and the gateway must know of it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.storage import KvFormat
from engine.plan import Runner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`pipeline_depth`: steps that may be in flight at once."""

    runner: Runner
    form: KvFormat
    blocks: int
    context: int
    device: str
    pipeline_depth: int
