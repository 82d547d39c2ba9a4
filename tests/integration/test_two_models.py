"""Two models in one gateway, each in an engine of its own: routing, isolation, reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from gateway.config import ServedModelSettings
from gateway.engines.served_models import FailedModel
from tenancy.accounting.reconcile import reconcile_living
from tenancy.accounts.tenants import change_tenant
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.types import wall_ms
from tests.fakes import FakeClock
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.engines.fake_link import FakeLink
from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatedRunner, GatewayFixture

SECOND = "second"
LONG = "x" * 200


@pytest.fixture
async def gateway(unopened_gateway: GatewayFixture) -> AsyncIterator[GatewayFixture]:
    """Yield a gateway with two models over the same files: their digests are equal."""
    unopened_gateway.more = {SECOND: GatedRunner(unopened_gateway.card.config.vocab)}
    await unopened_gateway.open()
    yield unopened_gateway
    unopened_gateway.more[SECOND].release()
    await unopened_gateway.close()


def chat(gateway: GatewayFixture, model: str, text: str = LONG) -> dict[str, object]:
    return gateway.chat(text, model=model)


def computed(gateway: GatewayFixture) -> tuple[int, int]:
    """Return the tokens that each engine has computed."""
    return gateway.runner.computed_tokens, gateway.more[SECOND].computed_tokens


async def test_the_models_name_selects_the_engine(gateway: GatewayFixture) -> None:
    before = computed(gateway)
    status, first, _ = await gateway.ask(body=chat(gateway, gateway.model))
    only_first = computed(gateway)
    _, second, _ = await gateway.ask(body=chat(gateway, SECOND))

    assert (status, first["model"], second["model"]) == (200, gateway.model, SECOND)
    assert computed(gateway)[0] == only_first[0] > before[0]
    assert computed(gateway)[1] > only_first[1] == before[1]
    assert gateway.store.query("select model from ledger order by entry_id") == [
        (gateway.model,),
        (SECOND,),
    ]
    await gateway.check_quiet()


async def test_models_share_no_prefix_though_their_files_are_equal(gateway: GatewayFixture) -> None:
    """A block is in one engine: a namespace names its model, so an erasure finds the engine."""
    await gateway.ask(body=chat(gateway, gateway.model))
    _, cold, _ = await gateway.ask(body=chat(gateway, SECOND))
    _, warm, _ = await gateway.ask(body=chat(gateway, SECOND))
    names = [{one.namespace for one in each.namespaces} for each in gateway.engines.values()]

    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert names[0].isdisjoint(names[1])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_an_unknown_model_is_refused_with_the_names(
    gateway: GatewayFixture, path: str, body: dict[str, object]
) -> None:
    status, answer, _ = await gateway.ask(path, {**body, "model": "third"})

    assert status == 404
    assert f"expected one of: {gateway.model}, {SECOND}." in answer["error"]["message"]


async def test_every_dialect_lists_all_models(gateway: GatewayFixture) -> None:
    _, openai, _ = await gateway.ask("/v1/models", method="GET")
    _, anthropic, _ = await gateway.ask(
        "/v1/models", method="GET", headers={"anthropic-version": "2023-06-01"}
    )
    _, gemini, _ = await gateway.ask("/v1beta/models", method="GET")
    _, one, _ = await gateway.ask(f"/v1/models/{SECOND}", method="GET")

    names = [gateway.model, SECOND]
    assert [row["id"] for row in openai["data"]] == names
    assert [row["id"] for row in anthropic["data"]] == names
    assert [row["name"] for row in gemini["models"]] == [f"models/{name}" for name in names]
    assert one["id"] == SECOND


async def test_one_engine_is_lost_and_the_other_serves_on(gateway: GatewayFixture) -> None:
    """Its requests end, new ones are 503 with a retry time, and the server stays ready."""
    gateway.more[SECOND].hold_after(1)
    running = asyncio.create_task(gateway.ask(body=chat(gateway, SECOND)))
    await gateway.until(lambda: gateway.more[SECOND].is_held)
    gateway.engines[SECOND].mark_lost("planted")
    gateway.more[SECOND].release()
    lost, ended, _ = await running
    status, refused, response = await gateway.ask(body=chat(gateway, SECOND))
    alive, _, _ = await gateway.ask(body=chat(gateway, gateway.model))
    ready, states, _ = await gateway.ask("/readyz", method="GET", who=None)

    assert (lost, ended["error"]["code"]) == (503, "engine_restarting")
    assert (status, refused["error"]["code"]) == (503, "engine_starting")
    assert SECOND in refused["error"]["message"]
    assert float(response.headers["Retry-After"]) > 0
    assert (alive, ready) == (200, 200)
    assert states == {"status": "ready", "models": {gateway.model: "ready", SECOND: "starting"}}


async def test_the_default_model_decides_on_readiness(gateway: GatewayFixture) -> None:
    await gateway.engine.close()
    status, states, _ = await gateway.ask("/readyz", method="GET", who=None)
    other, _, _ = await gateway.ask(body=chat(gateway, SECOND))

    assert (status, states["status"]) == (503, "starting")
    assert states["models"] == {gateway.model: "starting", SECOND: "ready"}
    assert other == 200, "the other model answers all the same"


async def test_a_model_that_failed_is_told_as_failed_and_the_others_serve_on(
    unopened_gateway: GatewayFixture,
) -> None:
    """It does not come back, so no time to try again is given; an erasure needs nothing of it."""
    reason = "/srv/models/bad.gguf: the chat template does not compile: line 3"
    unopened_gateway.failed = [FailedModel(ServedModelSettings("bad", aliases=("worse",)), reason)]
    gateway = unopened_gateway
    await gateway.open()
    good, _, _ = await gateway.ask(body=chat(gateway, gateway.model))
    asked = [await gateway.ask(body=chat(gateway, name)) for name in ("bad", "worse")]
    _, listed, _ = await gateway.ask("/v1/models", method="GET")
    _, states, _ = await gateway.ask("/readyz", method="GET", who=None)
    _, seen = await AdminClient(gateway).ask("GET", "/admin/v1/analytics")
    erased, _, _ = await gateway.ask("/v1/cache", method="DELETE")
    await gateway.close()

    assert (good, erased) == (200, 200)
    for status, answer, response in asked:
        assert (status, answer["error"]["code"]) == (503, "model_failed")
        assert "`bad` failed to start" in answer["error"]["message"]
        assert "bad.gguf: the chat template does not compile" in answer["error"]["message"]
        assert "/srv" not in answer["error"]["message"], "clients see no folders of the server"
        assert "Retry-After" not in response.headers
    assert [row["id"] for row in listed["data"]] == [gateway.model]
    assert states == {"status": "ready", "models": {gateway.model: "ready", "bad": "failed"}}
    assert seen["failed_models"] == {"bad": reason}


async def test_an_engine_that_never_will_serve_is_told_as_failed(gateway: GatewayFixture) -> None:
    """Weights are read by the engine, after the model's tokenizer and template."""
    await gateway.engines[SECOND].close()
    (replica,) = gateway.gateway.context.models.by_name[SECOND].replicas
    replica.link = FakeLink("weights that are not numbers")
    status, answer, response = await gateway.ask(body=chat(gateway, SECOND))
    _, listed, _ = await gateway.ask("/v1/models", method="GET")
    _, states, _ = await gateway.ask("/readyz", method="GET", who=None)
    erased, _, _ = await gateway.ask("/v1/cache", method="DELETE")

    assert (status, answer["error"]["code"]) == (503, "model_failed")
    assert "weights that are not numbers" in answer["error"]["message"]
    assert "Retry-After" not in response.headers
    assert [row["id"] for row in listed["data"]] == [gateway.model]
    assert states["models"][SECOND] == "failed"
    assert erased == 200


async def test_no_receipt_while_the_disk_of_a_failed_model_cannot_be_asked(
    gateway: GatewayFixture,
) -> None:
    """Its next engine would find what an earlier one left there."""
    await gateway.engines[SECOND].close()
    second = gateway.gateway.context.models.by_name[SECOND]
    (replica,) = second.replicas
    replica.link, second.has_disk = FakeLink("a fault"), True
    status, answer, _ = await gateway.ask("/v1/cache", method="DELETE")

    assert (status, SECOND in answer["error"]["message"]) == (503, True)


async def test_an_erasure_reaches_all_models(gateway: GatewayFixture) -> None:
    """The receipt is the sum; another tenant's blocks stay."""
    for model in (gateway.model, SECOND):
        for who in ("ada", "bob"):
            await gateway.ask(body=chat(gateway, model), who=who)
    before = [(await one.get_stats()).cached_blocks for one in gateway.engines.values()]
    status, receipt, _ = await gateway.ask("/v1/cache", method="DELETE")
    after = [(await one.get_stats()).cached_blocks for one in gateway.engines.values()]

    assert status == 200
    assert receipt["blocks"] == sum(before) - sum(after)
    assert receipt["namespaces"] == 2
    assert all(0 < left < had for left, had in zip(after, before, strict=True))


async def test_no_receipt_while_an_engine_cannot_confirm(gateway: GatewayFixture) -> None:
    """A receipt says that nothing is left; the client tries again until it has one."""
    await gateway.ask(body=chat(gateway, SECOND))
    await gateway.engines[SECOND].close()
    status, answer, _ = await gateway.ask("/v1/cache", method="DELETE")

    assert status == 503, answer
    assert gateway.store.query("select count(*) from erasures") == [(0,)]


async def test_metrics_have_the_model_as_label(gateway: GatewayFixture) -> None:
    await gateway.ask(body=chat(gateway, SECOND))
    _, text = await AdminClient(gateway).ask("GET", "/metrics")

    lines = str(text).splitlines()
    assert f'trunkline_engine_ready{{model="{SECOND}"}} 1.0' in lines
    assert f'trunkline_engine_ready{{model="{gateway.model}"}} 1.0' in lines
    assert f'trunkline_kv_blocks{{model="{SECOND}"}} 256.0' in lines
    assert any(line.startswith(f'vllm:num_requests_running{{model="{SECOND}"') for line in lines)


async def test_reports_tell_the_models_apart(gateway: GatewayFixture) -> None:
    for model in (gateway.model, SECOND):
        await gateway.ask(body=chat(gateway, model))
    admin = AdminClient(gateway)
    _, contents = await admin.ask("GET", "/admin/v1/cache")
    _, overview = await admin.ask("GET", "/admin/v1/analytics")
    _, tree = await admin.ask("GET", "/admin/v1/tree/ada")
    _, usage = await admin.ask("GET", "/admin/v1/usage?group_by=model")
    _, records = await admin.ask("GET", "/admin/v1/requests")

    names = {gateway.model, SECOND}
    assert {row["model"] for row in contents["namespaces"]} == names
    assert contents["pool"]["blocks"] == 512
    assert {row["name"] for row in overview["models"]} == names
    assert set(overview["holdings"][0]["blocks_by_model"]) == names
    assert {row["model"] for row in tree["namespaces"]} == names
    assert {row["model"] for row in usage["rows"]} == names
    assert {row["model"] for row in records["requests"]} == names


async def test_a_quota_holds_in_each_pool(gateway: GatewayFixture) -> None:
    """Each engine guards the floor by itself; a model's `quota_scale` changes its part."""
    models = gateway.gateway.context.models
    (second,) = [one for one in models if one.name == SECOND]
    second.quota_scale = 0.5
    change_tenant(gateway.store, "bob", {"ceiling_blocks": 4})
    gateway.gateway.context.authenticator.refresh_now()
    status, _, _ = await gateway.ask(body=chat(gateway, gateway.model, "x" * 20), who="bob")
    small, refused, _ = await gateway.ask(body=chat(gateway, SECOND, "x" * 20), who="bob")

    assert status == 200
    assert (small, refused["error"]["code"]) == (400, "context_length_exceeded")


def close(gateway: GatewayFixture, *tenants: str) -> None:
    """Let these tenants alone use the second model."""
    gateway.gateway.context.models.by_name[SECOND].tenants = frozenset(tenants)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        (
            "/v1beta/cachedContents",
            {"contents": [{"role": "user", "parts": [{"text": LONG}]}]},
        ),
    ],
)
async def test_a_model_is_closed_to_tenants_that_it_does_not_name(
    gateway: GatewayFixture, path: str, body: dict[str, object]
) -> None:
    """On every path, in the words for a model that is not served; the tenants that it names use it
    as before."""
    close(gateway, "bob")
    name = f"models/{SECOND}" if path.startswith("/v1beta") else SECOND
    status, refused, _ = await gateway.ask(path, {**body, "model": name})
    open_to_bob, _, _ = await gateway.ask(path, {**body, "model": name}, who="bob")

    assert (status, open_to_bob) == (404, 200)
    assert f"expected one of: {gateway.model}." in refused["error"]["message"]


async def test_a_closed_model_is_not_listed_nor_quoted(gateway: GatewayFixture) -> None:
    close(gateway, "bob")
    quote = {"endpoint": "/v1/chat/completions", "request": chat(gateway, SECOND)}
    listed = {}
    for who in ("ada", "bob"):
        _, answer, _ = await gateway.ask("/v1/models", method="GET", who=who)
        listed[who] = [row["id"] for row in answer["data"]]
    one, _, _ = await gateway.ask(f"/v1/models/{SECOND}", method="GET")
    quoted, _, _ = await gateway.ask("/v1/cache/quote", quote)

    assert listed == {"ada": [gateway.model], "bob": [gateway.model, SECOND]}
    assert (one, quoted) == (404, 404)


async def test_content_of_a_model_that_was_closed_can_be_deleted(gateway: GatewayFixture) -> None:
    """Not used any more, and its blocks are released as for every other."""
    content = [{"role": "user", "parts": [{"text": LONG}]}]
    _, resource, _ = await gateway.ask(
        "/v1beta/cachedContents", {"model": f"models/{SECOND}", "contents": content}
    )
    close(gateway)
    asked = {
        "contents": [{"role": "user", "parts": [{"text": "a"}]}],
        "cachedContent": resource["name"],
    }
    used, _, _ = await gateway.ask(f"/v1beta/models/{SECOND}:generateContent", asked)
    deleted, _, _ = await gateway.ask(f"/v1beta/{resource['name']}", method="DELETE")
    namespaces = gateway.engines[SECOND].namespaces

    assert (used, deleted) == (404, 200)
    await gateway.until(lambda: not any(one.promised_blocks for one in namespaces))
    assert "cached_content_not_erased" not in [line["event"] for line in gateway.lines]


async def test_a_response_continues_with_another_model(gateway: GatewayFixture) -> None:
    """The thread is text, so the other model's template renders it anew."""
    asked = {"model": gateway.model, "input": "hello", "max_output_tokens": 4}
    _, first, _ = await gateway.ask("/v1/responses", asked)
    more = {**asked, "model": SECOND, "previous_response_id": first["id"]}
    status, second, _ = await gateway.ask("/v1/responses", more)

    assert (status, second["model"]) == (200, SECOND)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_cached_content_of_another_model_is_refused(gateway: GatewayFixture) -> None:
    """Its tokens and its blocks belong to the model that it was created for."""
    content = [{"role": "user", "parts": [{"text": LONG}]}]
    made, resource, _ = await gateway.ask(
        "/v1beta/cachedContents", {"model": f"models/{gateway.model}", "contents": content}
    )
    question = [{"role": "user", "parts": [{"text": "a"}]}]
    asked = {
        "contents": question,
        "cachedContent": resource.get("name"),
        "generationConfig": {"maxOutputTokens": 2},
    }
    own, answer, _ = await gateway.ask(f"/v1beta/models/{gateway.model}:generateContent", asked)
    status, refused, _ = await gateway.ask(f"/v1beta/models/{SECOND}:generateContent", asked)

    assert (made, own) == (200, 200), (resource, answer)
    assert status == 400
    assert f"not to {SECOND}" in refused["error"]["message"]


async def test_a_drain_ends_every_engine(gateway: GatewayFixture) -> None:
    await gateway.ask(body=chat(gateway, SECOND))
    await gateway.gateway.drain(PATIENCE_S)

    assert [one.ready() for one in gateway.engines.values()] == [False, False]
    epochs = gateway.store.query("select epoch from engine_epochs order by epoch")
    assert [row[0] for row in epochs] == ["1", "1.2"]


async def test_turning_between_models_is_no_finding(gateway: GatewayFixture) -> None:
    """The tenant has changed nothing: both models are served. Its findings name their models."""
    texts = [f"{letter} " * 90 for letter in "abcd"]
    for number, text in enumerate(texts):
        model = (gateway.model, SECOND)[number % 2]
        status, _, _ = await gateway.ask(body=chat(gateway, model, text))
        assert status == 200
    _, found = await AdminClient(gateway).ask("GET", "/admin/v1/findings")
    rows = gateway.store.query("select distinct cause, model from findings order by model")

    assert [one for one in found["findings"] if one["cause"] == "model_changed"] == []
    assert {model for _, model in rows} == {gateway.model, SECOND}
    assert "model_changed" not in {cause for cause, _ in rows}


async def test_storage_is_metered_by_model(unopened_gateway: GatewayFixture) -> None:
    """A token held costs what its model's rate card says."""
    gateway, clock = unopened_gateway, FakeClock()
    gateway.more = {SECOND: GatedRunner(gateway.card.config.vocab)}
    gateway.clock = clock
    await gateway.open()
    for model in (gateway.model, SECOND):
        await gateway.ask(body=chat(gateway, model))
    engines = gateway.engines.values()
    await gateway.until(lambda: all(one.stats.cached_blocks > 0 for one in engines))
    before = [await one.get_held() for one in engines]
    clock.advance(10.0)
    await gateway.gateway.metering.write()
    rows = gateway.store.query("select model, sum(token_seconds) from storage_hours group by 1")
    held = {
        name: 160 * sum(one.blocks for one in engine.namespaces)
        for name, engine in gateway.engines.items()
    }
    gateway.more[SECOND].release()
    await gateway.close()

    assert [one.readings for one in before] == [(), ()]
    assert {str(name): seconds for name, seconds in rows} == held


def price(gateway: GatewayFixture) -> None:
    """Set a price for each model."""
    for name, dollars in ((gateway.model, 1), (SECOND, 7)):
        add_card(gateway.store, wall_ms, RateCard(name, model=name, input=dollars * 1_000_000))


async def test_advice_is_on_each_model_that_a_tenant_uses(gateway: GatewayFixture) -> None:
    """Another model's pool and prices say nothing of its requests."""
    price(gateway)
    pool = gateway.engines[SECOND].info
    assert pool is not None
    gateway.engines[SECOND].info = replace(pool, blocks=4_096, kv_bytes_per_block=3)
    admin = AdminClient(gateway)
    for model, text in ((gateway.model, "one"), (SECOND, "one"), (SECOND, "another")):
        await gateway.ask(body=chat(gateway, model, text))
    await gateway.ask(body=chat(gateway, gateway.model), who="bob")
    await gateway.quiet()
    _, ada = await admin.ask("GET", "/admin/v1/analytics/ada")
    _, bob = await admin.ask("GET", "/admin/v1/analytics/bob")

    assert [
        (one["model"], one["rate_card"], one["sampled_prompts"], one["size_advice"][-2]["bytes"])
        for one in ada["advice"]
    ] == [(SECOND, f"{SECOND}@1", 2, 12_288), (gateway.model, f"{gateway.model}@1", 1, 256)]
    assert [one["model"] for one in bob["advice"]] == [gateway.model]


async def test_evictions_cost_the_price_of_the_model(gateway: GatewayFixture) -> None:
    price(gateway)
    change_tenant(gateway.store, "bob", {"floor_blocks": 230})
    gateway.gateway.context.authenticator.refresh_now()
    text, retention = "words that are kept, " * 16, "in_memory"
    kept = gateway.chat(text, model=SECOND, prompt_cache_retention=retention)
    await gateway.ask(body=kept)
    for number in range(24):
        await gateway.ask(body=chat(gateway, SECOND, f"{number} noise, " * 30), who="bob")
    events = gateway.engines[SECOND].cache_events
    await gateway.until(lambda: bool(events.evictions_by_taker()))  # sent with a heartbeat
    await gateway.ask(body=kept)
    await gateway.quiet()
    _, overview = await AdminClient(gateway).ask("GET", "/admin/v1/analytics")

    (row,) = (one for one in overview["taken"] if one["owner"] == "ada")
    assert row["cost_pico"] == 7_000_000 * row["recomputed_tokens"] > 0


async def test_each_engines_counts_agree_with_the_ledger(gateway: GatewayFixture) -> None:
    """One epoch for each engine, so that no request of one is missing in the other's."""
    for model in (gateway.model, SECOND, SECOND):
        await gateway.ask(body=chat(gateway, model))
    await gateway.gateway.drain(PATIENCE_S)
    epochs = [await asyncio.to_thread(reconcile_living, gateway.store, e) for e in ("1", "1.2")]

    assert [epoch is not None and not epoch.has_mismatch for epoch in epochs] == [True, True]
    one, two = [epoch.ledger.prompt_tokens for epoch in epochs if epoch is not None]
    assert two == 2 * one > 0
