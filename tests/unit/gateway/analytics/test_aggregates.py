"""`Analytics`: sums that add up, in bounded memory, without any prompt's text."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.analytics.aggregates import (
    PROMPTS_BYTES_MAX,
    SAMPLE_MAX,
    TENANTS_COUNTED_MAX,
    Analytics,
    ModelTerms,
    PromptSamples,
)
from gateway.analytics.completed_prompt import CompletedPrompt, PromptContext
from gateway.dialects.canonical import Boundary, Rendered, UsageRecord
from tenancy.accounts.tenants import change_tenant
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.reuse.advice import ClassTerms
from tenancy.reuse.prompt_changes import PREFIXES_MAX
from tenancy.types import wall_ms
from tests.fakes import FakeClock
from tests.tables import each_row
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

CARD = RateCard("c", input=1_000, cache_read=100)
DEAR = RateCard("d", input=5_000, cache_read=500)
TERMS = {"m": ModelTerms(CARD, 64), "dear": ModelTerms(DEAR, 8)}
ADA, BOB, EVE = 1, 2, 3


class AnalyticsUnderTest:
    """Analytics with manual clocks."""

    def __init__(self, tenants_max: int = 10) -> None:
        self.clock = FakeClock()
        self.analytics = Analytics(
            self.clock,
            lambda: int(self.clock.now_s * 1000),
            tenants_max,
            {"5m": ClassTerms(300.0, "5m")},
            1,
        )

    def note(
        self,
        tenant_id: int,
        words: str,
        cached: int = 0,
        missed: str = "",
        missed_tokens: int = 0,
        model: str = "m",
    ) -> None:
        """Note a request; each letter is a block of sixteen tokens and a segment."""
        tokens = tuple(ord(word) for word in words for _ in range(16))
        boundaries = tuple(Boundary(16 * (n + 1), f"messages[{n}]") for n in range(len(words)))
        record = UsageRecord(
            len(tokens), {"5m": cached} if cached else {}, {}, len(tokens) - cached, 5, cached
        )
        prompt = Rendered(tokens, boundaries)
        facts = CompletedPrompt(
            tenant_id, model, record, prompt, 0.1, missed, "done", missed_tokens
        )
        context = PromptContext("r", model.encode(), "e", self.clock.now_s, False, 0, {})
        self.analytics.note(replace(facts, context=context))

    def tenant(self, tenant_id: int) -> dict[str, Any]:
        found = self.analytics.tenant(tenant_id, TERMS)
        assert found is not None
        return found


def test_sums_are_kept_by_tenant_and_by_minute() -> None:
    """The hit ratio is of tokens."""
    world = AnalyticsUnderTest()
    world.note(ADA, "ab")
    world.clock.advance(60)
    world.note(ADA, "abcd", cached=32)
    world.note(BOB, "x", missed="expired")

    all_of_them, ada = world.analytics.overview(), world.tenant(ADA)

    assert all_of_them["total"]["prompt_tokens"] == 112
    assert all_of_them["minutes"] == [[0, 1, 0, 0, 32, 5], [1, 2, 32, 0, 48, 10]]
    assert all_of_them["misses"] == {"expired": 1}
    assert [one["tenant_id"] for one in all_of_them["tenants"]] == [BOB, ADA]
    assert ada["total"]["hit_ratio"] == 32 / 96
    assert ada["first_token_ms"]["hit"]["count"] == 1


def test_cached_template_alone_is_no_hit() -> None:
    """The first tokens of a template are cached for all tenants: counted as hits, they would hide
    misses."""
    world = AnalyticsUnderTest()
    for cached in (0, 16, 32, 48, 64):
        world.note(ADA, "abcd", cached=cached)

    times = world.tenant(ADA)["first_token_ms"]

    counts = {kind: one["count"] for kind, one in times.items()}
    assert counts == {"miss": 1, "partial": 1, "hit": 3}


def test_top_prefixes_saved_most_tokens() -> None:
    """Uses and hits of each boundary, by digest and path."""
    world = AnalyticsUnderTest()
    world.note(ADA, "ab")
    world.note(ADA, "ac", cached=16)

    top = world.tenant(ADA)["top_prefixes"]

    assert (top[0]["path"], top[0]["uses"], top[0]["hits"]) == ("messages[0]", 2, 1)


def test_prices_breaks_at_the_saving_of_a_read() -> None:
    """A changed beginning costs the whole prompt each time."""
    world = AnalyticsUnderTest()
    world.note(ADA, "abc")
    world.note(ADA, "xbc")

    [lost] = world.tenant(ADA)["breaks"]

    assert (lost["place"], lost["tokens"], lost["cost_pico"]) == ("messages[0]", 48, 48 * 900)


def hit_ratios(advice: dict[str, Any]) -> dict[int, float]:
    return {one["blocks"]: one["hit_ratio"] for one in advice["size_advice"]}


def test_sizes_of_two_models_are_told_apart() -> None:
    """Each model has a cache of its own. One curve over both would say that a cache has to hold
    the prompts of both between two uses, and count another model's repetition as a hit."""
    alone, both = AnalyticsUnderTest(), AnalyticsUnderTest()
    for number in range(60):
        for world in (alone, both):
            world.note(ADA, "abcd" if number % 2 else "efgh")
        both.note(ADA, "abcd", model="dear")
        both.note(ADA, "".join(map(chr, range(200 + 8 * number, 208 + 8 * number))), model="dear")

    [single] = alone.tenant(ADA)["advice"]
    advice = {one["model"]: one for one in both.tenant(ADA)["advice"]}

    assert advice["m"] == single
    assert hit_ratios(single)[4] == 0.0 < 0.9 < hit_ratios(single)[16]
    assert [one["blocks"] for one in advice["dear"]["size_advice"]] == [1, 2, 4, 8, 16]
    assert hit_ratios(advice["dear"])[8] == 0.0 < 0.2 < hit_ratios(advice["dear"])[16]
    assert (advice["dear"]["rate_card"], advice["dear"]["sampled_prompts"]) == ("d@1", 120)


def test_misses_are_priced_by_the_model_that_computed_them() -> None:
    """The sum of a cause has the prices of each model; a place has those of its own."""
    world = AnalyticsUnderTest()
    for model in ("m", "dear"):
        world.note(ADA, "abcdef", model=model)
        world.note(ADA, "abcdef", missed="expired", missed_tokens=96, model=model)
        world.note(ADA, "xbcdef", model=model)
    ada = world.tenant(ADA)
    [expired] = [one for one in ada["recomputed"] if one["cause"] == "expired"]

    assert {one["model"]: one["cost_pico"] for one in ada["breaks"]} == {
        "m": 96 * 900,
        "dear": 96 * 4_500,
    }
    assert (expired["tokens"], expired["cost_pico"]) == (192, 96 * (900 + 4_500))
    assert world.analytics.missed_tokens(ADA, "expired") == 192
    assert {one["model"] for one in ada["top_prefixes"]} == {"m", "dear"}


def test_drops_samples_of_inactive_tenants_but_keeps_sums() -> None:
    world = AnalyticsUnderTest(tenants_max=2)
    for tenant_id in (ADA, BOB, EVE):
        world.note(tenant_id, "x")

    assert [one["tenant_id"] for one in world.analytics.overview()["tenants"]] == [EVE, BOB, ADA]
    assert world.tenant(BOB)["top_prefixes"] != []
    assert world.tenant(ADA)["top_prefixes"] == []
    assert world.tenant(ADA)["total"]["requests"] == 1


def test_tenants_beyond_the_bound_stay_in_the_total() -> None:
    """A million tenants must not grow a gateway for ever."""
    world = AnalyticsUnderTest()
    for number in range(TENANTS_COUNTED_MAX + 1):
        world.note(number, "x")

    found = world.analytics.overview()
    assert len(found["tenants"]) == TENANTS_COUNTED_MAX
    assert found["total"]["requests"] == TENANTS_COUNTED_MAX + 1
    assert world.analytics.tenant(0, TERMS) is None


def test_samples_of_a_tenant_are_bounded_in_bytes() -> None:
    """However many prompts it sends, all different and with many boundaries: as documented for
    operators."""
    chance = random.Random(1)
    record = UsageRecord(1_024, {}, {}, 1_024, 5, 0)

    def fill() -> PromptSamples:
        prompts = PromptSamples(1)
        for number in range(200):
            tokens = tuple(chance.randrange(2**31) for _ in range(1_024))
            boundaries = tuple(Boundary(32 * n, f"messages[{n}]" + "x" * 500) for n in range(1, 33))
            facts = CompletedPrompt(ADA, "m", record, Rendered(tokens, boundaries), 0.1, "", "done")
            prompts.add(float(number), facts)
        return prompts

    tracemalloc.start()
    prompts = fill()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(prompts.changes.top(10**6)) == PREFIXES_MAX
    assert prompts.count == 200
    assert prompts.reuse.sampled_blocks == SAMPLE_MAX
    assert used < PROMPTS_BYTES_MAX


def test_prices_misses_by_cause() -> None:
    """Tokens that were computed again, at the saving of a read, with and without breakpoints."""
    world = AnalyticsUnderTest()
    world.note(ADA, "abc", missed="evicted_pressure", missed_tokens=32)
    world.note(ADA, "abc", missed="expired", missed_tokens=48)
    world.note(ADA, "abc", cached=47, missed="never_written")
    world.note(ADA, "xbcdefghijk")
    world.note(ADA, "ybcdefghijk")

    assert world.tenant(ADA)["recomputed"] == [
        {"cause": "prompt_changes", "tokens": 160, "cost_pico": 160 * 900},
        {"cause": "expired", "tokens": 48, "cost_pico": 48 * 900},
        {"cause": "evicted_pressure", "tokens": 32, "cost_pico": 32 * 900},
    ]
    assert world.analytics.missed_tokens(ADA, "evicted_pressure") == 32
    assert world.analytics.missed_tokens(BOB, "evicted_pressure") == 0


ANSWER = st.tuples(
    st.sampled_from([ADA, BOB, EVE]),
    st.text("ab", max_size=4),
    st.integers(0, 64),
    st.sampled_from(["", "expired", "evicted_pressure"]),
    st.sampled_from(["done", "cancelled", "failed"]),
    st.sampled_from([None, 0.0, 0.0004, 0.1, 30.0, 1e6]),
    st.sampled_from([0.0, 0.001, 1.0, 59.9, 61.0, 7_300.0]),
    st.booleans(),
)


@given(st.lists(ANSWER, max_size=80))
def test_sums_equal_those_over_a_list_of_all_requests(answers: list[Any]) -> None:
    """Whenever they are read, with minutes far apart, with and without a first token."""
    world = AnalyticsUnderTest()
    rows: list[tuple[int, int, UsageRecord, str, str, float | None]] = []
    for tenant_id, words, cached, missed, ending, first_s, pause_s, is_asked in answers:
        world.clock.advance(pause_s)
        total = 16 * len(words)
        found = min(cached, total)
        record = UsageRecord(total, {"5m": found}, {"1h": 1}, total - found, 5, found, found // 2)
        tokens = tuple(ord(word) for word in words for _ in range(16))
        boundaries = tuple(Boundary(16 * (n + 1), f"messages[{n}]") for n in range(len(words)))
        facts = CompletedPrompt(
            tenant_id, "m", record, Rendered(tokens, boundaries), first_s, missed, ending, found
        )
        rows.append(
            (int(world.clock.now_s * 1000) // 60_000, tenant_id, record, missed, ending, first_s)
        )
        world.analytics.note(facts)
        if is_asked:
            world.analytics.overview()

    shown = [(0, world.analytics.overview())]
    shown += [(tenant_id, world.tenant(tenant_id)) for tenant_id in {row[1] for row in rows}]
    for tenant_id, page in shown:
        mine = [row for row in rows if tenant_id in (0, row[1])]
        records = [row[2] for row in mine]
        total = sum(one.total_in for one in records)
        found = sum(one.physical_cached for one in records)
        assert page["total"] == {
            "requests": len(mine),
            "prompt_tokens": total,
            "read_tokens": found,
            "write_tokens": len(mine),
            "fresh_tokens": total - found,
            "output_tokens": 5 * len(mine),
            "physical_cached_tokens": found,
            "hit_ratio": found / total if total else None,
            "physical_hit_ratio": found / total if total else None,
            "recomputed_promised_tokens": sum(one.recomputed_promised for one in records),
        }
        assert page["endings"] == Counter(row[4] for row in mine)
        assert page["misses"] == Counter(row[3] for row in mine if row[3])
        by_minute = Counter(row[0] for row in mine)
        assert [row[:2] for row in page["minutes"]] == [list(one) for one in by_minute.items()]
        times = [times["count"] for times in page["first_token_ms"].values()]
        assert sum(times) == sum(row[5] is not None for row in mine)


def test_repeated_minute_is_added_to_the_last_one() -> None:
    """A wall clock set back by an hour does not make history run backwards."""
    clock, wall_s = FakeClock(), [7_200]
    seen = Analytics(clock, lambda: wall_s[0] * 1000, 10, {}, 1)
    facts = CompletedPrompt(ADA, "m", UsageRecord(8, fresh=8), Rendered((1,) * 8), None, "", "done")

    for now_s in (7_200, 3_600, 7_259, 7_260):
        wall_s[0] = now_s
        seen.note(facts)
        seen.overview()

    assert [row[:2] for row in seen.overview()["minutes"]] == [[120, 3], [121, 1]]


@each_row(("tokens", "step"), [(100_000, 1), (65_536, 16), (2_048, 1), (512, 2), (64, 1), (0, 1)])
def test_looks_at_a_bounded_part_of_a_prompt(tokens: int, step: int) -> None:
    """However long the prompt and however many its boundaries: all are counted, their beginnings
    sampled."""
    chance = random.Random(tokens)
    world = AnalyticsUnderTest()
    record = UsageRecord(tokens, fresh=tokens)
    ends = [Boundary(end, f"messages[{end}]") for end in range(0, tokens, step)]
    for _ in range(3):
        prompt = Rendered(tuple(chance.choices(range(50_000), k=tokens)), tuple(ends))
        world.analytics.note(CompletedPrompt(ADA, "m", record, prompt, None, "", "done"))

    ada = world.tenant(ADA)

    [advice] = ada["advice"]
    assert advice["sampled_prompts"] == ada["total"]["requests"] == 3
    assert advice["sampled_blocks"] <= min(SAMPLE_MAX, 3 * 80)
    assert sum(one["count"] for one in ada["breaks"]) == (2 if len(ends) > 1 else 0)


async def test_new_tenant_of_a_deleted_ones_name_inherits_no_figures(
    gateway: GatewayFixture,
) -> None:
    """The sums of the deleted one stay, under its pseudonym."""
    admin = AdminClient(gateway)
    await gateway.ask(body=gateway.chat())
    await gateway.quiet()
    status, _ = await admin.ask("DELETE", "/admin/v1/tenants/ada")
    assert status == 200
    await admin.ask("POST", "/admin/v1/tenants", {"name": "ada"})

    status, refused = await admin.ask("GET", "/admin/v1/analytics/ada")
    _, overview = await admin.ask("GET", "/admin/v1/analytics")

    assert (status, refused["error"]["code"]) == (404, "not_seen")
    assert [(one["tenant"], one["requests"]) for one in overview["tenants"]] == [("deleted-1", 1)]


async def test_admin_api_shows_analytics(gateway: GatewayFixture) -> None:
    """With the engine's statistics, blocks by tenant, and the shape of a tree."""
    for _ in range(2):
        await gateway.ask(body=gateway.chat("a question that fills a block or two of the cache"))
    await gateway.engine.get_stats()

    admin = AdminClient(gateway)
    _, overview = await admin.ask("GET", "/admin/v1/analytics")
    _, tenant = await admin.ask("GET", "/admin/v1/analytics/ada")
    _, tree = await admin.ask("GET", "/admin/v1/tree/ada")
    unknown, _ = await admin.ask("GET", "/admin/v1/analytics/nobody")
    rootless, _ = await admin.ask("GET", "/admin/v1/tree/nobody")

    assert overview["total"]["requests"] == 2
    assert overview["engine"]["ready"] is True
    assert tenant["total"]["hit_ratio"] > 0
    [advice] = tenant["advice"]
    assert [one["retention"] for one in advice["retention_advice"]][:2] == ["5m", "in_memory"]
    present = advice["size_advice"][-2]
    assert present["blocks"] == overview["engine"]["blocks"]
    assert present["bytes"] == present["blocks"] * overview["engine"]["kv_bytes_per_block"]
    assert present["more_pico"] == present["more_error_pico"] == 0
    assert tree["tenant"] == "ada"
    assert (unknown, rootless) == (404, 404)
    assert "question" not in str((overview, tenant, tree))


async def test_admin_api_shows_evictions_between_tenants_with_their_cost(
    gateway: GatewayFixture,
) -> None:
    """A neighbour evicts a prefix without a promise; its owner computes it again, at the price
    shown in the neighbour's row."""
    admin = AdminClient(gateway)
    add_card(gateway.store, wall_ms, RateCard("std", input=3_000_000, cache_read=300_000))
    change_tenant(gateway.store, "bob", {"floor_blocks": 230})
    gateway.gateway.context.authenticator.refresh_now()
    kept = gateway.chat("words that are kept, " * 16, prompt_cache_retention="in_memory")
    await gateway.ask(body=kept)
    for number in range(24):
        await gateway.ask(body=gateway.chat(f"{number} noise, " * 30), who="bob")
    await gateway.until(
        lambda: bool(gateway.engine.cache_events.evictions_by_taker())
    )  # sent with a heartbeat
    await gateway.ask(body=kept)
    _, overview = await admin.ask("GET", "/admin/v1/analytics")
    _, ada = await admin.ask("GET", "/admin/v1/analytics/ada")

    row = next(row for row in overview["taken"] if (row["owner"], row["taker"]) == ("ada", "bob"))
    lost = {one["cause"]: one for one in ada["recomputed"]}["evicted_pressure"]
    assert row["blocks"] > 0
    assert row["recomputed_tokens"] == lost["tokens"] > 0
    assert row["cost_pico"] == lost["cost_pico"] == lost["tokens"] * 2_700_000
    bounds = {
        one["tenant"]: (one["floor_blocks"], one["ceiling_blocks"]) for one in overview["holdings"]
    }
    assert bounds == {"ada": (0, None), "bob": (230, None)}
    assert ada["churn"]["evicted_blocks"] >= row["blocks"]
    assert ada["churn"]["evicted_after_s"] > 0
    assert overview["churn"]["inserted_blocks"] > ada["churn"]["inserted_blocks"] > 0


async def test_shows_outcomes_of_promises_by_tenant_and_class(
    gateway: GatewayFixture,
) -> None:
    """In analytics and in metrics alike."""
    admin = AdminClient(gateway)
    text = {"type": "text", "text": "kept, " * 60, "cache_control": {"type": "ephemeral"}}
    asked = {
        "model": gateway.model,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [text]}],
    }
    for _ in range(2):
        await gateway.ask("/v1/messages", asked, headers={"anthropic-version": "2023-06-01"})
    await gateway.ask("/v1/cache", method="DELETE")
    overview: dict[str, Any] = {"churn": {"erased_blocks": 0}}
    while not overview["churn"]["erased_blocks"]:  # told by a heartbeat, as insertions are
        _, overview = await admin.ask("GET", "/admin/v1/analytics")
    async with gateway.session.get(f"{gateway.admin_url}/metrics") as response:
        metrics = await response.text()

    [row] = overview["leases"]
    assert (row["tenant"], row["class"]) == ("ada", "5m")
    assert (row["given"], row["renewed"], row["given_up"], row["running"]) == (1, 1, 1, 0)
    assert 'trunkline_promises_total{class="5m",outcome="given_up"} 1.0' in metrics
    inserted = float(overview["churn"]["inserted_blocks"])
    assert inserted > 0
    assert f"trunkline_inserted_blocks_total {inserted}\n" in metrics


async def test_tenant_key_may_not_read_analytics(gateway: GatewayFixture) -> None:
    admin = AdminClient(gateway)
    found = [
        await admin.ask("GET", path, key=key)
        for path in ("/admin/v1/analytics", "/admin/v1/analytics/ada", "/admin/v1/tree/ada")
        for key in (None, gateway.keys["ada"])
    ]

    assert all(status in (401, 403) for status, _ in found)
