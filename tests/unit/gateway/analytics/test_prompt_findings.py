"""Which cause a prompt adds to, of what the request, the contract and the past say."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.analytics import aggregates
from gateway.analytics.aggregates import Analytics
from gateway.analytics.completed_prompt import CompletedPrompt, PromptContext
from gateway.analytics.prompt_findings import NEW_CONVERSATION, READ_BACK
from gateway.dialects.canonical import Boundary, Rendered, UsageRecord
from tenancy.reuse.advice import ClassTerms
from tenancy.reuse.finding_counts import WORKING_SET, FindingCount
from tenancy.reuse.miss_causes import FIRST_USE, WRITTEN_NEVER_READ
from tests.fakes import FakeClock
from tests.tables import each_row

CLASSES = {
    "5m": ClassTerms(300.0, "5m"),
    "1h": ClassTerms(3_600.0, "1h"),
    "24h": ClassTerms(86_400.0, "best_effort"),
}
HOUR_S = 3_600.0


class Prompts:
    """Prompts of one tenant: a system text of 200 tokens and a question of 20."""

    def __init__(self) -> None:
        self._clock = FakeClock()
        self.analytics = Analytics(
            self._clock, lambda: round(1_000 * self._clock.now_s), 2, CLASSES, 3
        )
        self.now_s = 0.0
        self.writes: FindingCount | None = None
        """What the latest prompt wrote and read back."""

    def ask(
        self,
        *,
        missed: str = "",
        missed_tokens: int = 0,
        cached: int = 0,
        read: int | None = None,
        write: dict[str, int] | None = None,
        broken: int = 0,
        after_s: float = 10.0,
        tenant_id: int = 1,
        model: str = "m",
        **context: Any,
    ) -> dict[str, FindingCount]:
        """Note a prompt; return what it added, by cause."""
        self.now_s += after_s
        tokens = (*range(200), *range(1_000, 1_020))
        marks = (
            Boundary(200, "system", tier="system", role="system"),
            Boundary(220, "messages[0]"),
        )
        read = cached if read is None else read
        record = UsageRecord(220, {"5m": read} if read else {}, write or {}, 0, 1, cached, broken)
        facts: dict[str, Any] = {
            "request_id": f"r{self.now_s:g}",
            "namespace": b"n",
            "epoch": "e",
            "started_s": self.now_s,
            "is_unmarked": False,
            "min_tokens": 0,
            "losses": {},
            **context,
        }
        self._clock.now_s = self.now_s + 1
        self.analytics.note(
            CompletedPrompt(
                *(
                    tenant_id,
                    model,
                    record,
                    Rendered(tokens, marks),
                    0.1,
                    missed,
                    "done",
                    missed_tokens,
                ),
                context=PromptContext(**facts),
            )
        )
        found = {one.cause: one for one in self.analytics.take_misses().counts}
        self.writes = found.pop(WRITTEN_NEVER_READ, None)
        return found


@pytest.fixture
def prompts() -> Prompts:
    """A tenant whose prompt was sent once."""
    found = Prompts()
    assert set(found.ask()) == {NEW_CONVERSATION, FIRST_USE}
    return found


def test_cached_prompt_adds_nothing(prompts: Prompts) -> None:
    assert prompts.ask(cached=208) == {}


@each_row(
    ("facts", "cause", "tokens"),
    [
        ({"missed": "expired", "missed_tokens": 200}, "expired", 200),
        ({"missed": "evicted_pressure", "missed_tokens": 90}, "evicted", 90),
        ({"missed": "evicted_own_quota", "missed_tokens": 90}, "evicted", 90),
        ({"missed": "restarted", "missed_tokens": 200}, "restarted", 200),
        ({"missed": "damaged", "missed_tokens": 200}, "damaged", 200),
        ({"missed": "level_failed", "missed_tokens": 200}, "level_failed", 200),
        ({"epoch": "f", "level_miss": "damaged"}, "damaged", 219),
        ({"losses": {"evicted_pressure": 9}, "level_miss": "level_failed"}, "level_failed", 219),
        ({"losses": {"evicted_pressure": 9}, "level_miss": "not_worth_loading"}, "evicted", 219),
        ({"missed": "below_minimum", "cached": 208, "read": 0}, "below_minimum", 220),
        ({"missed": "template", "cached": 16}, "template_changed", 204),
        ({"missed": "model"}, "model_changed", 220),
        ({"cached": 208, "read": 0, "is_unmarked": True}, "unmarked", 219),
        ({"cached": 208, "read": 0, "min_tokens": 900}, "below_minimum", 220),
        ({"losses": {"evicted_pressure": 9}}, "evicted", 219),
        ({"losses": {"expired": 9}, "after_s": 700.0}, "expired", 219),
        ({"epoch": "f"}, "restarted", 219),
    ],
)
def test_cause_is_that_of_the_contract_or_of_the_past(
    prompts: Prompts, facts: dict[str, Any], cause: str, tokens: int
) -> None:
    """The prompt itself is the same as before."""
    found = prompts.ask(**facts)

    assert set(found) == {cause}
    assert (found[cause].requests, found[cause].wasted_tokens) == (1, tokens)
    assert found[cause].examples == (f"r{prompts.now_s:g}",)


def namespace(partition: str, workspace: str = "") -> bytes:
    """Return a namespace of the tenant, its last part the client's key."""
    parts = [part.encode() for part in ("1", workspace, "model", "template", partition)]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def test_another_key_for_the_same_beginning_is_named() -> None:
    """The key of each request's own; a key that returns finds its own prompts again."""
    prompts = Prompts()
    first = prompts.ask(namespace=namespace("a"))
    second = prompts.ask(namespace=namespace("b"))
    again = prompts.ask(namespace=namespace("a"), cached=208)

    assert set(first) == {NEW_CONVERSATION, FIRST_USE}
    assert set(second) == {"cache_key_changes", FIRST_USE}
    assert second["cache_key_changes"].wasted_tokens == 219
    assert again == {}


def test_another_workspace_or_model_is_no_other_key() -> None:
    """These are apart on purpose, and the model's change has a cause of its own."""
    prompts = Prompts()
    prompts.ask(namespace=namespace("a"))

    assert set(prompts.ask(namespace=namespace("b", "w"))) == {NEW_CONVERSATION, FIRST_USE}


def test_erased_content_is_no_loss(prompts: Prompts) -> None:
    assert prompts.ask(losses={"erased": 13}) == {}


@pytest.mark.parametrize(
    ("after_s", "kept"), [(100.0, {"5m", "1h"}), (700.0, {"1h"}), (9_000.0, set[str]())]
)
def test_classes_that_would_have_kept_it_are_counted(
    prompts: Prompts, after_s: float, kept: set[str]
) -> None:
    """Only those that promise it."""
    asked = prompts.ask(missed="expired", missed_tokens=200, write={"5m": 220}, after_s=after_s)
    found = asked["expired"]

    assert found.place == "5m"
    names = {fact.removeprefix("kept_by:") for fact in found.facts if fact.startswith("kept_by:")}
    assert names == kept
    assert found.facts["idle_s"] == round(after_s - 1)


def test_wasted_tokens_are_those_that_were_charged_as_written(prompts: Prompts) -> None:
    """A prefix with a breakpoint costs the write price, and the rest of the prompt the input's."""
    lost = prompts.ask(losses={"evicted_pressure": 9}, write={"5m": 150, "1h": 20})["evicted"]

    assert lost.wasted_tokens == 219
    assert (lost.facts["write:5m"], lost.facts["write:1h"]) == (150, 20)


def test_writes_count_until_they_are_read(prompts: Prompts) -> None:
    """Those that another cause explains are counted there; short ones are trifles."""
    prompts.ask(cached=208, read=0, write={"5m": 220})
    written = prompts.writes
    prompts.ask(cached=208, read=200)
    read_back = prompts.writes
    prompts.ask(losses={"evicted_pressure": 9}, write={"5m": 220})
    explained = prompts.writes
    prompts.ask(cached=208, read=0, write={"5m": 12})

    assert written is not None
    assert (written.requests, written.wasted_tokens) == (1, 220)
    assert read_back is not None
    assert (read_back.requests, read_back.facts) == (0, {READ_BACK: 200})
    assert (explained, prompts.writes) == (None, None)


def test_working_set_counts_a_lost_prefix_once_an_hour(prompts: Prompts) -> None:
    first = prompts.ask(losses={"evicted_pressure": 9})["evicted"]
    again = prompts.ask(losses={"evicted_pressure": 18})["evicted"]
    later = prompts.ask(losses={"evicted_pressure": 27}, after_s=HOUR_S)["evicted"]

    assert first.facts == {"evicted_pressure": 1, WORKING_SET: 220}
    assert again.facts == {"evicted_pressure": 1}
    assert later.facts == first.facts


def test_working_set_is_of_one_model(prompts: Prompts) -> None:
    """Each has a cache of its own, and multiplies a floor by its own factor."""
    prompts.ask(model="n", namespace=b"of n")
    one = prompts.ask(losses={"evicted_pressure": 9})["evicted"]
    other = prompts.ask(
        losses={"evicted_pressure": 9}, model="n", namespace=b"of n", quota_scale=0.5
    )["evicted"]

    assert (one.model, one.facts[WORKING_SET]) == ("m", 220)
    assert (other.model, other.facts[WORKING_SET]) == ("n", 440)


def test_hours_are_apart_and_tenants_too(prompts: Prompts) -> None:
    one = prompts.ask(epoch="f")["restarted"]
    other = prompts.ask(epoch="g", after_s=HOUR_S)["restarted"]
    fresh = prompts.ask(epoch="h", tenant_id=2)

    assert other.hour_ms - one.hour_ms == 3_600_000
    assert set(fresh) == {NEW_CONVERSATION, FIRST_USE}


def test_counts_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregates, "COUNTS_MAX", 1)

    assert set(Prompts().ask()) == {NEW_CONVERSATION}


def test_a_promise_that_a_death_broke_is_its_own_cause(prompts: Prompts) -> None:
    """Its tokens were charged as read, so none counts as written. One that another fault broke is
    that fault's."""
    found = prompts.ask(read=200, broken=184, write={"5m": 20}, is_broken_by_death=True, epoch="f")
    other = prompts.ask(read=200, broken=184, level_miss="damaged", losses={"evicted_pressure": 1})

    assert set(found) == {"promise_broken"}
    cause = found["promise_broken"]
    assert (cause.place, cause.requests, cause.wasted_tokens) == ("5m", 1, 184)
    assert cause.facts == {}
    assert "promise_broken" not in other
