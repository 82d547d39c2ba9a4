"""`trunkline advise` and `trunkline check-prompt`: their text, JSON and exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenancy.accounts.tenants import create_tenant
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.reuse.finding_counts import FindingCount, add_counts
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import HOUR_MS, wall_ms
from tests.models import write_folder
from tests.unit.gateway.cli.command_output import Run, data_of, error_line

STABLE = "You answer questions about leave, travel and pay from the handbook. Be short, be polite."


@pytest.fixture
def store(data: Path) -> SqliteStore:
    """A database with two tenants, one of which has a finding."""
    data.mkdir()
    store = SqliteStore(data / "trunkline.db")
    add_card(store, wall_ms, RateCard("std", input=1_000_000, cache_read=100_000))
    for name in ("ada", "bob"):
        create_tenant(store, wall_ms, name)
    now_ms = wall_ms()
    hour_ms = now_ms // HOUR_MS * HOUR_MS
    facts = {"at": 9 * 5, "part_tokens": 9 * 300, "changed": 9, "behind": 9}
    add_counts(
        store,
        [
            FindingCount(
                1, hour_ms, "system_changes", "system", 9, 9_000, now_ms, now_ms, ("r1",), facts
            ),
            FindingCount(1, hour_ms, "new_conversation", "", 1, 0, now_ms, now_ms),
        ],
    )
    store.close()
    return store


@pytest.mark.usefixtures("store")
def test_advise_prints_sentence_cure_and_saving(run: Run) -> None:
    status, out, _ = run("advise")

    assert status == 0
    assert out.startswith("ada: the system message changes near its beginning in 9 of 9 requests")
    assert "Put the changing part of system behind the stable text" in out
    # $0.0081 in a window of 7 days, of which no request's time is known.
    assert "Saves about $0.035 a month, at the pace of the last 7 d." in " ".join(out.split())
    assert "new conversation" not in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.usefixtures("store")
def test_advise_filters_and_prints_json(run: Run) -> None:
    found = data_of(run, "advise", "--tenant", "ada", "--days", "7")

    assert [one["cause"] for one in found["findings"]] == ["system_changes", "new_conversation"]
    assert run("advise", "--tenant", "bob")[1].startswith("No finding")
    assert "unknown tenant: 'zoe'" in error_line(run, "advise", "--tenant", "zoe", status=2)
    assert "--days: 0 is out of range" in error_line(run, "advise", "--days", "0", status=2)


def body(path: Path, system: str, question: str = "How?") -> str:
    """Write a request; return its path."""
    roles = (("system", system), ("user", question))
    messages = [{"role": role, "content": text} for role, text in roles]
    path.write_text(json.dumps({"model": "m", "messages": messages}))
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_folder(tmp_path / "tiny"))


def test_check_prompt_names_the_place_and_the_price(
    run: Run, tmp_path: Path, model: str, store: SqliteStore
) -> None:
    one = body(tmp_path / "a.json", f"Now: 10:31. {STABLE}")
    two = body(tmp_path / "b.json", f"Now: 10:42. {STABLE}")
    status, out, _ = run("check-prompt", one, two, "--model", model, "--min-shared", "90%")

    assert status == 1
    assert "They part at messages[0].content, character 9, token" in out
    assert "the system message changes before" in out
    assert "1,000 such prompts cost $0." in out
    assert out.rstrip().endswith("less than --min-shared 90.0%")


def test_check_prompt_passes_what_is_shared_enough(run: Run, tmp_path: Path, model: str) -> None:
    one = body(tmp_path / "a.json", STABLE)
    two = body(tmp_path / "b.json", STABLE, "Who?")
    arguments = ("check-prompt", one, two, "--model", model)
    found = data_of(run, *arguments, "--min-shared", "0.7", "--dialect", "openai")

    assert found["is_enough"]
    assert found["shared_share"] > 0.7
    assert found["path"] == "messages[1].content"
    assert run(*arguments, "--min-shared", "99%")[0] == 1
    assert "nothing new" in run("check-prompt", one, one, "--model", model)[1]


@pytest.mark.parametrize(
    ("text", "more", "what"),
    [
        (None, "", "cannot read"),
        ("[]", "", "not a JSON object"),
        ('{"model": "m"}', "", "cannot render: "),
        ('{"model": "m", "prompt": ["a", "b"]}', "", "prompt: 2 prompts; expected one"),
        ("{}", "--min-shared 110%", "invalid share: '110%'; expected"),
        ("{}", "--model nowhere/at-all", "cannot load the model nowhere/at-all"),
    ],
)
def test_check_prompt_says_which_input_is_bad(
    run: Run, tmp_path: Path, model: str, text: str | None, more: str, what: str
) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    arguments = ["--model", model, *more.split()]

    assert what in error_line(run, "check-prompt", str(path), str(path), *arguments, status=2)
