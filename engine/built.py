"""What loading a model gives: a runner, and what core and the gateway must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.kv_storage import KvFormat
from engine.plan import StepPlan, StepResult


class BuiltRunner(Protocol):
    """`engine.core.Runner`, as the floor below core may name it."""

    def launch(self, plan: StepPlan) -> None:
        """Start a step."""

    def collect(self) -> StepResult:
        """Wait for the oldest one."""


@dataclass(frozen=True, slots=True)
class Built:
    """`pipeline_depth`: steps that may be in flight at once."""

    runner: BuiltRunner
    form: KvFormat
    blocks: int
    context: int
    device: str
    pipeline_depth: int
