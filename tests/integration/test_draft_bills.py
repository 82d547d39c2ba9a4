"""Bills never see drafts: the ledger of a gateway whose engine drafts is that of one whose engine
does not, and so are its hits and what its clients are told of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.model_store import ModelCard
from tests.unit.gateway.gateway_fixture import GatewayFixture

TEXT = "one line after another, and one line after another, until the last line of them all"
BILLED = """tenant_id, model, ending, prompt_tokens, cache_read_tokens, cache_write_tokens,
    fresh_tokens, output_tokens, physical_cached_tokens, reads, writes, dialect, rate_card_id,
    charge_pico, saved_pico, recomputed_promised_tokens"""
DRAFT_COUNTS = ("accepted_prediction_tokens", "rejected_prediction_tokens")


def conversation(gateway: GatewayFixture) -> list[tuple[str, dict[str, Any]]]:
    """Return requests that write, renew and read leases, in two dialects, each with a path."""
    kept = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": "always the same instructions " * 9, "cache_control": kept}]
    asked: list[tuple[str, dict[str, Any]]] = []
    turns: list[dict[str, Any]] = []
    for number in range(3):
        turns += [{"role": "user", "content": f"question {number}, if you please"}]
        body = {"model": gateway.model, "system": system, "messages": [*turns], "max_tokens": 40}
        asked.append(("/v1/messages", body))
        turns += [{"role": "assistant", "content": TEXT}]
    predicted = {"type": "content", "content": TEXT}
    for more in ({}, {"prediction": predicted}, {"n": 2}, {"logprobs": True}):
        body = gateway.chat("a further question", max_tokens=30, ignore_eos=False, **more)
        asked.append(("/v1/chat/completions", body))
    return asked


def without_ids(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer without its id, its time and what it says of drafts."""
    said = {name: answer[name] for name in answer if name not in ("id", "created")}
    details = dict(said["usage"].get("completion_tokens_details", {}))
    kept = {name: details[name] for name in details if name not in DRAFT_COUNTS}
    return {**said, "usage": {**said["usage"], "completion_tokens_details": kept}}


@pytest.fixture
def gateways(card: ModelCard, tmp_path: Path) -> Iterator[list[GatewayFixture]]:
    """Yield a gateway whose engine drafts, and one whose engine does not, both not open."""
    made = []
    for name, draft_step_s in (("drafted", (1.0,) * 64), ("plain", ())):
        folder = tmp_path / name
        folder.mkdir()
        made.append(GatewayFixture(card, folder))
        made[-1].context_tokens = 2_048
        made[-1].draft_step_s = draft_step_s
    yield made
    for gateway in made:
        gateway.discard()


async def billed(
    gateway: GatewayFixture,
) -> tuple[list[dict[str, Any]], list[Any], list[dict[str, Any]], int]:
    """Return a gateway's answers, its ledger, the drafts it has counted, and its engine's steps."""
    await gateway.open()
    gateway.say(TEXT)
    answers = []
    for who in ("ada", "bob"):
        for path, body in conversation(gateway) * 2:
            status, answer, _ = await gateway.ask(path, body, who=who)
            assert status == 200, answer
            answers.append(without_ids(answer))
    await gateway.check_quiet()
    ledger = gateway.store.query(f"select {BILLED} from ledger order by entry_id")
    drafts, steps = gateway.gateway.context.metrics.drafts.rows(), gateway.runner.steps
    await gateway.close()
    return answers, ledger, drafts, steps


@pytest.mark.usefixtures("no_periodic_tasks")
async def test_answers_hits_leases_and_the_ledger_are_those_without_drafts(
    gateways: list[GatewayFixture],
) -> None:
    """The steps show that the one has drafted most of its tokens."""
    answers, ledger, drafts, steps = await billed(gateways[0])
    plain, books, none, most = await billed(gateways[1])

    assert answers == plain
    assert ledger == books
    assert any(row[4] for row in ledger)
    assert any(row[5] for row in ledger)
    assert (none, {row["source"] for row in drafts}) == ([], {"ngram", "prediction", "suffix"})
    assert steps < most / 2
