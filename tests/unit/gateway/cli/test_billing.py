"""Billing by command: dollars in, exact integers stored, one line for an error."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.__main__ import main
from gateway.cli import database as commands_database
from tenancy.accounts.authentication import REFRESH_S as KEYS_REFRESH_S
from tenancy.ledger.ledger import EngineTotals, Ledger
from tenancy.pricing.budget_watch import REFRESH_S
from tenancy.storage.backends import open_store
from tenancy.storage.interface import Store
from tenancy.types import DAY_MS, UsageEntry, wall_ms
from tests.tables import each_row
from tests.unit.gateway.cli.command_output import Run, data_of, error_line
from tests.unit.tenancy.storage.postgres_server import Server

CARD = {"name": "std", "input": 1_000_000, "output": 2_000_000}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    """Return the database as the configuration names it."""
    if request.param == "sqlite":
        return "books.db"
    server: Server = request.getfixturevalue("postgres_server")
    return server.url(server.database(is_empty=True))


@pytest.fixture
def run(
    data: Path,
    database: str,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    monkeypatch.delenv("TRUNKLINE_MODEL", raising=False)
    config = data.with_name("trunkline.toml")
    config.write_text(f'tenancy.database = "{database}"\n')
    monkeypatch.setenv("TRUNKLINE_CONFIG", str(config))
    monkeypatch.setenv("TRUNKLINE_DATA_DIR", str(data))

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        out, err = capfdbinary.readouterr()
        return status, out.decode(), err.decode()

    assert run("tenant", "create", "ada")[0] == 0
    return run


@pytest.fixture
def priced(run: Run, tmp_path: Path) -> Run:
    """Set a rate card, with an entry of two micro-dollars from yesterday and one from today."""
    (tmp_path / "card.json").write_text(json.dumps(CARD))
    assert run("prices", "add", "--file", str(tmp_path / "card.json"))[0] == 0
    return run


@pytest.fixture
def open_ledger(data: Path, database: str) -> Callable[[], Store]:
    """Open the ledger beside the command."""
    return lambda: open_store(database, data, {})


Books = Callable[[], Store]


def use(open_ledger: Books, request_id: str, days_ago: int, epoch: str = "") -> None:
    """Write an entry of ten prompt tokens and one output token for the tenant `ada`."""
    store = open_ledger()
    ((tenant_id,),) = store.query("select tenant_id from tenants where name = 'ada'")
    ledger = Ledger(store, wall_ms)
    at_ms = wall_ms() - days_ago * DAY_MS
    entry = UsageEntry(
        request_id, tenant_id, 1, "m", "done", at_ms, at_ms, 10, 0, 0, 10, 1, 0, epoch=epoch
    )
    ledger.settle(entry).result(60)
    if epoch:
        totals = EngineTotals(epoch, at_ms, 10, 0, 1, 10, 0, 1, is_ended=True)
        ledger.write(totals).result(60)
    ledger.close()
    store.close()


def test_without_rate_cards_says_that_nothing_is_charged(run: Run) -> None:
    assert run("prices")[1] == "no rate cards: nothing is charged\n"


def test_adds_and_lists_rate_cards(priced: Run, tmp_path: Path) -> None:
    """And a second version."""
    priced("prices", "add", "--file", str(tmp_path / "card.json"))
    cards = data_of(priced, "prices")
    text = priced("prices")[1]

    assert [card["id"] for card in cards] == ["std@1", "std@2"]
    assert cards[0]["output"] == 2_000_000
    assert text.startswith("dollars per million tokens")
    assert " 1.00 " in text.split("\n")[2]
    assert "{" not in text


def test_prices_are_typed_in_dollars(run: Run) -> None:
    """Per million tokens, as every provider publishes them; stored as whole micro-dollars."""
    words = "--input 0.25 --output 2 --cache-read 0.025 --minimum 0.01 --storage 1h=0.0005"
    words += " --cache-write 5m=0.3125 --cache-write 1h=0.5"
    _, said, _ = run("prices", "add", "std", *words.split())
    (card,) = data_of(run, "prices")
    text = run("prices")[1]

    assert "warning" not in said
    assert (card["input"], card["output"], card["cache_read"]) == (250_000, 2_000_000, 25_000)
    assert card["cache_write"] == {"5m": 312_500, "1h": 500_000}
    assert (card["storage"], card["minimum_charge"]) == ({"1h": 500}, 10_000)
    assert "1h=0.50,5m=0.3125" in text


@each_row(
    ("words", "what"),
    [
        ("add --input 1", "NAME is required: trunkline prices add NAME"),
        ("add std --input 1", "--input USD and --output USD are required"),
        ("add a --input 0.0000001 --output 1", "--input: 1E-7 dollars are not whole micro-dollars"),
        ("add std --input 1 --output 1 --file x.json", "--file is not allowed with NAME"),
        ("list --input 3 --output 15", "expected trunkline prices add NAME --input USD"),
        ("list --until 2027-01-01", "--until is not allowed with list"),
        ("std --input 3", "invalid choice: 'std' (choose from"),
        ("end", "NAME is required: trunkline prices end NAME"),
        ("end std", "unknown rate card: 'std'; expected one of: none"),
    ],
)
def test_prices_by_options_are_checked(run: Run, words: str, what: str) -> None:
    assert what in error_line(run, "prices", *words.split(), status=2)


def test_a_card_is_ended_now_or_later(priced: Run) -> None:
    """By its name alone, with its prices; then another name may have its place."""
    later = priced("prices", "end", "std", "--until", "2999-01-01")[1]
    ended = data_of(priced, "prices", "end", "std")
    again = error_line(priced, "prices", "end", "std", status=2)
    added = priced("prices", "add", "other", "--input", "1", "--output", "1")
    cards = data_of(priced, "prices", "list")

    assert later == "std@2 ends at 2999-01-01 00:00:00\n"
    assert (ended["input"], ended["output"]) == (CARD["input"], CARD["output"])
    assert ended["valid_until_ms"] - ended["valid_from_ms"] == 1
    assert "std does not apply now" in again
    assert (added[0], added[1][:7]) == (0, "other@1")
    assert [card["id"] for card in cards] == ["other@1", "std@1", "std@2", "std@3"]
    assert [one["id"] for one in data_of(priced, "prices", "list", "other")] == ["other@1"]


def test_an_end_does_not_skip_prices_that_begin_before_it(priced: Run, tmp_path: Path) -> None:
    """They would be replaced by those of today."""
    begins_ms = wall_ms() + DAY_MS
    (tmp_path / "next.json").write_text(json.dumps({**CARD, "valid_from_ms": begins_ms}))
    priced("prices", "add", "--file", str(tmp_path / "next.json"))

    line = error_line(priced, "prices", "end", "std", "--until", "2999-01-01", status=2)
    past = error_line(priced, "prices", "end", "std", "--until", "2020-01-01", status=2)

    assert "std@2 has other prices from" in line
    assert "not in the future" in past


def test_warns_of_prices_that_are_probably_in_another_unit(run: Run, tmp_path: Path) -> None:
    """Three dollars written as 3 in a file of micro-dollars would give everything away."""
    (tmp_path / "card.json").write_text('{"name": "std", "input": 3, "output": 15000000}')
    _, from_file, _ = run("prices", "add", "--file", str(tmp_path / "card.json"))
    _, typed, _ = run("prices", "add", "std", "--input", "0.0009", "--output", "0.001")

    assert "warning: below $0.001 per million tokens: input $0.000003." in from_file
    assert "warning: below $0.001 per million tokens: input $0.0009." in typed


@each_row(
    ("text", "word"),
    [
        ("{", "not a rate card"),
        ('{"name": "x", "input": -1}', "input"),
        ('{"name": "x", "input": 1.5}', "not a rate card"),
        ('{"name": "x", "imput": 1}', "imput"),
        ("\x00", "not a rate card"),
        ('{"name": "x", "storage": {"1 h": 1}}', "unknown retention class '1 h'"),
        ('{"name": "x", "input": 1, "input": 2}', "duplicate key 'input'"),
        ('{"name": "x", "cache_write": {"5m": 1, "5m": 2}}', "duplicate key '5m'"),
    ],
)
def test_refuses_an_invalid_rate_card_in_one_line(
    run: Run, tmp_path: Path, text: str, word: str
) -> None:
    """The line names the file or the field."""
    (tmp_path / "bad.json").write_text(text)

    assert word in error_line(run, "prices", "add", "--file", str(tmp_path / "bad.json"), status=2)


def test_warns_of_a_tier_without_tenants_or_cards(run: Run, tmp_path: Path) -> None:
    """A typo in a tier would give everything away silently."""
    card = tmp_path / "card.json"
    card.write_text(json.dumps({**CARD, "tier": "glod"}))
    before = run("tenant", "set", "ada", "--tier", "gold")[1]
    added = run("prices", "add", "--file", str(card))[1]
    after = run("tenant", "set", "ada", "--tier", "gold")[1]
    mended = run("tenant", "set", "ada", "--tier", "glod")[1]
    again = run("prices", "add", "--file", str(card))[1]

    assert before == mended == "tenant ada changed\n"
    assert after == (
        "tenant ada changed; no rate card applies to tier 'gold': nothing is charged\n"
    )
    assert added.endswith("; no tenant has the tier 'glod' yet\n")
    assert "yet" not in again


def test_refuses_overlapping_rate_cards(priced: Run, tmp_path: Path) -> None:
    """The message names the other card."""
    (tmp_path / "other.json").write_text(json.dumps({**CARD, "name": "other"}))

    line = error_line(priced, "prices", "add", "--file", str(tmp_path / "other.json"), status=2)

    assert "std@1" in line


def test_sets_budgets_in_dollars_and_shows_them_exactly(priced: Run, open_ledger: Books) -> None:
    """To the pico-dollar; --remove removes one."""
    use(open_ledger, "r", 0)
    priced("budget", "ada", "--hard", "12.50", "--soft", "0.000001", "--window", "day")
    (row,) = data_of(priced, "budget")

    assert (row["hard_usd"], row["spent_usd"]) == ("12.500000", "0.000012000000")
    assert (row["window"], row["over_soft"]) == ("day", True)
    assert data_of(priced, "budget", "ada", "--window", "day", "--remove") == []


def test_a_keys_budget_names_the_key_by_label_id_or_prefix(run: Run) -> None:
    """As `key list` shows them; a wrong one is answered with those that exist."""
    made = data_of(run, "key", "create", "--tenant", "ada", "--label", "web")
    for which in ("web", str(made["key_id"]), made["key"][:11], made["key"]):
        (row,) = data_of(run, "budget", "ada", "--key", which, "--hard", "20")
        assert (row["key_id"], row["key"]) == (made["key_id"], "web")
    wrong = error_line(run, "budget", "ada", "--key", "wbe", "--hard", "20", status=2)
    alone = error_line(run, "budget", "--key", "web", status=2)
    run("budget", "ada", "--hard", "50")

    assert f"'wbe'; expected one of: {made['key_id']} (web)" in wrong
    assert "TENANT is required" in alone
    assert [row["key"] for row in data_of(run, "budget", "ada")] == [None, "web"]
    assert [row["key"] for row in data_of(run, "budget", "ada", "--key", "web")] == ["web"]


def test_a_label_of_two_keys_names_neither(run: Run) -> None:
    """A revoked one does not count."""
    first, _ = (
        data_of(run, "key", "create", "--tenant", "ada", "--label", "web") for _ in range(2)
    )
    both = error_line(run, "budget", "ada", "--key", "web", "--hard", "20", status=2)
    run("key", "revoke", str(first["key_id"]))

    assert "2 keys of ada have" in both
    assert run("budget", "ada", "--key", "web", "--hard", "20")[0] == 0


def test_a_limit_that_is_not_given_stays(run: Run) -> None:
    """A soft limit for alerts must not end the hard one, which bounds what is spent."""
    run("budget", "ada", "--hard", "20")
    run("budget", "ada", "--soft", "16")
    (row,) = data_of(run, "budget")
    assert (row["hard_usd"], row["soft_usd"]) == ("20.000000", "16.000000")

    assert "above the hard one" in error_line(run, "budget", "ada", "--soft", "21", status=2)
    run("budget", "ada", "--hard", "none")
    (row,) = data_of(run, "budget")
    assert (row["hard_usd"], row["soft_usd"]) == (None, "16.000000")
    assert data_of(run, "budget", "ada", "--soft", "none") == []


def test_returns_after_a_server_knows_a_change(
    run: Run, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server polls a file, for budgets and keys; a remote store it asks. Reading changes
    nothing."""
    waits: list[float] = []
    monkeypatch.setattr(commands_database, "sleep", waits.append)
    run("budget", "ada", "--hard", "1")
    run("budget", "ada")

    assert waits == ([max(REFRESH_S, KEYS_REFRESH_S)] if database == "books.db" else [])


@each_row(
    "arguments",
    [
        ["budget", "--hard", "1"],
        ["budget", "ada", "--hard", "0.0000001"],
        ["budget", "ada", "--hard", "1", "--soft", "2"],
        ["budget", "ada", "--hard", "1", "--key", "99"],
        ["budget", "ada", "--hard", "1", "--remove"],
    ],
)
def test_refuses_an_invalid_budget_in_one_line(run: Run, arguments: list[str]) -> None:
    error_line(run, *arguments, status=2)

    assert data_of(run, "budget") == []


@each_row("amount", ["-1", "x", "inf", "nan", "1e99", "1" * 50])
def test_invalid_amount_has_status_2(run: Run, amount: str) -> None:
    assert "dollars" in error_line(run, "budget", "ada", f"--hard={amount}", status=2)


def test_adjustment_is_booked_once_per_id(priced: Run, open_ledger: Books) -> None:
    use(open_ledger, "r", 0)
    arguments = ["adjust", "r", "--credit", "0.000001", "--id", "x", "--reason", "an outage"]
    first, second = priced(*arguments), priced(*arguments)

    assert (first[1], second[1]) == ("adjustment x booked\n", "adjustment x was already booked\n")
    for amount, what in (("5", "Credit exceeds the charge: 5.000000000000"), ("1e-13", "pico")):
        again = (*arguments[:3], amount, "--id", "y", "--reason", "r")
        assert what in error_line(priced, *again, status=2)


@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-", "msg_", "resp_", ""])
def test_accepts_a_response_id_for_its_entry(priced: Run, open_ledger: Books, prefix: str) -> None:
    """A customer quotes the id of the response."""
    request_id = "01a201edec94b1e1484167eb389824b3"
    use(open_ledger, request_id, 0)
    booked = data_of(
        *(priced, "adjust", f"{prefix}{request_id}", "--credit", "0.000001"),
        *("--id", f"outage-7:{request_id}", "--reason", "an outage"),
    )

    assert (booked["request_id"], booked["is_new"]) == (request_id, True)


def test_closes_and_lists_days(priced: Run, open_ledger: Books) -> None:
    """Sums are strings, so that no program rounds them."""
    use(open_ledger, "r", 1)
    early = data_of(priced, "close")
    use(open_ledger, "later", 0)
    (day,) = data_of(priced, "close")

    assert (early, day["entries"], day["prompt_tokens"]) == ([], 1, 10)
    assert isinstance(day["charge_pico"], str)
    assert data_of(priced, "close", "--list") == [day]
    assert priced("close")[1] == "nothing to close\n"
    assert "already closed" in error_line(priced, "close", "--through", day["day"])
    assert "Invalid day" in error_line(priced, "close", "--through", "x", status=2)


def test_check_books_exits_1_with_findings(priced: Run, open_ledger: Books) -> None:
    use(open_ledger, "r", 0)
    right = priced("check-books")
    store = open_ledger()
    with store.change() as db:
        db.execute("update usage_hours set output_tokens = 9")
    store.close()
    wrong = priced("check-books")

    assert right[:2] == (0, "all checks passed\n")
    assert (wrong[0], "output_tokens is 9" in wrong[1]) == (1, True)


def test_reconcile_prints_the_difference(priced: Run, open_ledger: Books) -> None:
    """Zero, as a number."""
    before = priced("reconcile")
    use(open_ledger, "r", 0, "e1")
    (row,) = data_of(priced, "reconcile")

    assert before[:2] == (0, "no engine epoch recorded yet\n")
    assert (row["ledger_minus_engine"], row["ledger_minus_metrics"]) == ("0/0/0", "0/0/0")
    use(open_ledger, "s", 0, "e1")
    apart = priced("reconcile")
    assert (apart[0], "10/0/1" in apart[1]) == (1, True)


def test_exports_to_standard_output_or_a_file(
    priced: Run, open_ledger: Books, tmp_path: Path
) -> None:
    """The bytes are equal."""
    use(open_ledger, "r", 0)
    for form in ("csv", "focus", "cloudevents"):
        status, out, _ = priced("export", "--format", form)
        size = data_of(priced, "export", "--format", form, "--out", str(tmp_path / "out"))["bytes"]
        assert status == 0
        assert (tmp_path / "out").read_bytes().decode() == out
        assert size == len(out.encode())
    count = data_of(priced, "export", "--format", "parquet", "--out", str(tmp_path / "out.parquet"))
    assert count == {"entries": 1}
    assert {file.name for file in tmp_path.iterdir()} >= {"out", "out.parquet"}


def test_exports_a_half_open_period(priced: Run, open_ledger: Books) -> None:
    """Days and instants."""
    use(open_ledger, "old", 40)
    use(open_ledger, "new", 0)

    def ids(*arguments: str) -> list[str]:
        _, out, _ = priced("export", "--format", "csv", *arguments)
        return [row["request_id"] for row in csv.DictReader(io.StringIO(out, newline=""))]

    assert ids() == ["old", "new"]
    assert ids("--since", "1999-01-01", "--until", "1999-01-02T10:00:00Z") == []
    assert ids("--tenant", "ada") == ["old", "new"]
    assert ids("--tenant", "default") == []


@each_row(
    ("arguments", "word"),
    [
        (["--format", "csv", "--since", "soon"], "--since"),
        (["--format", "csv", "--since", "2026-11-21", "--until", "2026-11-20"], "must be before"),
        (["--format", "csv", "--since", "2026-11-21", "--until", "2026-11-21"], "must be before"),
        (["--format", "csv", "--json"], "--out"),
        (["--format", "parquet"], "--out"),
    ],
)
def test_refuses_an_invalid_export_in_one_line(run: Run, arguments: list[str], word: str) -> None:
    """Before anything is written."""
    assert word in error_line(run, "export", *arguments, status=2)


@each_row(
    "command",
    [
        *("check-books", "reconcile", "close", "usage", "prices", "budget", "export --format csv"),
        *("tenant list", "key list", "key revoke 1", "shared-scope", "tenant suspend default"),
    ],
)
def test_refuses_a_missing_database(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A misspelt folder would otherwise get a new, correct, empty ledger."""
    monkeypatch.setenv("TRUNKLINE_CONFIG", os.devnull)
    folder = tmp_path / "misspelt"
    error = error_line(run, *command.split(), "--data-dir", str(folder))

    assert f"database not found: {folder / 'trunkline.db'}" in error
    assert not folder.exists()


def test_error_names_an_unknown_tenant(run: Run) -> None:
    """With those that exist."""
    assert "ada" in error_line(run, "export", "--format", "csv", "--tenant", "x'--", status=2)
    assert "ada" in error_line(run, "usage", "--tenant", "nobody", status=2)
