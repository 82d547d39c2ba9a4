"""Prepare a parsed call for admission: token ids, admission context, caching contracts.

Requests that run and requests that are only quoted share this path. Preparation changes no state;
`gateway.generation.generation` and the quote handler call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from engine.api import Retention
from engine.errors import EngineUnavailable
from gateway.caching import CacheScope, Contract, PrefixOrigin
from gateway.caching.namespaces import namespace_of
from gateway.context import Context
from gateway.dialects.canonical import Call, Prompt, Rendered
from gateway.errors import TOO_LONG, Kind, Refusal
from gateway.generation.admission import AdmissionContext
from gateway.generation.cached_contents import expand_cached_content
from tenancy.types import Identity

INLINE_CHARS_MAX = 4_096
"""Prompts up to this many characters are tokenized on the event loop. Longer ones are tokenized in
a thread, and so are prompts with tools, each of which may need a rendering."""

CACHED_CHARS_MAX = 65_536
"""Of a chat up to this many characters only the text that is not in the tokenizer's cache counts:
cached text is returned at once, and a thread costs more."""

JOINED_CHARS_MAX = 4
"""Maximum number of characters that a tokenizer's normalizer joins into one (a letter and its
combining marks)."""


class Prepared(Struct, frozen=True):
    """A call that is ready for admission. `resource_tokens`: prompt tokens of cached content."""

    call: Call
    rendered: list[Rendered]
    contracts: list[Contract]
    now: AdmissionContext
    scope: CacheScope
    resource_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt.token_ids) for prompt in self.rendered)


def check_model(gateway: Context, call: Call) -> None:
    """Check that the model is served. Raises Refusal if it is not."""
    if call.model != gateway.model and call.model not in gateway.model_names:
        names = ", ".join(gateway.model_names)
        name = call.model[:80]
        message = f"Model not found: the model `{name}` does not exist; expected one of: {names}."
        raise Refusal(Kind.NOT_FOUND, "model_not_found", message, param="model")


async def prepare(
    gateway: Context,
    call: Call,
    identity: Identity,
    classes: Mapping[str, Retention] | None = None,
) -> Prepared:
    """Return the tokens and contracts of a call, with its cached content put before it.

    `classes`: retention classes of this call only. Raises Refusal, and EngineUnavailable while
    there is no engine.
    """
    held: set[str] = set()
    classes = dict(classes or {})
    prompts = []
    for prompt in call.prompts:
        if prompt.resource:
            whole, retention = await expand_cached_content(gateway, prompt, identity)
            prompt = whole
            classes[retention.name] = retention
            held.add(retention.name)
        prompts.append(prompt)
    call = replace(call, prompts=tuple(prompts)) if held else call
    rendered = [await render(gateway, prompt) for prompt in prompts]
    # No await below: the counts read here are still valid when the call is admitted.
    now = admission_context(gateway, identity.tenant.tenant_id)
    scope = scope_of(call, identity, now)
    contracts = [
        gateway.contracts.resolve(call, prompt, scope, classes, held) for prompt in rendered
    ]
    cached = 0
    if held:
        marks = [mark for prompt in rendered for mark in prompt.boundaries]
        cached = sum(mark.tokens for mark in marks if mark.retention in held)
    return Prepared(call, rendered, contracts, now, scope, cached)


def scope_of(call: Call, identity: Identity, now: AdmissionContext) -> CacheScope:
    """Return the scope whose prefixes a call may read and write."""
    namespace = namespace_of(identity, now.info.model_digest, now.template_digest, call.partition)
    tenant_id = identity.tenant.tenant_id
    # Written prefixes belong to the shared scope's owner; a tenant's earlier prompts stay its own.
    owner_id = tenant_id if identity.scope is None else identity.scope.owner_id
    name = f"{tenant_id}/{identity.workspace}"
    origin = PrefixOrigin(tenant_id, now.info.model_digest, now.template_digest)
    return CacheScope(namespace, owner_id, name, identity.policy.classes, origin)


def admission_context(gateway: Context, tenant_id: int) -> AdmissionContext:
    """Return the state that admission checks. Raises EngineUnavailable while there is no engine."""
    info = gateway.engine.info
    if info is None or not gateway.engine.ready():
        raise EngineUnavailable("not_ready", "The engine is starting.", 2.0)
    return AdmissionContext(
        info=info,
        stats=gateway.engine.stats,
        limits=gateway.config.limits,
        template_digest=gateway.renderer.template_digest,
        model_stop_token_ids=gateway.renderer.stop_token_ids,
        running=gateway.running[tenant_id],
        waiting=gateway.waiting,
        promised_blocks_default=gateway.promised_blocks_default(),
    )


async def render(gateway: Context, prompt: Prompt) -> Rendered:
    """Tokenize a prompt; a long one in a thread, so the event loop keeps serving."""
    chars = len(prompt.text or "")
    for segment in prompt.segments:
        chars += len(segment.text)
        if segment.call is not None:
            chars += len(segment.call.arguments)
    for tool in prompt.tools:
        chars += len(tool.description) + len(tool.parameters)
    _check_size(gateway, chars, prompt)
    if INLINE_CHARS_MAX < chars <= CACHED_CHARS_MAX and prompt.segments and not prompt.tools:
        chars = gateway.renderer.uncached_chars(prompt)
    if chars <= INLINE_CHARS_MAX and not prompt.tools:
        return gateway.renderer.render(prompt)
    return await asyncio.to_thread(gateway.renderer.render, prompt)


def _check_size(gateway: Context, chars: int, prompt: Prompt) -> None:
    """Refuse a prompt that cannot fit however it is tokenized: tokenizing 9 MB takes half a minute.

    A token stands for at most as many characters as the longest token has bytes; normalization may
    join a few characters into one.
    """
    info = gateway.engine.info
    if info is None:
        return
    token_chars_max = gateway.token_bytes_max * JOINED_CHARS_MAX
    chars_max = info.context_tokens * token_chars_max
    if chars > chars_max:
        message = (
            f"This model's maximum context length is {info.context_tokens} tokens, which hold at"
            f" most {chars_max} characters, and the prompt has {chars}."
        )
        size = -(-chars // token_chars_max), info.context_tokens
        raise Refusal(Kind.BAD, TOO_LONG, message, param=prompt.field, size=size)
