"""`[[models]]`: several models, their names, their engines' settings, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import Config, ConfigError, load_config
from tenancy.errors import BadPrice
from tenancy.pricing.charges import RateCard

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


def load(
    folder: Path, text: str, environment: dict[str, str] | None = None, **flags: object
) -> Config:
    file = folder / "t.toml"
    file.write_text(text)
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return load_config(file, environment or {}, given)[0]


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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[model]\nname = 'm'\n[[models]]\nname = 'a'", "[model] and [[models]] are both set"),
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
def test_wrong_models_are_named(tmp_path: Path, text: str, told: str) -> None:
    """With the file, the model and what is expected."""
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, text + "\n")

    assert told in str(raised.value)
    assert "t.toml" in str(raised.value)


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


def test_rate_cards_name_models_and_no_alias(tmp_path: Path) -> None:
    config = load(tmp_path, TWO)
    config.check_card(RateCard("c", model="a"))

    with pytest.raises(BadPrice, match="'y' is an alias"):
        config.check_card(RateCard("c", model="y"))
