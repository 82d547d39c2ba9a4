"""Prepare a parsed call for admission: token ids, admission context, caching contracts.

Requests that run and requests that are only quoted share this path. Preparation changes no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Concatenate, ParamSpec, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from engine.api import Retention
from gateway.caching import CacheScope, Contract, PrefixOrigin
from gateway.caching.attention import check_attention, with_default
from gateway.caching.namespaces import fidelity_of, namespace_of
from gateway.context import Context
from gateway.dialects.canonical import Call, Prompt, Rendered, Segment
from gateway.engines.served_models import ServedModel, ServedModels
from gateway.errors import TOO_LONG, Kind, Refusal
from gateway.generation.admission import AdmissionContext
from gateway.http.request_body import BodyShare, check_values
from gateway.ledger.query_pool import QueryPool
from gateway.levels.fidelity import check_fidelity
from gateway.preparation_pool import PreparationPool
from gateway.prompt import Renderer
from gateway.prompt.token_budget import UNLIMITED, TokenBudget, TooManyTokensError
from gateway.retention_classes import RESOURCE
from tenancy.accounts.cached_contents import CachedContentRecord, find_cached_content
from tenancy.types import ATTENTION_WORDS, Identity, WallClock

PARSED_BYTES_MAX = 65_536
"""Bodies up to this many bytes are parsed on the event loop, longer ones in a thread."""

INLINE_CHARS_MAX = 4_096
"""Calls up to this many characters are tokenized on the event loop. Longer ones are tokenized in a
thread, and so are calls with tools, each of which may need a rendering."""

SEGMENT_CHARS, PROMPT_CHARS = 32, 128
"""How many characters a segment and a prompt count as, however short they are."""

GROUP_CHARS = 65_536
"""Short prompts of one call are tokenized together, up to this many characters in one turn."""

CONTEXTS_MAX = 2
"""A prompt is tokenized up to this many times the model's context, so that the refusal of a prompt
that is somewhat too long, and a count, can name its exact length."""

CACHED_CHARS_MAX = 65_536
"""Of a chat up to this many characters only the text that is not in the tokenizer's cache counts:
cached text is returned at once, and a thread costs more."""

JOINED_CHARS_MAX = 4
"""Maximum number of characters that a tokenizer's normalizer joins into one (a letter and its
combining marks)."""


_token_ids = attrgetter("token_ids")
P = ParamSpec("P")
T = TypeVar("T")


class Prepared(Struct, frozen=True):
    """A call that is ready for admission."""

    model: ServedModel
    call: Call
    rendered: list[Rendered]
    contracts: list[Contract]
    now: AdmissionContext
    scope: CacheScope
    resource_tokens: int = 0
    """Prompt tokens of cached content."""

    @property
    def tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(map(len, map(_token_ids, self.rendered)))


PREFIX = "cachedContents/"


def retention_until(expires_ms: int, now_ms: int) -> Retention:
    """Return the retention of stored content: promised until it expires, reads do not extend it."""
    left_s = max(0.0, (expires_ms - now_ms) / 1000)
    return Retention(RESOURCE, left_s, left_s, "absolute", renewed_on_read=False, pinned=True)


class CachedContents:
    """Loads stored contents of one gateway."""

    def __init__(
        self,
        models: ServedModels,
        contents: QueryPool,
        wall: WallClock,
        preparations: PreparationPool,
    ) -> None:
        self._models, self._contents, self._wall = models, contents, wall
        self._preparations = preparations

    async def load(
        self, name: str, identity: Identity, share: BodyShare
    ) -> tuple[CachedContentRecord, Prompt]:
        """Load a live resource of this identity's workspace and its stored prompt.

        Runs in threads, because the database may be remote and the content large; its bytes are
        taken from `share` before they are decoded. Raises Refusal if the resource does not exist or
        belongs to another workspace, and without room; StoreError.
        """
        tenant_id = identity.tenant.tenant_id
        asked = tenant_id, identity.workspace, name.removeprefix(PREFIX), self._wall()
        found = await self._contents.ask(
            lambda store: find_cached_content(store, *asked), tenant_id
        )
        if found is None:
            message = f"Cached content not found: {name[:80]}."
            raise Refusal(
                Kind.PERMISSION, "cached_content_not_found", message, param="cachedContent"
            )
        record, content = found
        share.take(len(content))

        def decode(_is_abandoned: Callable[[], bool]) -> Prompt:
            return msgspec.msgpack.decode(content, type=Prompt)

        return record, await self._preparations.run(tenant_id, decode)

    async def expand(
        self, model: ServedModel, prompt: Prompt, identity: Identity, share: BodyShare
    ) -> tuple[Prompt, Retention]:
        """Return the full prompt and the retention of its stored part.

        Raises Refusal for content of another model than `model`: its tokens differ.
        """
        resource, stored = await self.load(prompt.resource, identity, share)
        owner = self._models.by_name.get(resource.model)
        if owner is not model:
            fact = "which is not served" if owner is None else f"not to {model.name}"
            message = f"The cached content belongs to the model {resource.model}, {fact}."
            raise Refusal(Kind.BAD, "invalid_value", message, param="cachedContent")
        return join_prompts(stored, prompt), retention_until(resource.expires_ms, self._wall())


def join_prompts(stored: Prompt, sent: Prompt) -> Prompt:
    """Join the stored prompt, with a breakpoint at its end, and the prompt that was sent."""
    start = with_breakpoint(stored)
    after = 1 + max((part.message for part in start.segments), default=-1)
    rest = tuple(_renumber(part, after) for part in sent.segments)
    return replace(
        sent,
        segments=start.segments + rest,
        tools=start.tools,
        tool_choice=start.tool_choice,
        resource="",
    )


def with_breakpoint(stored: Prompt) -> Prompt:
    """Add the breakpoint that keeps the content: after its last segment, or its last tool."""
    if stored.segments:
        last = replace(stored.segments[-1], retention=RESOURCE)
        return replace(stored, segments=(*stored.segments[:-1], last))
    tool = replace(stored.tools[-1], retention=RESOURCE)
    return replace(stored, tools=(*stored.tools[:-1], tool))


def _renumber(part: Segment, by: int) -> Segment:
    return replace(part, message=part.message + by)


class Preparation:
    """Prepares the calls of one gateway."""

    def __init__(self, gateway: Context) -> None:
        self._gateway = gateway
        self.contents = CachedContents(
            gateway.models, gateway.contents, gateway.wall, gateway.preparations
        )

    def check_model(self, name: str, identity: Identity) -> ServedModel:
        """Return the model that a request names. Raises Refusal if it is not served, or not to this
        tenant, which then sees no difference."""
        tenant = identity.tenant.name
        model = self._gateway.models.find(name, tenant)
        is_embedding = (
            self._gateway.embeddings is not None and name in self._gateway.embeddings.names
        )
        if model is None or (is_embedding and name not in model.names):
            if is_embedding:
                message = (
                    f"model: {name[:80]!r} is an embedding model; expected a chat model, or the"
                    " path /v1/embeddings."
                )
                raise Refusal(Kind.BAD, "model_not_supported", message, param="model")
            self._gateway.unserved.note(identity.tenant.tenant_id, name)
            found = [own for one in self._gateway.models.open_to(tenant) for own in one.names]
            names = ", ".join(found) or "none, as no model is open to this tenant"
            message = (
                f"Model not found: the model `{name[:80]}` does not exist; expected one of:"
                f" {names}."
            )
            raise Refusal(Kind.NOT_FOUND, "model_not_found", message, param="model")
        return model

    async def prepare(
        self,
        model: ServedModel,
        call: Call,
        identity: Identity,
        classes: Mapping[str, Retention] | None = None,
        share: BodyShare | None = None,
    ) -> Prepared:
        """Return the tokens and contracts of a call, with its cached content put before it.

        `classes`: retention classes of this call only. `share`: what cached content that the call
        names counts for; None for a call that names none. Raises Refusal, and EngineUnavailable
        while there is no engine.
        """
        held: set[str] = set()
        classes = dict(classes or {})
        prompts = []
        for prompt in call.prompts:
            if prompt.resource:
                assert share is not None, "a call that names cached content has a share of bodies"
                prompt, retention = await self.contents.expand(model, prompt, identity, share)
                classes[retention.name] = retention
                held.add(retention.name)
            prompts.append(prompt)
        call = replace(call, prompts=tuple(prompts)) if held else call
        rendered = await self.render(model, prompts, identity.tenant.tenant_id)
        longest = max(map(len, map(_token_ids, rendered)))
        # No await below: the counts read here are still valid when the call is admitted.
        now = self.admission(model, identity.tenant.tenant_id)
        if call.fidelity is not None:
            check_fidelity(call.fidelity, now.info.kv_fidelity, call.model)
        if call.attention is not None:
            check_attention(
                call.attention,
                now.info,
                call.model,
                prompt_tokens=longest,
                prompt_logprobs=call.generation.prompt_logprobs,
            )
        elif identity.policy.attention not in ATTENTION_WORDS:
            call = with_default(call, identity.policy.attention, now.info, longest)
        scope = scope_of(call, identity, now)
        contracts = [
            self._gateway.contracts.resolve(call, prompt, scope, classes, held)
            for prompt in rendered
        ]
        cached = 0
        if held:
            marks = [mark for prompt in rendered for mark in prompt.boundaries]
            cached = sum(mark.tokens for mark in marks if mark.retention in held)
        return Prepared(model, call, rendered, contracts, now, scope, cached)

    def admission(self, model: ServedModel, tenant_id: int) -> AdmissionContext:
        """Return the state that admission checks. Raises EngineUnavailable while there is no
        engine."""
        info = model.replicas.info
        if info is None or not model.replicas.ready():
            raise model.unavailable(is_alone=not self._gateway.models.are_several)
        return AdmissionContext(
            info=info,
            model_key=info.model_digest + model.suffix,
            stats=model.replicas.stats,
            limits=self._gateway.config.limits,
            template_digest=model.renderer.card.template_digest,
            model_stop_token_ids=model.renderer.card.stop_token_ids,
            running=self._gateway.running[tenant_id],
            waiting=model.waiting,
            promised_blocks_default=self._gateway.usage.promised_blocks_default(
                info, model.name, tenant_id
            ),
            quota_scale=model.quota_scale,
            on_device_default=self._gateway.usage.on_device_default(info, model.name, tenant_id),
        )

    async def parse(
        self,
        tenant_id: int,
        parse: Callable[Concatenate[bytes, P], T],
        body: bytes,
        *more: P.args,
        **named: P.kwargs,
    ) -> T:
        """Return `parse(body, …)`; a long body is parsed in a thread.

        Raises Refusal for a body of more than `server.body_values_max` values, before it is
        decoded, and what `parse` raises.
        """
        values_max = self._gateway.config.server.body_values_max
        if len(body) <= PARSED_BYTES_MAX:
            if len(body) > values_max:
                check_values(body, values_max)
            return parse(body, *more, **named)

        def work(_is_abandoned: Callable[[], bool]) -> T:
            check_values(body, values_max)
            return parse(body, *more, **named)

        return await self._gateway.preparations.run(tenant_id, work)

    async def render(
        self, model: ServedModel, prompts: Sequence[Prompt], tenant_id: int
    ) -> list[Rendered]:
        """Tokenize the prompts of a call; long ones in threads, so the event loop keeps serving.

        Raises Refusal, also for a prompt of more than `CONTEXTS_MAX` contexts.
        """
        renderer = model.renderer
        sizes, overhead = _measure(model, prompts)
        new_chars = sum(sizes)
        if overhead <= INLINE_CHARS_MAX and new_chars <= CACHED_CHARS_MAX:
            if new_chars > INLINE_CHARS_MAX and all(prompt.segments for prompt in prompts):
                new_chars = sum(map(renderer.uncached_chars, prompts, repeat(tenant_id)))
            if new_chars <= INLINE_CHARS_MAX:
                return list(map(renderer.render, prompts, repeat(tenant_id)))
        info = model.replicas.info
        context_tokens = None if info is None else info.context_tokens
        make = partial(_render_group, renderer, tenant_id, context_tokens)
        found: list[Rendered] = []
        for group in _groups(prompts, sizes):
            found += await self._gateway.preparations.run(tenant_id, partial(make, group))
        return found


def scope_of(call: Call, identity: Identity, now: AdmissionContext) -> CacheScope:
    """Return the scope whose prefixes a call may read and write."""
    fidelity = fidelity_of(identity, call.fidelity, now.info.kv_fidelity)
    key, template = now.model_key, now.template_digest
    tenant_id, attention = identity.tenant.tenant_id, call.attention
    return CacheScope(
        namespace=namespace_of(identity, key, template, call.partition, fidelity),
        # Written prefixes belong to a shared scope's owner; earlier prompts stay the tenant's own.
        tenant_id=tenant_id if identity.scope is None else identity.scope.owner_id,
        name=f"{tenant_id}/{identity.workspace}",
        classes=identity.policy.classes,
        origin=PrefixOrigin(tenant_id, key, template),
        default_class=identity.policy.default_class,
        fidelity=fidelity,
        attention=attention,
        shared_tokens=None if attention is None else attention.shared_tokens(now.info.block_size),
    )


def _measure(model: ServedModel, prompts: Sequence[Prompt]) -> tuple[list[int], int]:
    """Return the characters of each prompt that are tokenized, and how many characters would take
    as long as everything else: segments, schemas, tools. Raises Refusal for too long a prompt."""
    sizes, overhead = [], 0
    for prompt in prompts:
        chars = len(prompt.text or "")
        overhead += PROMPT_CHARS + len(prompt.output_format.schema)
        if prompt.prediction:
            overhead += INLINE_CHARS_MAX  # it is tokenized in a thread
        for segment in prompt.segments:
            chars += len(segment.text)
            overhead += SEGMENT_CHARS
            if segment.call is not None:
                chars += len(segment.call.arguments)
        for tool in prompt.tools:
            chars += len(tool.description) + len(tool.parameters)
            overhead += INLINE_CHARS_MAX  # each tool may need a rendering
        if chars > INLINE_CHARS_MAX:
            _check_size(model, chars, prompt)
        sizes.append(chars)
    return sizes, overhead


def _groups(prompts: Sequence[Prompt], sizes: Sequence[int]) -> Iterator[list[Prompt]]:
    """Divide the prompts into groups of at most `GROUP_CHARS`, or of one prompt."""
    group: list[Prompt] = []
    chars = 0
    for prompt, size in zip(prompts, sizes, strict=True):
        if group and chars + size > GROUP_CHARS:
            yield group
            group, chars = [], 0
        group.append(prompt)
        chars += size
    yield group


def _render_group(
    renderer: Renderer,
    tenant_id: int,
    context_tokens: int | None,
    prompts: Sequence[Prompt],
    is_abandoned: Callable[[], bool],
) -> list[Rendered]:
    """Render prompts one after another, until the client leaves."""
    found = []
    for prompt in prompts:
        most = UNLIMITED if context_tokens is None else CONTEXTS_MAX * context_tokens
        budget = TokenBudget(most, is_abandoned)
        try:
            one = renderer.render(prompt, tenant_id, budget)
        except TooManyTokensError as error:
            raise Refusal(
                Kind.BAD,
                "context_length_exceeded",
                f"The request is too long: this model's context is {context_tokens} tokens, and the"
                f" prompt has more than {error.tokens - 1} tokens.",
                param=prompt.field,
            ) from None
        if prompt.prediction:
            budget = TokenBudget(context_tokens or UNLIMITED, is_abandoned)
            one = replace(one, prediction=_predict(renderer, prompt, tenant_id, budget))
        found.append(one)
    return found


def _predict(
    renderer: Renderer, prompt: Prompt, tenant_id: int, budget: TokenBudget
) -> tuple[int, ...]:
    """Return the tokens of a prompt's prediction, plain text. Raises Refusal for more than the
    model's context."""
    try:
        return renderer.encode_text(prompt.prediction, "prediction", tenant_id, budget)
    except TooManyTokensError as error:
        message = f"prediction: more than {error.most} tokens; expected at most the model's context"
        message = f"{message}, {error.most} tokens."
        raise Refusal(Kind.BAD, "invalid_value", message, param="prediction") from None


def _check_size(model: ServedModel, chars: int, prompt: Prompt) -> None:
    """Refuse a prompt that cannot fit however it is tokenized, before it reaches a thread.

    A token has at most as many characters as the longest token has bytes; normalization may join a
    few characters into one.
    """
    info = model.replicas.info
    if info is None:
        return
    token_chars_max = model.renderer.token_bytes_max * JOINED_CHARS_MAX
    chars_max = info.context_tokens * token_chars_max
    if chars > chars_max:
        message = (
            f"This model's maximum context length is {info.context_tokens} tokens, which hold at"
            f" most {chars_max} characters, and the prompt has {chars}."
        )
        size = -(-chars // token_chars_max), info.context_tokens
        raise Refusal(Kind.BAD, TOO_LONG, message, param=prompt.field, size=size)
