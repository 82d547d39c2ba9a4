"""The files of a model, for the commands that serve one: found, fetched and prepared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.errors import ModelError
from engine.model_store import CATALOGUE, ModelCard, prepare, pull, resolve
from gateway.config import ConfigError

Say = Callable[[str], None]
Progress = Callable[[int, int], None]


def prepared_model(name: str, models: Path, say: Say, progress: Progress) -> ModelCard:
    """Resolve a model, fetch a missing built-in one, and prepare it. Raises ModelError, and
    ConfigError for an embedding model."""
    if name in CATALOGUE and CATALOGUE[name].is_encoder:
        message = (
            f"{name} is an embedding model; expected a chat model, or this one as embeddings.model"
        )
        raise ConfigError(message)
    source = found_model(name, models, say, progress)
    return prepare(short_name(name, source), source, models, _check_template)


def _check_template(source: str) -> None:
    """Compile a chat template. Raises ValueError."""
    from gateway.prompt.template import ChatTemplate  # for the first start of a model alone

    ChatTemplate(source)


def short_name(name: str, source: Path) -> str:
    """Return the name of a model by that of its source."""
    if name in CATALOGUE:
        return name
    return source.stem if source.is_file() else source.name


def found_model(name: str, models: Path, say: Say, progress: Progress) -> Path:
    """Return the file or folder of a model; fetches a missing built-in one."""
    try:
        return resolve(name, models)
    except ModelError as error:
        if error.code != "not_found" or name not in CATALOGUE:
            raise
        say(f"fetching {name}")
        return pull(name, models, progress)
