"""The settings in force: flags over the environment, over the file, over the defaults.

An `Origin` records the source of each value. This module knows no argparse and opens no file but
the configuration. `gateway.__main__` loads it; all of the gateway reads its values.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.config.checks import Origin, check_values
from gateway.config.decoding import (
    ConfigError,
    check_names,
    check_tables,
    explained,
    get_path,
    key_paths,
    set_path,
)
from gateway.config.fleet import VARIABLES
from gateway.config.tables import Config, ServedModelSettings, WebhookConfig
from tenancy.accounts.declared_keys import DeclaredKey
from tenancy.accounts.declared_tenants import DeclaredTenant
from tenancy.accounts.shared_scopes import ScopeTerms

ENVIRONMENT = {"TRUNKLINE_DATA_DIR": "data_dir", "TRUNKLINE_MODEL": "model.name"} | VARIABLES
"""Environment variables and the key paths that they set."""


def load_config(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> tuple[Config, Origin]:
    """Return the effective settings and the source of each. `file`: `find_config_file` finds it.
    `flags`: given ones, by key path.

    Raises ConfigError.
    """
    origin: Origin = {}
    tree: dict[str, Any] = {}
    if file is not None:
        tree = _read(file)
        _decode(tree, str(file))  # here, so that errors name the file
        origin.update(dict.fromkeys(key_paths(tree), str(file)))
    for name, path in ENVIRONMENT.items():
        if text := environment.get(name):
            set_path(tree, path, text)
            origin[path] = f"environment ({name})"
    for path, flag in flags.items():
        set_path(tree, path, flag)
        origin[path] = "command line"
    _choose_models(tree, origin)
    return check_values(_decode(tree, "the command line"), origin), origin


def effective(config: Config, origin: Origin) -> list[tuple[str, object, str]]:
    """Return (key path, value, source) of every setting, in the order of the file."""
    tree = msgspec.to_builtins(config)
    return [(p, v, origin.get(p, "default")) for p, v in key_paths(tree).items()]


def _read(file: Path) -> dict[str, Any]:
    try:
        # Windows' editors begin a file with a byte order mark.
        return tomllib.loads(file.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _decode(tree: dict[str, Any], where: str) -> Config:
    check_names(tree, Config, where, "")
    tenants = tree.get("tenants")
    for number, table in enumerate(tenants if isinstance(tenants, list) else ()):
        keys = table.get("keys") if isinstance(table, dict) else None
        check_tables(keys, DeclaredKey, where, f"tenants[{number}].keys")
    check_tables(tenants, DeclaredTenant, where, "tenants")
    check_tables(tree.get("webhooks"), WebhookConfig, where, "webhooks")
    check_tables(tree.get("models"), ServedModelSettings, where, "models")
    tenancy = tree.get("tenancy")
    scopes = tenancy.get("shared_scopes") if isinstance(tenancy, dict) else None
    check_tables(scopes, ScopeTerms, where, "tenancy.shared_scopes")
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`")
        value = f" (it is {get_path(tree, key)!r})" if "[" not in key else ""
        raise ConfigError(f"{where}: {key}: {explained(message, Config, key)}{value}") from error


def _choose_models(tree: dict[str, Any], origin: Origin) -> None:
    """Reduce [[models]] to the model that the command line names, if it names one: a table's name,
    or another model, which is then the only one. Raises ConfigError for both [model] and
    [[models]]."""
    tables = tree.get("models")
    if not tables or "model" not in tree:
        return
    if origin.get("model.name") != "command line" or len(tree["model"]) > 1:
        where = next((f"{origin[path]}: " for path in origin if path.startswith("model.")), "")
        raise ConfigError(f"{where}[model] and [[models]] are both set; expected one of them")
    name = tree["model"]["name"]
    named = [one for one in tables if isinstance(one, dict) and one.get("name") == name]
    del tree["models"]
    if named:
        del tree["model"]
        tree["models"] = named
