"""The command line as people and programs use it: output and exit status."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gateway.__main__ import main
from gateway.cli.commands import COMMANDS
from gateway.cli.database import prepare_data_dir
from gateway.cli.result import CommandError
from gateway.config import Config
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.declared_keys import DeclaredKey
from tenancy.accounts.declared_tenants import DeclaredTenant, reconcile
from tenancy.accounts.tenants import write_floor_blocks_max
from tenancy.ledger.ledger import Ledger
from tenancy.ledger.transactions import StorageReading, StorageReadings
from tenancy.storage.sqlite import SqliteStore
from tests.crash.ledger_child import entry
from tests.models import write_folder
from tests.tables import each_row
from tests.unit.gateway.cli.command_output import Run, data_of, error_line

ROOT = Path(__file__).parents[4]
ACTIONS = {
    "tenant": "create list set suspend resume delete",
    "key": "create list set rotate revoke",
    "levels": "show init clear verify rebuild new-key rewrap",
}


@contextmanager
def ledger_of(data: Path, now_ms: int = 0) -> Iterator[Ledger]:
    """Yield the ledger of a data directory."""
    with (
        closing(SqliteStore(data / "trunkline.db")) as store,
        closing(Ledger(store, lambda: now_ms)) as ledger,
    ):
        yield ledger


@each_row(
    "command", [*COMMANDS, *(f"{name} {one}" for name in ACTIONS for one in ACTIONS[name].split())]
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` prints to standard output with status 0."""
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])

    assert ended.value.code == 0
    assert f"usage: trunkline {command} " in capsys.readouterr().out


@pytest.mark.usefixtures("database")
@each_row(
    ("arguments", "what"),
    [
        ("", "required: COMMAND (see trunkline --help)"),
        ("serv", "unknown COMMAND: 'serv'; did you mean 'serve'?"),
        ("tenant", "tenant: the following arguments are required: ACTION"),
        ("tenant create", "tenant create: the following arguments are required: name"),
        ("key create", "one of the arguments --tenant --admin is required"),
        ("tenant create ada --floor many", "--floor: invalid int value: 'many'"),
        ("tenant set ada --ceiling x", "'x'; expected a whole number, or none"),
        ("tenant list --js", "unrecognized arguments: --js"),
        ("serve --listen 8080", "server.listen: invalid address '8080': expected HOST:PORT"),
        ("serve --device tpu", "invalid choice: 'tpu'"),
        ("serve --config nowhere.toml", "nowhere.toml cannot be read"),
        ("tenant create Ada", "invalid tenant name: 'Ada'"),
        ("tenant create ada --weight nan", "weight out of range: nan"),
        ("tenant create ada --floor 9 --ceiling 8", "ceiling_blocks is below the floor: 8"),
        ("tenant create ada --floor 99999999999999999999", "floor_blocks out of range"),
        ("tenant create default", "tenant name is taken: 'default'"),
        ("tenant set default", "nothing to change"),
        ("tenant set nobody --weight 2", "unknown tenant: 'nobody' (known: default)"),
        ("tenant suspend nobody", "unknown tenant: 'nobody'"),
        ("key create --tenant nobody", "unknown tenant: 'nobody'"),
        ("key create --tenant default --workspace A", "invalid workspace name: 'A'"),
        (
            "key create --tenant default --expires soon",
            "invalid time 'soon': expected 30m, 12h or 90d",
        ),
        ("key create --tenant default --expires 0d", "invalid time '0d'"),
        ("key list --tenant nobody", "unknown tenant: 'nobody'"),
        ("key create --tenant default --admin", "not allowed with argument --tenant"),
        ("key create --tenant default --scopes admin", "invalid scopes: 'admin'"),
        (
            "key create --tenant default --requests-at-once 0",
            "requests_at_once out of range: 0",
        ),
        (
            "key create --admin --scopes usage",
            "expected one or more of erase, money, read, tenants",
        ),
        ("key create --admin --workspace lab", "not allowed with a workspace or limits"),
        ("key set 1", "nothing to change"),
        ("key rotate 1 --grace soon", "--grace: invalid time 'soon'"),
        ("key rotate 99", "unknown key"),
        ("tenant create ada --tier A", "invalid tier name: 'A'"),
        ("budget ada --hard -5", "invalid amount: '-5'; expected dollars, such as 0.30 or 20"),
        ("tenant create ada --tokens-per-minute x", "invalid limit: 'x'; expected"),
        ("tenant create ada --classes 5m,9m", "unknown retention class '9m'; expected one of:"),
        ("tenant set default --classes 9m", "unknown retention class '9m'"),
        ("tenant set default --default-class 9m", "unknown retention class '9m'"),
        (
            "tenant create ada --classes 5m --default-class 1h",
            "default_class is not allowed: '1h'; expected one of the tenant's classes: 5m",
        ),
        ("tenant delete nobody", "unknown tenant: 'nobody'"),
        ("key revoke 99", "unknown key"),
        ("usage --days 0", "--days: 0 is out of range; expected 1 to"),
        ("audit --limit 0", "--limit: 0 is out of range; expected 1 to"),
        ("levels new-key", "FILE is required: trunkline levels new-key FILE"),
        ("usage --days 99999999", "--days: 99999999 is out of range; expected 1 to"),
        ("shared-scope ours", "--owner TENANT or --remove is required"),
        ("shared-scope --remove", "NAME is required: trunkline shared-scope NAME"),
        ("shared-scope ours --owner default --remove", "--remove is not allowed with --owner"),
        ("shared-scope ours --remove", "unknown shared scope: 'ours'"),
        ("shared-scope ours --owner nobody", "unknown tenant: 'nobody'"),
        ("shared-scope Ours --owner default", "invalid shared scope name: 'Ours'"),
        ("shared-scope ours --owner default --members a b/../c", "invalid workspace name: '../c'"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(run: Run, arguments: str, what: str) -> None:
    assert what in error_line(run, *arguments.split(), status=2)


def test_warns_of_a_floor_beyond_the_pool(run: Run, data: Path) -> None:
    """The command line knows the pool of the last started engine only."""
    _, unknown, _ = run("tenant", "create", "ada", "--floor", "300")
    store = SqliteStore(data / "trunkline.db")
    write_floor_blocks_max(store, 200)
    write_floor_blocks_max(store, 100)
    store.close()
    _, made, _ = run("tenant", "create", "bob", "--floor", "100")
    _, text, _ = run("tenant", "list")
    _, cut, _ = run("tenant", "list", "--json")
    run("tenant", "suspend", "ada")
    _, whole, _ = run("tenant", "list", "--json")

    assert "kept" not in unknown
    assert "25 of its 100 floor blocks are kept: all floors together may take 100 blocks" in made
    assert "floor_blocks_kept" in text
    assert [row["floor_blocks_kept"] for row in json.loads(cut)] == [75, 25, 0]
    assert [row["floor_blocks_kept"] for row in json.loads(whole)] == [None] * 3


def test_key_create_prints_the_key_alone(run: Run, data: Path) -> None:
    """`KEY=$(trunkline key create --tenant ada)` is a line of a script."""
    run("tenant", "create", "ada", "--floor", "8", "--weight", "2.5")
    status, out, _ = run("key", "create", "--tenant", "ada", "--workspace", "lab")
    store = SqliteStore(data / "trunkline.db")
    identity = KeyAuthenticator(store, lambda: 0, lambda: 0.0).authenticate(out.strip())
    store.close()

    assert status == 0
    assert re.fullmatch(r"tl-[0-9A-Za-z]{43}\n", out)
    assert (identity.tenant.name, identity.workspace) == ("ada", "lab")
    assert (identity.policy.floor_blocks, identity.policy.weight) == (8, 2.5)


@pytest.mark.usefixtures("database")
def test_lists_show_only_key_prefixes(run: Run) -> None:
    """To people and to programs."""
    key = data_of(run, "key", "create", "--tenant", "default")["key"]
    seen = "".join(run(*words.split())[1] for words in ("key list", "key list --json"))
    revoked = run("key", "revoke", key[:11])[1]

    assert key[:11] in seen
    assert key[:15] not in seen + revoked
    assert revoked == f"key {key[:11]}… of default revoked\n"


def test_first_command_creates_the_default_tenant_and_both_key_files(run: Run, data: Path) -> None:
    """Only their owner can read them; a second start creates no others."""
    for name in ("ada", "bob"):
        assert run("tenant", "create", name)[0] == 0
    files = [data / name for name in ("default.key", "admin.key")]
    keys = [file.read_text().strip() for file in files]
    rows = data_of(run, "key", "list")

    assert [row["name"] for row in data_of(run, "tenant", "list")] == ["ada", "bob", "default"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    assert [row["shown"] for row in rows] == [f"{key[:11]}…" for key in keys]
    assert [(row["tenant"], row["scopes"] == ["admin"]) for row in rows] == [
        ("default", False),
        (None, True),
    ]


def test_sets_and_removes_tier_limits_and_classes(run: Run) -> None:
    """`none` is no limit, `all` all classes; omitted settings stay."""
    words = "--tier gold --classes 5m,1h --promised 7 --requests-per-minute 60 --requests-at-once 4"
    words += " --default-class 1h --fidelity near --at-rest never --attention never"
    first = data_of(run, "tenant", "create", "ada", *words.split())
    words = "--classes all --promised none --requests-per-minute none --tokens-per-minute 9"
    words += " --default-class none --at-rest local --attention window=4096;sinks=64"
    second = data_of(run, "tenant", "set", "ada", *words.split())
    names = ("tier", "classes", "promised_blocks_max", "requests_per_minute", "tokens_per_minute")

    assert [first[name] for name in names] == ["gold", ["5m", "1h"], 7, 60, None]
    assert [second[name] for name in names] == ["gold", None, None, None, 9]
    assert second["requests_at_once"] == 4
    assert (first["default_class"], second["default_class"]) == ("1h", None)
    assert (first["fidelity"], second["fidelity"]) == ("near", "near")
    assert (first["at_rest"], second["at_rest"]) == ("never", "local")
    assert (first["attention"], second["attention"]) == ("never", "window=4096;sinks=64")
    assert "input_tokens_per_minute" not in run("tenant", "list")[1]


def test_deletes_a_tenant_and_keeps_its_entries(run: Run, data: Path) -> None:
    """An unused tenant leaves nothing; a customer leaves entries under a pseudonym."""
    run("tenant", "create", "aad")
    said = run("tenant", "delete", "aad")
    with ledger_of(data) as ledger:
        ledger.settle(entry("a-0")).result(60)

    assert said == (0, "tenant aad deleted\n", "")
    assert "under deleted-1" in run("tenant", "delete", "default")[1]
    for words in (
        "tenant resume deleted-1",
        "key create --tenant deleted-1",
        "budget deleted-1 --hard 1",
    ):
        assert "tenant is deleted" in error_line(run, *words.split(), status=2)


@pytest.mark.usefixtures("database")
def test_creates_shows_and_removes_a_shared_scope(run: Run) -> None:
    nothing = data_of(run, "shared-scope")
    run("tenant", "create", "ada")
    arguments = ("--owner", "default", "--members", "ada/lab", "default")
    _, said, _ = run("shared-scope", "ours", *arguments)
    listed = data_of(run, "shared-scope")
    _, table, _ = run("shared-scope")
    removed = data_of(run, "shared-scope", "ours", "--remove")

    assert nothing == []
    assert said == "shared scope ours of default: ada/lab default\n"
    assert [(one["name"], one["owner"], one["members"]) for one in listed] == [
        ("ours", "default", ["ada/lab", "default"])
    ]
    assert "ada/lab,default" in table
    assert removed == {"name": "ours", "removed": True}
    assert data_of(run, "shared-scope") == []


@pytest.mark.usefixtures("database")
def test_changes_and_rotates_a_key(run: Run) -> None:
    """Rotation prints the new key alone."""
    words = "key create --tenant default --scopes usage --requests-per-minute 5 --label a"
    run(*words.split(), "--tolerance", "strict", "--cache-key", "namespace")
    words = "key set 3 --label b --tokens-per-minute 7 --requests-per-minute none"
    run(*words.split())
    new = run("key", "rotate", "3", "--grace", "1h")[1].strip()
    rows = {row["key_id"]: row for row in data_of(run, "key", "list")}

    assert rows[4]["shown"] == new[:11] + "…"
    assert rows[4]["limits"] == rows[3]["limits"] == {"tokens_per_minute": 7}
    assert (rows[4]["label"], rows[4]["scopes"]) == ("b", ["usage"])
    assert (rows[3]["replaced_by"], rows[4]["expires_ms"]) == (4, None)
    assert rows[4]["tolerance"] == rows[3]["tolerance"] == "strict"
    assert rows[4]["cache_key"] == rows[3]["cache_key"] == "namespace"
    assert data_of(run, "key", "set", "4", "--tolerance", "server")["tolerance"] is None
    changed = data_of(run, "key", "set", "4", "--cache-key", "server")
    assert (changed["tolerance"], changed["cache_key"]) == (None, None)
    assert "tokens_per_minute:7" in run("key", "list")[1]


@pytest.mark.usefixtures("database")
def test_creates_and_revokes_an_admin_key(run: Run) -> None:
    made = data_of(run, "key", "create", "--admin", "--label", "ops", "--expires", "1d")
    said = run("key", "revoke", "3")[1]

    assert made["scopes"] == ["admin"]
    assert said == f"key {made['key'][:11]}… of an administrator revoked\n"


def test_set_changes_only_given_settings(run: Run) -> None:
    """A ceiling can be removed."""
    run("tenant", "create", "ada", "--floor", "2", "--ceiling", "9", "--priority", "-1")
    first = data_of(run, "tenant", "set", "ada", "--weight", "3")
    second = data_of(run, "tenant", "set", "ada", "--ceiling", "none")

    assert (first["floor_blocks"], first["ceiling_blocks"], first["weight"]) == (2, 9, 3.0)
    assert (second["floor_blocks"], second["ceiling_blocks"]) == (2, None)
    assert second["priority"] == -1


@pytest.mark.usefixtures("database")
def test_suspend_and_resume_show_in_the_list(run: Run) -> None:
    said = [run("tenant", verb, "default")[1] for verb in ("suspend", "resume")]
    run("tenant", "suspend", "default")

    assert said == ["tenant default is suspended\n", "tenant default is active\n"]
    assert data_of(run, "tenant", "list")[0]["status"] == "suspended"


def test_usage_has_charges_storage_and_adjustments(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sum is the bill, as in cost rows; tenants with storage alone are listed too."""
    card = {"name": "std", "model": "*", "tier": "*", "input": 1, "output": 1, "cache_read": 1}
    (tmp_path / "card.json").write_text(json.dumps({**card, "storage": {"1h": 3_600_000_000}}))
    run("tenant", "create", "idle")
    run("prices", "add", "--file", str(tmp_path / "card.json"))
    readings = StorageReadings("e1", 2**41, (StorageReading(2, "1h", 5),))
    with ledger_of(data, now_ms=2**41) as ledger:
        ledger.settle(entry("a-0")).result(60)
        ledger.write(readings).result(60)
    run("adjust", "a-0", "--debit", "0.5", "--id", "one", "--reason", "a favour")
    rows = {row["tenant"]: row for row in data_of(run, "usage")}
    narrow = run("usage")[1]
    monkeypatch.setenv("COLUMNS", "200")
    wide = run("usage")[1]

    assert rows["default"]["adjusted_usd"] == "0.500000000000"
    assert (rows["idle"]["requests"], rows["idle"]["storage_usd"]) == (0, "0.000005000000")
    assert "storage $" not in narrow
    assert "0.500000" in narrow.split("\n")[1], "the bill has its parts, shown or not"
    assert "storage $" in wide
    assert "adjusted $" in wide
    assert wide.split("\n")[3].startswith("total")


def test_check_config_shows_the_source_of_each_value(run: Run, tmp_path: Path) -> None:
    """The file, a variable, an option, or the default."""
    file = tmp_path / "t.toml"
    file.write_text("[engine]\nthreads = 2\n")
    rows = {row["setting"]: row for row in data_of(run, "check-config", "--config", str(file))}
    text = run("check-config", "--config", str(file))[1]

    assert (rows["engine.threads"]["value"], rows["engine.threads"]["from"]) == (2, str(file))
    assert rows["data_dir"]["from"] == "environment (TRUNKLINE_DATA_DIR)"
    assert rows["server.listen"]["from"] == "default"
    assert re.search(r"^engine\.threads +\S+t\.toml +2$", text, re.MULTILINE)


def test_doctor_finds_a_damaged_database_and_a_used_port(run: Run, data: Path) -> None:
    """Status 1."""
    data.mkdir()
    (data / "trunkline.db").write_text("no database" * 1000)
    (data / "t.toml").write_text('[model]\nname = "/nowhere"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = data / "t.toml"
        file.write_text(f'[model]\nname = "/nowhere"\n[server]\nlisten = "127.0.0.1:{port}"\n')
        status, out, _ = run("doctor", "--json", "--config", str(file))
    wrong = {row["check"]: row["found"] for row in json.loads(out) if not row["ok"]}

    assert status == 1
    assert {"database", "listen address", "model"} <= set(wrong)
    assert str(port) in wrong["listen address"]


def test_doctor_checks_key_files(run: Run, tmp_path: Path) -> None:
    file, secret = tmp_path / "t.toml", tmp_path / "web"
    file.write_text(f"[[tenants]]\nname = 'a'\n[[tenants.keys]]\nlabel = 'k'\nfile = '{secret}'\n")

    def found() -> tuple[bool, str]:
        rows = json.loads(run("doctor", "--json", "--config", str(file))[1])
        return {row["check"]: (row["ok"], row["found"]) for row in rows}["key files"]

    missing = found()
    secret.touch(0o600)
    secret.write_text("tl-" + "a" * 43)

    why = f"tenants: a: key 'k': {secret} cannot be read: No such file or directory"
    assert missing == (False, why)
    assert found() == (True, "1 valid")


@pytest.mark.usefixtures("database")
def test_refuses_changes_to_a_declared_key(run: Run, data: Path) -> None:
    """`key set`, `rotate` and `revoke` refuse it; a key created by hand can be changed."""
    run("tenant", "list")
    store = SqliteStore(data / "trunkline.db")
    key = DeclaredKey(label="web", sha256="0" * 64)
    reconcile(store, lambda: 1, [DeclaredTenant(name="ada", keys=(key,))])
    store.close()
    rows = data_of(run, "key", "list")

    assert [(row["label"], row["declared"]) for row in rows][2:] == [("web", True)]
    assert "sha256:00000000…" in run("key", "list", "--tenant", "ada")[1]
    for words in ("key set 3 --label x", "key rotate 3", "key revoke 3"):
        assert "configuration file" in error_line(run, *words.split(), status=2)


def test_serve_refuses_a_used_port_before_fetching(run: Run, data: Path) -> None:
    """The line names setting, address and reason."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = error_line(run, "serve", "--listen", address, status=1)

    assert f"server.listen: cannot listen on {address}: address already in use; stop" in line
    assert "ss -ltnp" in line
    assert not data.exists()


@pytest.mark.parametrize("address", ["192.0.2.1:80", "[2001:db8::1]:80"])
def test_serve_refuses_an_address_of_another_machine(run: Run, address: str) -> None:
    assert f"admin.listen: cannot listen on {address}" in error_line(
        run, "serve", "--admin-listen", address, "--listen", "127.0.0.1:0", status=1
    )


def test_error_names_an_unusable_data_directory(run: Run, tmp_path: Path) -> None:
    """By every command that creates one."""
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "data")
    free = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")

    for command in (("serve", *free), ("tenant", "create", "ada"), ("levels", "init")):
        line = error_line(run, *command, "--data-dir", place, status=1)
        assert f"cannot use the data directory {place}: not a directory" in line.lower()


@pytest.mark.parametrize(("mode", "left"), [(0o777, 0o750), (0o755, 0o750), (0o770, 0o750)])
def test_others_lose_their_rights_in_the_data_directory(
    tmp_path: Path, mode: int, left: int
) -> None:
    """Its files are their owner's alone; a folder that others may write to lets them be replaced.
    The operator is told, once."""
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(mode)
    config = Config(data_dir=str(data))

    assert f"had mode {mode:04o}; it has {left:04o} now" in prepare_data_dir(config)
    assert stat.S_IMODE(data.stat().st_mode) == left
    assert prepare_data_dir(config) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
def test_a_data_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Its owner could read keys and prompts, and change the books."""
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, 12_345, -1)

    with pytest.raises(CommandError, match="belongs to the user 12345"):
        prepare_data_dir(Config(data_dir=str(data)))


def test_serve_refuses_an_unusable_database_before_it_looks_for_the_model(
    run: Run, data: Path
) -> None:
    """A model may take minutes to fetch."""
    data.mkdir()
    (data / "trunkline.db").write_text("no database" * 1000)
    free = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")

    assert "trunkline.db" in error_line(run, "serve", "some/model", *free, status=1)


def test_missing_model_error_names_the_remedy(run: Run) -> None:
    """Only a built-in model is fetched without `pull`."""
    free = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
    line = error_line(run, "serve", "some/model", *free, status=1)

    assert "'some/model' is neither a built-in model" in line
    assert "has to be pulled first, by its id: trunkline pull " in line


def test_pull_of_an_existing_model_prints_its_path(run: Run, tmp_path: Path) -> None:
    """A local folder needs no network."""
    folder = write_folder(tmp_path / "tiny")
    answer = data_of(run, "pull", str(folder))

    assert run("pull", str(folder)) == (0, f"{folder}\n", "")
    assert run("pull", str(folder), "--quiet") == (0, "", "")
    assert answer == {"model": str(folder), "path": str(folder)}


def test_closed_pipe_is_not_an_error(data: Path) -> None:
    """`trunkline check-config | head -1` ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gateway", "check-config", "--data-dir", str(data)],
            stdout=writer,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (0, b"")


def test_a_character_that_output_cannot_hold_is_written_by_number(run: Run, data: Path) -> None:
    """Labels have any character; terminals and pipes of other locales do not."""
    data_of(run, "tenant", "create", "ada")
    data_of(run, "key", "create", "--tenant", "ada", "--label", "Jörg 日")
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "key", "list", "--data-dir", str(data)],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, b"")
    assert "Jörg \\u65e5".encode("latin-1") in done.stdout


def test_audit_lists_and_exports_changes(run: Run, tmp_path: Path) -> None:
    """By the user that ran each command; an export has all of them."""
    data_of(run, "tenant", "create", "ada")
    data_of(run, "tenant", "set", "ada", "--weight", "2.5")
    key = data_of(run, "key", "create", "--tenant", "ada", "--label", "laptop")["key"]
    listed = data_of(run, "audit", "--tenant", "ada")
    one = data_of(run, "audit", "--action", "tenant.change", "--limit", "1")
    status, table, _ = run("audit")
    lines, sheet = tmp_path / "log.jsonl", tmp_path / "log.csv"
    data_of(run, "audit", "--out", str(lines), "--format", "jsonl")
    data_of(run, "audit", "--out", str(sheet), "--action", "key")

    assert [row["action"] for row in listed] == ["key.create", "tenant.change", "tenant.create"]
    assert {row["actor"] for row in listed} == {"command"}
    assert (one[0]["before"], one[0]["after"]) == ({"weight": 1.0}, {"weight": 2.5})
    assert (status, "laptop" in table, key in table) == (0, True, False)
    assert [json.loads(line) for line in lines.read_text().splitlines()] == listed
    assert len(sheet.read_text().splitlines()) == 2
    assert "unknown action" in error_line(run, "audit", "--action", "nothing", status=2)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_standard_output_is_named(unbuffered: str) -> None:
    """The system's error of a write names no file. A buffer is written again at the end."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gateway", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            timeout=60,
            check=False,
        )

    assert done.returncode == 1
    assert done.stderr == (
        "trunkline: standard output: No space left on device; free space there, or write to"
        " another disk\n"
    )


def test_pull_finds_every_listed_model(run: Run, data: Path, tmp_path: Path) -> None:
    """Each file once; a name fetches that model alone."""
    folders = [write_folder(tmp_path / name) for name in ("one", "two")]
    tables = "".join(f"[[models]]\nname = '{one.name}'\npath = '{one}'\n" for one in folders)
    (tmp_path / "t.toml").write_text(tables)
    given = ("--config", str(tmp_path / "t.toml"))

    assert run("pull", *given) == (0, f"{folders[0]}\n{folders[1]}\n", "")
    assert run("pull", "two", *given) == (0, f"{folders[1]}\n", "")


def test_serve_refuses_models_that_do_not_fit_together(run: Run, tmp_path: Path) -> None:
    """Before anything is loaded, with each model's numbers."""
    folder = write_folder(tmp_path / "one")
    settings = [
        *("[server]", "listen = '127.0.0.1:0'", "[admin]", "listen = '127.0.0.1:0'"),
        *("[engine]", "device = 'cpu'", "kv_memory_mib = 100_000_000"),
        *(f"[[models]]\nname = '{name}'\npath = '{folder}'" for name in ("a", "b")),
    ]
    (tmp_path / "t.toml").write_text("\n".join(settings))
    status, _, line = run("serve", "--config", str(tmp_path / "t.toml"))

    assert status == 1
    assert "100000000 for a's KV" in line
    assert "lower kv_memory_mib in [models.engine]" in line
