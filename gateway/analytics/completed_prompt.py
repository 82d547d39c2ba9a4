"""What analytics get of each finished prompt. `gateway.generation.outcome` makes it."""

from __future__ import annotations

from msgspec import Struct

from gateway.dialects.canonical import Rendered, UsageRecord
from tenancy.reuse.prompt_changes import ToolDigest


class PromptContext(Struct, frozen=True, array_like=True, gc=False):
    """Where and when a prompt ran."""

    request_id: str
    namespace: bytes
    epoch: str
    started_s: float
    """When the engine took it, on the gateway's clock."""
    is_unmarked: bool
    """Its dialect reads nothing without breakpoints, and it has none."""
    min_tokens: int
    """Shorter prefixes are not read."""
    losses: dict[str, int] | None
    """Blocks that the namespace has lost, by cause; None for a prompt that was cached."""
    level_miss: str = ""
    """Why a level below the device did not bring what it had."""
    tools: tuple[ToolDigest, ...] = ()
    head: int = 0
    """The digest of its beginning, the same under every model."""
    quota_scale: float = 1.0
    """What a tenant's floor and ceiling are multiplied by in the model's cache."""
    is_broken_by_death: bool = False
    """It read a promise that ended with its engine."""


class CompletedPrompt(Struct, frozen=True, array_like=True, gc=False):
    """One prompt of a finished request."""

    tenant_id: int
    model: str
    record: UsageRecord
    prompt: Rendered
    first_token_s: float | None
    missed: str
    """Why its contract read less than was asked for; "" if it did not."""
    ending: str
    missed_tokens: int = 0
    """Tokens of the longest prefix written before that were not read, because of `missed`."""
    is_further: bool = False
    """Another prompt of the request was noted before; the request counts once, as in the ledger."""
    ignored: tuple[str, ...] = ()
    """Labels of the request's fields that had no effect."""
    context: PromptContext | None = None
    """Without it, no miss of the prompt is explained."""
