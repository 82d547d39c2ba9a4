"""Say where two request bodies part, and why: with the real parser, chat template and tokenizer.

The texts stay on the machine of the caller; the result names fields and positions. The module knows
no engine and no database; `trunkline check-prompt` calls it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from gateway.analytics.prompt_findings import prompt_parts
from gateway.analytics.tool_digests import digests_of
from gateway.dialects.canonical import Call, Prompt, Rendered, path_behind
from gateway.dialects.families import parse_as
from gateway.dialects.tolerance import Mode
from gateway.errors import Kind, Refusal
from gateway.prompt import Renderer
from tenancy.reuse.prompt_changes import (
    REPEATED_SHARE_MIN,
    ChangeCause,
    Divergence,
    ObservedPrompt,
    PromptChanges,
    common_prefix,
)

OF_HEADS = frozenset({"system_changes", "tools_changed", "tools_reordered"})
SHORT_TOKENS = 512
"""Up to so many tokens are compared one by one."""
RUN_TOKENS_MIN = 4
"""Tokens in a row that are the same by no chance."""

_KEY = 0  # digests of one comparison, which leave no trace


class PromptDifference(Struct, frozen=True):
    """How much of the second prompt a cache has after the first, and where they part.

    `path` and `other_path`: the field of the second and of the first request that holds the first
    difference; `character` its place in the second one's text, or None if not both have a text, and
    `token` its place in the prompt, both counted from 0.
    """

    first_tokens: int
    second_tokens: int
    shared_tokens: int
    cause: str = ""
    """As of findings; `model` or `partition` if nothing can be shared; "messages" if the prompts
    differ where requests usually do; "" if the second prompt continues or repeats the first."""
    reason: str = ""
    path: str = ""
    other_path: str = ""
    character: int | None = None
    token: int | None = None
    repeated_tokens: int = 0
    """Tokens behind the difference that the first prompt also has there."""

    @property
    def shared_share(self) -> float:
        """The part of the second prompt that need not be computed, from 0 to 1."""
        return self.shared_tokens / self.second_tokens if self.second_tokens else 1.0


def compare_prompts(
    renderer: Renderer,
    first: bytes,
    second: bytes,
    dialect: str,
    tolerance: Mode = "standard",
    *,
    separates_cache_key: bool = False,
) -> PromptDifference:
    """Compare two request bodies. CPU-bound: about 1 ms per 1,000 words. Raises Refusal for a body
    that the server would refuse, or that depends on what the server has stored.
    `separates_cache_key`: as of `RequestMetadata`."""
    parse = partial(_parse, dialect, renderer.card.name, tolerance, separates_cache_key)
    calls = [parse(body) for body in (first, second)]
    prompts = [_only_prompt(call) for call in calls]
    before, after = (renderer.render(prompt) for prompt in prompts)
    sizes = len(before.token_ids), len(after.token_ids)
    for name in ("model", "partition"):
        if getattr(calls[0], name) != getattr(calls[1], name):
            reason = f"the requests differ in their {name}: they share nothing"
            return PromptDifference(*sizes, 0, name, reason, token=0)
    shared = common_prefix(before.token_ids, after.token_ids)
    if shared == min(sizes):
        return PromptDifference(*sizes, shared)
    found = _divergence(before, after, prompts)
    if found is not None and not found.is_repetition and found.cause in OF_HEADS:
        found = _looked_at_closely(found, before.token_ids[shared:], after.token_ids[shared:])
    path, other_path = _path_at(after, shared), _path_at(before, shared)
    character = _common_characters(prompts[1], path, prompts[0], other_path)
    cause, reason = _why(found)
    repeated = found.repeated if found is not None and found.is_repetition else 0
    return PromptDifference(
        *sizes,
        shared_tokens=shared,
        cause=cause,
        reason=reason,
        path=path,
        other_path=other_path,
        character=character,
        token=shared,
        repeated_tokens=min(repeated, sizes[1] - shared),
    )


def _parse(name: str, model: str, tolerance: Mode, separates_cache_key: bool, body: bytes) -> Call:
    call = parse_as(name, model, tolerance, body, separates_cache_key=separates_cache_key)
    if call.thread.is_pending:
        message = "The request continues a stored response; expected all messages in its body."
        raise Refusal(Kind.BAD, "invalid_value", message, param="previous_response_id")
    return call


def _only_prompt(call: Call) -> Prompt:
    if len(call.prompts) != 1:
        message = f"prompt: {len(call.prompts)} prompts; expected one."
        raise Refusal(Kind.BAD, "invalid_value", message, param="prompt")
    prompt = call.prompts[0]
    if prompt.resource:
        message = "The request uses stored cached content; expected the text itself in the body."
        raise Refusal(Kind.BAD, "invalid_value", message, param="cachedContent")
    return prompt


def _divergence(before: Rendered, after: Rendered, prompts: Sequence[Prompt]) -> Divergence | None:
    changes = PromptChanges(_KEY)
    found = None
    for at_s, (prompt, asked) in enumerate(zip((before, after), prompts, strict=True)):
        count = len(prompt.token_ids)
        observed = ObservedPrompt(
            data=struct.pack(f"{count}I", *prompt.token_ids),
            parts=prompt_parts(prompt.boundaries, count),
            total=count,
            cached=0,
            started_s=at_s,
            ended_s=at_s,
            tools=digests_of(asked.tools),
        )
        found = changes.note(b"", observed).divergence
    return found


def _looked_at_closely(
    found: Divergence, before: Sequence[int], after: Sequence[int]
) -> Divergence:
    """Return the divergence of short prompts, token by token: digests of twelve tokens in a row
    tell nothing of a text of two lines. `before`, `after`: from the first difference on."""
    if max(len(before), len(after)) > SHORT_TOKENS:
        return found
    blocks = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    repeated = sum(block.size for block in blocks if block.size >= RUN_TOKENS_MIN)
    is_repetition = repeated >= REPEATED_SHARE_MIN * len(after)
    return replace(found, repeated=repeated, is_repetition=True) if is_repetition else found


def _path_at(prompt: Rendered, token: int) -> str:
    """Return the field that holds the token of this number; "" behind the last one."""
    return path_behind(prompt.boundaries, token) if prompt.boundaries else "prompt"


def _common_characters(one: Prompt, path: str, other: Prompt, other_path: str) -> int | None:
    """Return how many first characters the texts of two fields have in common; None without a text
    in both."""
    text, other_text = _text_of(one, path), _text_of(other, other_path)
    if text is None or other_text is None:
        return None
    return common_prefix(text, other_text)


def _text_of(prompt: Prompt, path: str) -> str | None:
    if path == "prompt":
        return prompt.text
    for segment in prompt.segments:
        if segment.path == path and segment.call is None:
            return segment.text
    for tool in prompt.tools:
        if tool.path == path:
            return json.dumps([tool.name, tool.description, tool.parameters], ensure_ascii=False)
    return None


def _why(found: Divergence | None) -> tuple[str, str]:
    """Return the cause and the reason of a difference."""
    if found is None or not found.is_repetition:
        tier = "" if found is None else found.cause
        if tier == "system_changes":
            return tier, "the system message differs"
        if tier.startswith("tools"):
            return tier, "the tools differ"
        return "messages", "the messages differ"
    stays = f"{found.repeated:,} tokens that stay the same"
    if found.cause == "history_edited" and found.is_shortened:
        return found.cause, f"messages are left out before {stays}"
    return found.cause, _REASONS[found.cause].format(stays=stays)


_REASONS: Mapping[ChangeCause, str] = {
    "system_changes": "the system message changes before {stays}; put what changes behind them",
    "tools_reordered": "the same tools, or their fields, come in another order; sort them",
    "tools_changed": "the tools change before {stays}; send the same tools always",
    "history_edited": "an earlier message is changed before {stays}; send it back unchanged",
    "prompt_changes": "the message changes before {stays}; put these first",
}
