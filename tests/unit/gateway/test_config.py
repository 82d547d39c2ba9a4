"""Configuration: the message for each mistake, and the source of each value."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from gateway.config import (
    Config,
    ConfigError,
    effective,
    format_address,
    load_config,
    parse_address,
)
from tenancy.errors import BadPrice
from tenancy.pricing.charges import RateCard
from tenancy.types import Limits
from tests.tables import each_row


def load(
    folder: Path, text: str, environment: dict[str, str] | None = None, **flags: object
) -> Config:
    file = folder / "trunkline.toml"
    file.write_text(text)
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return load_config(file, environment or {}, given)[0]


def test_every_setting_has_a_default() -> None:
    """`trunkline serve` alone is a server on this machine, for this machine."""
    config, origin = load_config(None, {}, {})

    assert config == Config()
    assert (config.server.listen, config.admin.listen) == ("127.0.0.1:8080", "127.0.0.1:8081")
    assert origin == {}


def test_flags_override_environment_file_and_defaults(tmp_path: Path) -> None:
    """Each value's origin is recorded."""
    file = tmp_path / "trunkline.toml"
    file.write_text('data_dir = "from-file"\n[model]\nname = "m"\n[limits]\nchoices_max = 4\n')
    environment = {"TRUNKLINE_DATA_DIR": "from-environment", "TRUNKLINE_MODEL": "n"}
    config, origin = load_config(file, environment, {"model.name": "o"})
    shown = {path: (value, source) for path, value, source in effective(config, origin)}

    assert shown["limits.choices_max"] == (4, str(file))
    assert shown["data_dir"] == ("from-environment", "environment (TRUNKLINE_DATA_DIR)")
    assert shown["model.name"] == ("o", "command line")
    assert shown["server.body_bytes_max"] == (10 * 2**20, "default")


def test_empty_environment_variable_is_ignored() -> None:
    """`TRUNKLINE_DATA_DIR= trunkline serve` means the default."""
    config, origin = load_config(None, {"TRUNKLINE_DATA_DIR": ""}, {})

    assert (config, origin) == (Config(), {})


def test_effective_settings_load_again(tmp_path: Path) -> None:
    """Each setting is shown under the name that the file takes."""
    rows = effective(Config(), {})
    sections: dict[str, list[str]] = {}
    for path, value, _ in rows:
        if value is not None:
            section, _, name = path.rpartition(".")
            line = f"{name} = {msgspec.json.encode(value).decode()}"
            sections.setdefault(section, []).append(line)
    text = "".join(
        (f"[{section}]\n" if section else "") + "\n".join(lines) + "\n"
        for section, lines in sorted(sections.items())
    )

    assert load(tmp_path, text) == Config()


SCOPE = '[[tenancy.shared_scopes]]\nname = "ours"\nowner = "ada"\n'


@each_row(
    ("text", "told"),
    [
        ("[server]\nlisten_on = '0.0.0.0:1'", "unknown setting server.listen_on; did you mean"),
        ("[sever]\nlisten = '0.0.0.0:1'", "unknown setting sever; did you mean server?"),
        ("zzz = 1", "unknown setting zzz; expected one of data_dir, server, admin"),
        ("[engine]\nthread = 2", "did you mean engine.threads?"),
        ("[server]\nbody_bytes_max = '10MB'", "server.body_bytes_max: Expected `int`, got `str`"),
        ("[server]\nbody_bytes_max = 0", "server.body_bytes_max: Expected `int` >= 1 (it is 0)"),
        (
            "[server]\nbody_bytes_in_flight_max = 1_000",
            "server.body_bytes_in_flight_max: 1000 is too small for server.body_bytes_max"
            " (10485760); expected at least 83886080",
        ),
        ("[server]\nheader_timeout_s = -1", "server.header_timeout_s: Expected `float` > 0"),
        ("[server]\nheader_timeout_s = nan", "server.header_timeout_s: Expected `float`"),
        ("[server]\nheader_timeout_s = inf", "server.header_timeout_s: Expected `float`"),
        ("[server]\nhosts = 'localhost'", "server.hosts: Expected `array`, got `str`"),
        ("[server]\nhosts = [1]", "server.hosts[0]: Expected `str`, got `int`"),
        ("server = 3", "server: Expected `object`, got `int` (it is 3)"),
        (
            "[engine]\ndevice = 'tpu'",
            "engine.device: Expected one of 'auto', 'cpu', 'cuda' (it is 'tpu')",
        ),
        ("[engine]\nblock_size = 32", "engine.block_size: Expected one of 16 (it is 32)"),
        ("[log]\nrequests = 1", "log.requests: Expected `bool`, got `int`"),
        ("[server", "is not valid TOML"),
        ("data_dir = 'a'\ndata_dir = 'b'", "is not valid TOML"),
        ("[server]\nlisten = '8080'", "server.listen: invalid address '8080': expected HOST:PORT"),
        ("[server]\nlisten = 'host:99999'", "invalid address"),
        ("[server]\nlisten = 'host:²'", "invalid address"),
        ("[server]\nlisten = '::1:80'", "invalid address"),
        ("[admin]\nlisten = '127.0.0.1:8080'", "address of the public listener"),
        (
            "[templates]\ndate = '26 Jul 2024'",
            "templates: date: '26 Jul 2024'; expected 'today', or",
        ),
        ("[templates]\ndate = 2026-11-28", "templates.date: Expected `str`, got `date`"),
        ("[templates]\ntime_zone = 'Mars/Base'", "templates: time_zone: 'Mars/Base' is not known"),
        (
            "[templates]\ntime_zone = '../etc/passwd'",
            "templates: time_zone: '../etc/passwd' is not",
        ),
        ("[idempotency]\nkeep_hours = 23", "expected 0, or 24 or more"),
        (
            "[engine]\nstep_tokens_max = 100\nprefill_chunk_tokens_max = 200",
            "engine.prefill_chunk_tokens_max (200) exceeds",
        ),
        (
            "[tracing]\nendpoint = 'collector:4318'",
            "tracing.endpoint: invalid address 'collector:4318'",
        ),
        ("[tracing]\nendpoint = 'http://a:b'", "expected http://HOST:PORT"),
        ("[tracing]\nendpoint = 'http://'", "invalid address"),
        ("data_dir = ''", "data_dir: invalid name ''"),
        (
            "[[tenants]]\nname = 'a'\n[[tenants.keys]]\nlabel = 'k'",
            "tenants: a: key 'k': expected exactly one of",
        ),
        ("[[tenants]]\nname = 'a'\nclasses = ['9m']", "unknown retention class '9m'"),
        ("[model]\nname = ''", "model.name: invalid name ''"),
        ('[embeddings]\nmodel = "a\\u0000"', "embeddings.model: invalid name 'a"),
        (
            '[embeddings]\nmodel = "m"\naliases = ["gpt"]\n[model]\naliases = ["gpt"]',
            "embeddings.model: 'gpt' names the chat model too",
        ),
        ("[embeddings]\nthreads = -1", "embeddings.threads"),
        ("[embeddings]\nmodle = 'a'", "did you mean embeddings.model?"),
        (f"{SCOPE}member = []", "unknown setting tenancy.shared_scopes[0].member; did you mean"),
        (f"{SCOPE}members = [1]", "tenancy.shared_scopes[0]"),
        (f"{SCOPE}{SCOPE}", "shared scope declared twice: 'ours'"),
        (f'{SCOPE}members = ["bob", "bob/lab"]', "expected each workspace in at most one scope"),
        (f'{SCOPE}members = ["../bob"]', "invalid tenant name: '..'"),
        ("[tenancy]\nshared_scopes = 1", "tenancy.shared_scopes"),
        ("[model]\nname = 'm'\n[[models]]\nname = 'a'", "[model] and [[models]] are both set"),
        ("[[models]]\nname = '*'", "invalid name '*'"),
        (
            "[[models]]\nname = 'a'\naliases = ['*']\n[[models]]\nname = 'b'\naliases = ['*']",
            "'*' names both 'a' and 'b'",
        ),
        ("[[models]]\nname = 'a'\naliases = ['gpt*']", "invalid name 'gpt*'"),
        ("[server]\ncors_origins = ['https://a.example/']", "server.cors_origins: 'https://a."),
        ("[server]\ncors_origins = ['a.example']", "server.cors_origins: 'a.example'; expected"),
        ("[server]\ncors_origins = ['https://a:443']", "server.cors_origins: 'https://a:443'"),
        ("[server]\ncors_origins = '*'", "server.cors_origins: Expected `array`"),
        ("[[models]]\npath = 'a'", "models[0]: Object missing required field `name`"),
        ("[[models]]\nname = ''", "invalid name ''"),
        ("[[models]]\nname = 'a b'", "invalid name 'a b'"),
        ("[[models]]\nname = 'a'\n[[models]]\nname = 'a'", "'a' names both 'a' and 'a'"),
        (
            "[[models]]\nname = 'a'\naliases = ['b']\n[[models]]\nname = 'b'",
            "'b' names both 'a' and 'b'",
        ),
        (
            "[[models]]\nname = 'a'\ndefault = true\n[[models]]\nname = 'b'\ndefault = true",
            "a and b have default = true; expected one",
        ),
        ("[[models]]\nname = 'a'\npathh = 'b'", "unknown setting models[0].pathh; did you mean"),
        ("[[models]]\nname = 'a'\nengine = {kv_mib = 1}", "'a': engine: unknown setting kv_mib"),
        ("[[models]]\nname = 'a'\nengine = {threads = -1}", "'a': engine.threads: Expected"),
        (
            "[[models]]\nname = 'a'\nengine = {step_tokens_max = 1, prefill_chunk_tokens_max = 2}",
            "a: engine.prefill_chunk_tokens_max (2) exceeds engine.step_tokens_max (1)",
        ),
        ("[[models]]\nname = 'a'\nquota_scale = 0", "models[0].quota_scale: Expected"),
        ("[[models]]\nname = 'a'\ntenants = ['A b']", "a: tenants: invalid tenant name: 'A b'"),
        ('[[models]]\nname = "a"\npath = "\\u0000"', "contains NUL"),
    ],
)
def test_error_names_file_key_and_value(tmp_path: Path, text: str, told: str) -> None:
    """The message is one line, and says what is expected, of a single model or of several."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)

    message = str(caught.value)
    assert told in message
    assert str(tmp_path / "trunkline.toml") in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "endpoint", ["http://me:s3cret@h:1", "http://me:s3cret@h:x", "http://h?k=s3cret"]
)
def test_refuses_credentials_in_trace_endpoint_without_repeating_them(
    tmp_path: Path, endpoint: str
) -> None:
    """`check-config` shows every setting, so none may be a secret."""
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        load(tmp_path, f"[tracing]\nendpoint = '{endpoint}'")

    assert "s3cret" not in str(caught.value)


def test_error_in_an_option_names_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^command line: server\.listen: invalid address 'x'"):
        load(tmp_path, "[server]\nlisten = '127.0.0.1:80'", server__listen="x")


@pytest.mark.parametrize("kind", ["missing", "folder", "bytes"])
def test_unreadable_file_is_named_with_the_reason(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "trunkline.toml"
    if kind == "folder":
        file.mkdir()
    elif kind == "bytes":
        file.write_bytes(b"\xff\xfe")

    with pytest.raises(ConfigError, match=re.escape(str(file))):
        load_config(file, {}, {})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("localhost:65535", ("localhost", 65_535)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_parses_host_and_port(text: str, address: tuple[str, int]) -> None:
    """Brackets enclose an IPv6 address; port 0 is any free port."""
    assert parse_address(text, "x") == address
    assert format_address(*address) == text


def test_paths_are_inside_the_data_directory() -> None:
    config = Config(data_dir="/d")

    assert (config.data, config.models_dir) == (Path("/d"), Path("/d/models"))


def test_operations_page_documents_every_setting() -> None:
    text = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    named = set(re.findall(r"`([a-z_.]+)`", text))

    assert {path for path, _, _ in effective(Config(), {})} <= named


UNITS = {"": 1, " MiB": 1 << 20}


def test_operations_page_has_the_default_of_every_setting() -> None:
    """An operator who reads a number there sets nothing. Words stand for what is empty."""
    text = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    rows = re.findall(
        r"^\| `([a-z_.]+)` \| `?([0-9.,]+|true|false)( MiB)?`? \|", text, re.MULTILINE
    )
    told = {
        path: shown == "true"
        if shown in ("true", "false")
        else float(shown.replace(",", "")) * UNITS[unit]
        for path, shown, unit in rows
    }
    known = {
        path: value for path, value, _ in effective(Config(), {}) if isinstance(value, int | float)
    }

    assert told == known


def test_reads_declared_tenants_with_every_setting(tmp_path: Path) -> None:
    """The names are those of the admin API."""
    file = tmp_path / "t.toml"
    file.write_text(
        '[[tenants]]\nname = "ada"\nclasses = ["5m"]\nweight = 2\n[[tenants]]\nname = "bob"\n'
        "requests_at_once = 3\n"
    )
    config, _ = load_config(file, {}, {})

    assert config.tenants is not None
    assert [(one.name, one.weight) for one in config.tenants] == [("ada", 2.0), ("bob", 1.0)]
    assert config.tenants[0].settings.policy.classes == ("5m",)
    assert config.tenants[1].settings.limits.requests_at_once == 3


KEYS = "[[tenants]]\nname = 'ada'\n[[tenants.keys]]\nlabel = 'web'\n"


def test_reads_declared_keys_with_expiry_and_limits(tmp_path: Path) -> None:
    """`expires` is a TOML instant, or text of one."""
    digest = f"sha256 = '{'0' * 64}'\n"
    (tmp_path / "t.toml").write_text(
        f"{KEYS}{digest}expires = 2030-01-01T00:00:00+01:00\nrequests_at_once = 3\n"
        "[[tenants.keys]]\nlabel = 'b'\nfile = '/b'\nexpires = '2029-12-31T23:00:00Z'\n"
    )
    config, _ = load_config(tmp_path / "t.toml", {}, {})
    assert config.tenants is not None
    web, other = config.tenants[0].keys

    assert web.limits == Limits(requests_at_once=3)
    assert web.expires == other.expires == datetime(2029, 12, 31, 23, tzinfo=UTC)
    assert (web.workspace, other.file) == ("default", "/b")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sha265 = 'tl-secret'", "did you mean tenants[0].keys[0].sha256?"),
        ("sha256 = 'tl-secret'", "tenants: ada: key 'web': sha256: invalid digest"),
        ("key = 'tl-secret'", "unknown setting tenants[0].keys[0].key"),
        ("expires = 2030-01-01T00:00:00", "tenants[0].keys[0].expires: Expected `datetime` with a"),
        ("expires = 'tl-secret'", "tenants[0].keys[0].expires: Invalid"),
        ("scopes = 'usage'", "tenants[0].keys[0].scopes: Expected `array`"),
    ],
)
def test_error_in_declared_key_names_its_index_without_its_value(
    tmp_path: Path, text: str, told: str
) -> None:
    """An operator may have written the key itself there; it must not reach a log."""
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        load(tmp_path, KEYS + text)

    assert "secret" not in str(caught.value)


def test_absent_tenants_differ_from_an_empty_list() -> None:
    """A file without declared tenants must not suspend any tenant."""
    assert load_config(None, {}, {})[0].tenants is None


def test_reads_shared_scopes(tmp_path: Path) -> None:
    config = load(tmp_path, f'{SCOPE}members = ["ada", "bob/lab"]\n')

    assert load(tmp_path, "").tenancy.shared_scopes is None
    assert config.tenancy.shared_scopes is not None
    assert config.tenancy.shared_scopes[0].members == ("ada", "bob/lab")


def test_a_card_of_all_models_is_none_of_an_alias(tmp_path: Path) -> None:
    """Both are written `*`: the alias takes all names of clients, the card prices all models."""
    config = load(tmp_path, "[model]\nname = 'a'\naliases = ['*']")

    config.check_card(RateCard("list@1", "*", "*", input=1, cache_read=1, output=1))


@pytest.mark.parametrize(
    "origin",
    ["*", "https://app.example.com", "http://localhost:5173", "http://[::1]:8000", "app://x"],
)
def test_takes_origins_as_browsers_send_them(tmp_path: Path, origin: str) -> None:
    """They are compared as texts."""
    config = load(tmp_path, f"[server]\ncors_origins = ['{origin}']")

    assert config.server.cors_origins == (origin,)


@pytest.mark.parametrize(
    ("config", "alias"),
    [
        ("[model]\nname = 'a'\naliases = ['gpt-4o-mini']", "gpt-4o-mini"),
        ("[[models]]\nname = 'a'\naliases = ['x', 'y']\n[[models]]\nname = 'b'", "y"),
    ],
    ids=["one model", "several"],
)
def test_refuses_rate_card_for_an_alias(tmp_path: Path, config: str, alias: str) -> None:
    """The ledger records the model's own name, so a price under an alias would never apply."""
    found = load(tmp_path, config)
    found.check_card(RateCard("x", model="a"))
    found.check_card(RateCard("x", model="another-servers"))

    with pytest.raises(BadPrice, match=f"'{alias}' is an alias"):
        found.check_card(RateCard("x", model=alias))


@each_row(
    ("webhook", "what"),
    [
        ("name = 'a b'\nurl = 'https://x'\nsecret_env = 'S'", "invalid name 'a b'"),
        ("name = 'a'\nsecret_env = 'S'", "a: expected either url or url_file"),
        ("name = 'a'\nurl = 'ftp://x'\nsecret_env = 'S'", "a: url: not an address; expected https"),
        ("name = 'a'\nurl = 'https://u:p@x'\nsecret_env = 'S'", "without a password"),
        ("name = 'a'\nurl = 'https://x'", "either secret_file or secret_env"),
        (
            "name = 'a'\nurl = 'https://x'\nformat = 'slack'\nsecret_env = 'S'",
            "neither for 'slack'",
        ),
        (
            "name = 'a'\nurl = 'https://x'\nsecret_env = 'S'\nevents = ['x']",
            "webhooks[0].events[0]: Expected one of 'budget.threshold', 'hit_ratio.fell'",
        ),
        (
            "name = 'a'\nurl = 'https://x'\nsecret_env = 'S'\nformat = 'teams'",
            "webhooks[0].format: Expected one of 'standard', 'slack'",
        ),
        ("name = 'a'\nulr = 'https://x'", "did you mean webhooks[0].url?"),
    ],
)
def test_a_wrong_webhook_is_named(tmp_path: Path, webhook: str, what: str) -> None:
    """Its address is never quoted: it may be a secret."""
    with pytest.raises(ConfigError, match=re.escape(what)) as caught:
        load(tmp_path, f"[[webhooks]]\n{webhook}\n")

    assert "u:p" not in str(caught.value)


def test_a_byte_order_mark_before_the_file_is_ignored(tmp_path: Path) -> None:
    """Windows' editors write it, and nobody sees it."""
    assert load(tmp_path, "\ufeff[server]\nlisten = '127.0.0.1:9'\n").server.listen.endswith(":9")


def test_a_webhook_has_a_name_once(tmp_path: Path) -> None:
    """Deliveries in the database refer to it."""
    one = "[[webhooks]]\nname = 'a'\nurl = 'https://x'\nsecret_env = 'S'\n"

    assert len(load(tmp_path, one).webhooks) == 1
    with pytest.raises(ConfigError, match="each name once"):
        load(tmp_path, one + one)


# --- several models -------------------------------------------------------------------------------

TWO = """
[engine]
kv_memory_mib = 100
[engine.levels]
host_mib = 5
[[models]]
name = "a"
path = "/models/a"
aliases = ["x", "y"]
[[models]]
name = "b"
default = true
quota_scale = 0.5
tenants = ["ada"]
[models.engine]
kv_memory_mib = 7
[models.engine.levels]
disk_gib = 1
"""


def test_reads_models_with_their_own_settings_of_the_engine(tmp_path: Path) -> None:
    """What a model does not set is that of [engine], table by table."""
    config = load(tmp_path, TWO)
    b, a = config.served_models()
    engines = [config.engine_of(one) for one in (a, b)]

    assert (b.name, b.source, b.quota_scale) == ("b", "b", 0.5)
    assert (a.source, a.aliases) == ("/models/a", ("x", "y"))
    assert (a.open_to, b.open_to) == (None, frozenset({"ada"}))
    assert [one.kv_memory_mib for one in engines] == [100, 7]
    assert [one.levels.host_mib for one in engines] == [5, 5]
    assert [one.levels.disk_gib for one in engines] == [0.0, 1.0]


def test_a_single_model_is_named_by_its_card(tmp_path: Path) -> None:
    (one,) = load(tmp_path, "[model]\nname = 'm'\naliases = ['x']\n").served_models()

    assert (one.name, one.source, one.aliases) == ("", "m", ("x",))


def test_the_command_line_names_one_of_them(tmp_path: Path) -> None:
    """`trunkline serve b`; another name is a model in place of all."""
    named = load(tmp_path, TWO, model__name="a")
    other = load(tmp_path, TWO, model__name="/models/c")

    assert [(one.name, one.source) for one in named.served_models()] == [("a", "/models/a")]
    assert [one.source for one in other.served_models()] == ["/models/c"]
    assert other.models == ()


def test_the_environment_does_not_replace_the_list(tmp_path: Path) -> None:
    """A variable left over from a single model would silently serve that one alone."""
    with pytest.raises(ConfigError, match=r"TRUNKLINE_MODEL.*both set"):
        load(tmp_path, TWO, {"TRUNKLINE_MODEL": "m"})
