"""Admission is pure, so every edge case is one call."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.api import AT_REST, AtRest, Grammar, Request, Sampling
from engine.statistics import Stats
from gateway.caching.namespaces import namespace_of
from gateway.config import LimitsConfig
from gateway.dialects.canonical import Boundary, Call, GenerationParameters, Prompt, Rendered
from gateway.engines.waiting_requests import WaitingBounds, WaitingRequests
from gateway.errors import Kind, Refusal
from gateway.generation.admission import AdmissionContext, admit, retry_after_s
from tenancy.types import CachePolicy, Fidelity, Identity, SharedScope, Tenant
from tests.fakes import ENGINE_INFO
from tests.tables import each_row

NOW = AdmissionContext(
    model_key="m",
    info=ENGINE_INFO,
    stats=Stats(),
    limits=LimitsConfig(output_tokens_default=20, requests_per_tenant_max=3, choices_max=4),
    template_digest="t",
    model_stop_token_ids=(2,),
    running=0,
    waiting=WaitingRequests(WaitingBounds(8, 1_000_000)),
)


ROOMY = msgspec.structs.replace(ENGINE_INFO, context_tokens=65_536, blocks=8_192)
NOW_ROOMY = msgspec.structs.replace(NOW, info=ROOMY)


def waiting(*calls: tuple[int, float, list[int]], requests_max: int = 8) -> WaitingRequests:
    """Return the waiting requests of calls, each (tenant id, weight, tokens of its prompts)."""
    found = WaitingRequests(WaitingBounds(requests_max, 1_000_000))
    for tenant_id, weight, tokens in calls:
        found.enter(tenant_id, weight, tokens)
    return found


def identity(tenant_id: int = 1, workspace: str = "default", **policy: object) -> Identity:
    tenant = Tenant(tenant_id, "ada", "active", 0)
    return Identity(tenant, workspace, 1, 1, CachePolicy(**policy))  # type: ignore[arg-type]


def ask(
    tokens: tuple[int, ...] = (1, 2, 3),
    *,
    now: AdmissionContext = NOW,
    who: Identity | None = None,
    prompts: int = 1,
    partition: str = "",
    priority: int = 0,
    **generation: object,
) -> tuple[Request, ...]:
    call = Call(
        model="m",
        prompts=(Prompt(token_ids=tokens),) * prompts,
        generation=GenerationParameters(**generation),  # type: ignore[arg-type]
        partition=partition,
        priority=priority,
    )
    who = who or identity()
    namespace = namespace_of(who, now.info.model_digest, now.template_digest, partition)
    rendered = [Rendered(tokens)] * prompts
    return admit(call, rendered, who, "id", now, namespace, [()] * prompts)


def admitted(
    call: Call, *rendered: Rendered, who: Identity, now: AdmissionContext = NOW
) -> Request:
    """Return the request of a call's first prompt."""
    return admit(call, rendered, who, "id", now, b"namespace", [()] * len(rendered))[0]


def test_checks_only_client_token_ids() -> None:
    """The engine checks every id; admission checks those of a client, to name the field before
    anything is held."""
    call = Call("m", (Prompt(text="a"),), GenerationParameters())

    request = admitted(call, Rendered((ENGINE_INFO.vocab_size,)), who=identity())

    assert request.tokens == (ENGINE_INFO.vocab_size,)


def test_each_request_marks_where_its_client_may_come_back() -> None:
    """A model with recurrent layers keeps states there; the engine knows no messages."""
    call = Call("m", (Prompt(),), GenerationParameters())
    boundaries = (Boundary(2, "m[0]", tier="system", role="system"), Boundary(5, "m[1]"))

    request = admitted(call, Rendered((1,) * 7, boundaries), who=identity())

    assert request.marks == (5, 2)


def test_each_request_has_its_prompts_grammar() -> None:
    grammar = Grammar("json_object")
    call = Call("m", (Prompt(), Prompt()), GenerationParameters())
    rendered = [Rendered((1,), grammar=grammar), Rendered((1,))]

    first, second = admit(call, rendered, identity(), "id", NOW, b"namespace", [(), ()])

    assert (first.grammar, second.grammar) == (grammar, None)


def test_grant_has_the_requests_fidelity_and_where_its_kv_may_rest() -> None:
    """Of a shared scope, what its owner and the member both allow."""
    call = Call("m", (Prompt(),), GenerationParameters())

    def member(at_rest: AtRest, owners: AtRest) -> Identity:
        owner = SharedScope(1, "docs", 2, CachePolicy(at_rest=owners))
        return msgspec.structs.replace(identity(fidelity="near", at_rest=at_rest), scope=owner)

    def grant(who: Identity, asked: Fidelity | None = None) -> tuple[str, str]:
        one = msgspec.structs.replace(call, fidelity=asked)
        request = admitted(one, Rendered((1,)), who=who)
        return request.grant.fidelity, request.grant.at_rest

    assert grant(identity()) == ("exact", "local")
    assert grant(identity(fidelity="rough")) == ("rough", "local")
    assert grant(identity(fidelity="rough"), "near") == ("near", "local")
    for word in AT_REST:
        assert grant(identity(at_rest=word)) == ("exact", word)
        assert grant(member("remote", word)) == grant(member(word, "remote")) == ("near", word)
    assert grant(member("local", "never")) == ("near", "never")


def test_grant_is_no_better_than_the_kv_of_the_engine() -> None:
    """Copies of blocks of 8 bits count as `near` for every tenant."""
    call = Call("m", (Prompt(),), GenerationParameters())
    info = msgspec.structs.replace(NOW.info, kv_fidelity="near")
    now = msgspec.structs.replace(NOW, info=info)
    for allowed, expected in (("exact", "near"), ("near", "near"), ("rough", "rough")):
        who = identity(fidelity=allowed)
        request = admitted(call, Rendered((1,)), who=who, now=now)

        assert request.grant.fidelity == expected


def refused(**asked: object) -> Refusal:
    with pytest.raises(Refusal) as caught:
        ask(**asked)  # type: ignore[arg-type]
    return caught.value


def test_admits_exactly_the_full_context() -> None:
    """D2: the edge itself runs; the refusal is about the prompt and names both numbers."""
    (request,) = ask((1,) * 54, max_tokens=10)
    refusal = refused(tokens=(1,) * 65, max_tokens=10)

    assert request.max_tokens == 10
    assert refusal.code == "context_length_exceeded"
    assert refusal.message == (
        "This model's maximum context length is 64 tokens, and the prompt has 65."
    )


def test_window_groups_of_the_model_take_memory_too() -> None:
    """Six blocks hold three runs of 16 tokens in two KV groups: 48 tokens of the context's 64."""
    windowed = msgspec.structs.replace(
        NOW, info=msgspec.structs.replace(ENGINE_INFO, kv_windows=(16,))
    )
    few = identity(ceiling_blocks=6)

    assert ask((1,) * 39, max_tokens=10, who=few, now=windowed)[0].max_tokens == 9
    refusal = refused(tokens=(1,) * 48, max_tokens=10, who=few, now=windowed)
    assert "holds 48 tokens" in refusal.message


def test_output_limit_is_cut_to_the_room_that_is_left() -> None:
    """Clients choose more output tokens than a small context has. If that were refused as a request
    that is too long, agents would shorten a prompt that fits, again and again."""
    (request,) = ask((1,) * 54, max_tokens=10_000)
    refusal = refused(tokens=(1,) * 64, max_tokens=10_000)

    assert request.max_tokens == 10
    assert ask((1,) * 54, max_tokens=9)[0].max_tokens == 9
    assert ask((1,) * 64, max_tokens=0)[0].max_tokens == 0
    assert refusal.code == "context_length_exceeded"
    assert "leaves no room for the answer" in refusal.message


def test_max_tokens_defaults_to_remaining_context() -> None:
    """Short prompts get the default, long ones the rest of the context."""
    assert ask((1,) * 10)[0].max_tokens == 20
    assert ask((1,) * 60)[0].max_tokens == 4
    assert refused(tokens=(1,) * 64).kind is Kind.BAD


def test_refuses_request_larger_than_ceiling_or_pool() -> None:
    """G7: a tenant's ceiling or the pool may be less than the context."""
    small = msgspec.structs.replace(NOW, info=msgspec.structs.replace(ENGINE_INFO, blocks=2))

    assert ask((1,) * 20, now=small, max_tokens=12)[0].max_tokens == 12
    assert refused(tokens=(1,) * 32, now=small, max_tokens=1).kind is Kind.BAD
    assert refused(tokens=(1,) * 17, who=identity(ceiling_blocks=1)).kind is Kind.BAD


@each_row(
    ("field", "asked"),
    [
        ("prompt", {"tokens": (1, 100)}),
        ("prompt", {"tokens": (-1,)}),
        ("prompt", {"tokens": (1,) * 100 + (100,)}),
        ("prompt", {"tokens": (1,) * 100 + (-1,)}),
        ("prompt", {"tokens": ()}),
        ("stop_token_ids", {"stop_token_ids": (100,)}),
        ("logit_bias", {"sampling": Sampling(logit_bias={2**31 - 1: 1.0})}),
    ],
)
def test_refuses_token_ids_outside_vocabulary(field: str, asked: dict[str, object]) -> None:
    """D8, D9, D11: an id from a client indexes device memory."""
    refusal = refused(**asked)

    assert (refusal.kind, refusal.param) == (Kind.BAD, field)


def test_refuses_too_many_choices() -> None:
    """D3: the configured limit, by the client's field name, and the product with prompts."""
    assert refused(choices=5, samples=5).param == "n"
    assert refused(choices=5, samples=5, choices_field="count").message.startswith(
        "count: 5; expected at most"
    )
    assert refused(choices=1, samples=5).param == "best_of"
    assert refused(choices=4, samples=4, prompts=33).param == "prompt"


def test_refuses_an_echo_of_too_many_logprobs() -> None:
    """A short body would be answered with hundreds of megabytes."""
    at_most: Any = {"tokens": (3,) * 50_000, "now": NOW_ROOMY, "max_tokens": 1}
    assert ask(**at_most, prompt_logprobs=4, choices=4, samples=4)

    with pytest.raises(Refusal, match=r"entries .50000 prompt tokens, 5 logprobs, 4 choices") as no:
        ask(**at_most, prompt_logprobs=5, choices=4, samples=4)
    assert (no.value.kind, no.value.param) == (Kind.BAD, "logprobs")


def test_tenant_limit_is_429_and_server_limit_503_with_retry_after() -> None:
    """Clients back off by status and retry-after."""
    full = msgspec.structs.replace(NOW, running=3)
    stats = Stats(prefill_tokens_per_s=100.0)
    slow = msgspec.structs.replace(NOW, stats=stats, waiting=waiting((1, 1.0, [100_000])))
    own, ours = refused(now=full), refused(now=slow)

    assert (own.kind, own.code) == (Kind.RATE, "rate_limit_exceeded")
    assert (ours.kind, ours.code) == (Kind.BUSY, "overloaded")
    assert own.retry_after_s == 1.0
    assert ours.retry_after_s == 60.0


def test_a_call_counts_as_many_requests_as_it_has_prompts() -> None:
    """A hundred prompts in one call take a hundred of the tenant's places; alone it may run."""
    assert len(ask(prompts=5)) == 5
    assert len(ask(prompts=2, now=msgspec.structs.replace(NOW, running=1))) == 2
    assert refused(prompts=3, now=msgspec.structs.replace(NOW, running=1)).kind is Kind.RATE


def test_others_waiting_tokens_neither_refuse_nor_show() -> None:
    """A flood of 971,700 tokens told a quiet tenant that its own wait was 773 s."""
    stats = Stats(waiting_tokens=971_700, prefill_tokens_per_s=1_257.0)
    beside = msgspec.structs.replace(NOW, stats=stats, waiting=waiting((2, 1.0, [971_700])))
    flood = msgspec.structs.replace(NOW, stats=stats, waiting=waiting((1, 1.0, [971_700])))

    assert ask(now=beside)
    assert refused(now=flood).code == "overloaded"


def test_a_full_queue_refuses_the_tenant_with_most_waiting_alone() -> None:
    """And at once: the engine would answer between two steps. No word counts others' requests."""
    calls = waiting((1, 1.0, [9] * 2), (2, 1.0, [9] * 6))
    now = msgspec.structs.replace(NOW, waiting=calls)
    refusal = refused(now=now, who=identity(2))

    assert ask(now=now, who=identity(1))
    assert ask(now=now, who=identity(3))
    assert ask(now=now, who=identity(2, weight=9.0))
    assert (refusal.kind, refusal.code) == (Kind.BUSY, "overloaded")
    assert "6 requests of this tenant are waiting" in refusal.message


def test_adds_model_stop_tokens_unless_ignore_eos() -> None:
    assert ask(stop_token_ids=(7, 2))[0].stop_token_ids == (2, 7)
    assert ask(stop_token_ids=(7,), ignore_eos=True)[0].stop_token_ids == (7,)


def test_client_can_only_lower_its_priority() -> None:
    """D23: shares come from the key, never from the body."""
    who = identity(floor_blocks=1, ceiling_blocks=7, weight=2.5, priority=5)
    (request,) = ask(who=who, priority=-3)

    assert request.priority == 2
    assert request.weight == 2.5
    assert request.grant.quota.ceiling_blocks == 7
    assert request.grant.quota.floor_blocks == 1


def test_each_prompt_has_its_own_request_id() -> None:
    """One HTTP request and one ledger entry, but distinct engine requests."""
    assert [r.request_id for r in ask(prompts=3)] == ["id-0", "id-1", "id-2"]
    assert ask()[0].request_id == "id"


@example([(1, "a", "b", "", ""), (1, "ab", "", "", "")])
@example([(1, "1", "", "", ""), (11, "", "", "", "")])
@given(
    st.lists(
        st.tuples(st.integers(1, 3), *[st.text(alphabet="a:\0", max_size=3)] * 4),
        min_size=2,
        max_size=2,
        unique=True,
    )
)
def test_namespaces_of_different_scopes_differ(
    scopes: list[tuple[int, str, str, str, str]],
) -> None:
    """Joined without lengths, ("a", "b") and ("ab", "") would share a cache."""
    names = [
        namespace_of(identity(tenant, workspace), model, template, partition)
        for tenant, workspace, model, template, partition in scopes
    ]

    assert names[0] != names[1]


def test_partition_is_part_of_the_namespace() -> None:
    """prompt_cache_key and cache_salt reach the scope."""
    assert ask(partition="a")[0].grant.namespace != ask()[0].grant.namespace


def test_tenant_has_one_payer_in_all_its_namespaces() -> None:
    """A partition that a client invents gives no second floor, ceiling or place in the queue."""
    grants = [
        ask(partition=partition, who=identity(1, workspace))[0].grant
        for partition, workspace in (("", "lab"), ("a", "lab"), ("b", "home"))
    ]
    other = ask(who=identity(2, "lab"))[0].grant

    assert len({grant.namespace for grant in grants}) == 3
    assert len({grant.payer for grant in grants}) == 1
    assert other.payer != grants[0].payer


def test_retry_after_is_bounded() -> None:
    """Above two minutes SDKs do not retry at all."""
    assert retry_after_s(0.0) == 1.0
    assert retry_after_s(10.0) == 10.0
    assert retry_after_s(1e9) == 60.0


def test_a_member_of_a_shared_scope_takes_its_own_turn() -> None:
    """The owner's blocks, and the member's own slots, time and weight."""
    scope = SharedScope(1, "shared", 7, CachePolicy(weight=9.0, floor_blocks=2))
    who = msgspec.structs.replace(identity(1, weight=2.0), scope=scope)
    (request,) = ask(who=who)
    (alone,) = ask(who=identity(1, weight=2.0))

    assert (request.grant.payer, request.turn, request.weight) == (b"7", b"1", 2.0)
    assert request.grant.quota.weight == 9.0
    assert (alone.grant.payer, alone.turn) == (b"1", b"")
