"""From a parsed call to what the engine is asked: tokens, circumstances, contracts.

What runs and what is only quoted go the same way up to here. It changes nothing; handlers call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from engine.api import Retention
from engine.errors import EngineUnavailable
from gateway.caching import CacheScope, Contract, Origin
from gateway.caching.namespaces import namespace_of
from gateway.context import Context
from gateway.dialects.canonical import Call, Prompt, Rendered
from gateway.errors import Kind, Refusal
from gateway.generation.admission import AdmissionContext
from gateway.generation.cached_contents import expand
from tenancy.types import Identity

INLINE_SIGNS_MAX = 4_096
"""Prompts up to this long are tokenized on the event loop; longer ones in a thread, and those with
tools, each of which may take a rendering of its own."""

KNOWN_SIGNS_MAX = 65_536
"""Of a chat up to this long only what was not tokenized lately counts: the rest is there at once,
and a thread costs more than it."""

JOINED_SIGNS_MAX = 4
"""How many characters a tokenizer's normalizer may make one of (a letter and its marks)."""


class Prepared(Struct, frozen=True):
    """A call that is ready to be admitted. `resource_tokens`: of the prompts, cached content."""

    call: Call
    rendered: list[Rendered]
    contracts: list[Contract]
    now: AdmissionContext
    scope: CacheScope
    resource_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.rendered)


def check_model(gateway: Context, call: Call) -> None:
    """Raises Refusal for a model that is not here."""
    if call.model != gateway.model and call.model not in gateway.model_names:
        names = ", ".join(gateway.model_names)
        message = f"There is no such model here; there is: {names}."
        raise Refusal(Kind.NOT_FOUND, "model_not_found", message, param="model")


async def prepare(
    gateway: Context,
    call: Call,
    identity: Identity,
    classes: Mapping[str, Retention] | None = None,
) -> Prepared:
    """Tokens and contracts of a call, its cached content put before it.

    `classes`: retention classes of this call alone. Raises Refusal, and EngineUnavailable without
    an engine.
    """
    held: set[str] = set()
    classes = dict(classes or {})
    prompts = []
    for prompt in call.prompts:
        if prompt.resource:
            whole, retention = await expand(gateway, prompt, identity)
            prompt = whole
            classes[retention.name] = retention
            held.add(retention.name)
        prompts.append(prompt)
    call = replace(call, prompts=tuple(prompts)) if held else call
    rendered = [await render(gateway, prompt) for prompt in prompts]
    # After the last wait: what is counted now still holds when the call is admitted.
    now = circumstances(gateway, identity.tenant.tenant_id)
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
    """Whose prefixes a call may read and write."""
    namespace = namespace_of(identity, now.info.model_digest, now.template_digest, call.partition)
    tenant_id = identity.tenant.tenant_id
    # What was agreed is the scope's; what a tenant sent before is its own, and nobody else's.
    owner_id = tenant_id if identity.scope is None else identity.scope.owner_id
    name = f"{tenant_id}/{identity.workspace}"
    origin = Origin(tenant_id, now.info.model_digest, now.template_digest)
    return CacheScope(namespace, owner_id, name, identity.policy.classes, origin)


def circumstances(gateway: Context, tenant_id: int) -> AdmissionContext:
    """What admission looks at. Raises EngineUnavailable while there is no engine."""
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
    )


async def render(gateway: Context, prompt: Prompt) -> Rendered:
    """Tokens of a prompt; long ones in a thread, so that the loop keeps serving others."""
    signs = len(prompt.text or "")
    for segment in prompt.segments:
        signs += len(segment.text)
        if segment.call is not None:
            signs += len(segment.call.arguments)
    for tool in prompt.tools:
        signs += len(tool.description) + len(tool.parameters)
    _check_signs(gateway, signs, prompt)
    if INLINE_SIGNS_MAX < signs <= KNOWN_SIGNS_MAX and prompt.segments and not prompt.tools:
        signs = gateway.renderer.uncached_chars(prompt)
    if signs <= INLINE_SIGNS_MAX and not prompt.tools:
        return gateway.renderer.render(prompt)
    return await asyncio.to_thread(gateway.renderer.render, prompt)


def _check_signs(gateway: Context, signs: int, prompt: Prompt) -> None:
    """Refuse what cannot fit, however it is tokenized: counting 9 MB of words takes half a minute.

    A token stands for at most as many signs as the longest has bytes; normalizing may join a few.
    """
    info = gateway.engine.info
    if info is None:
        return
    signs_max = info.context_tokens * gateway.token_bytes_max * JOINED_SIGNS_MAX
    if signs > signs_max:
        message = (
            f"The request is too long: this model's context is {info.context_tokens} tokens, which"
            f" never hold more than {signs_max} characters, and the prompt has {signs}."
        )
        raise Refusal(Kind.BAD, "context_length_exceeded", message, param=prompt.field)
