"""`trunkline serve`: a data directory, a model, a key, a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.errors import ModelError
from engine.model_store import CATALOGUE, ModelCard, prepare, pull, resolve
from gateway import app
from gateway.config import Config

Say = Callable[[str], None]
Progress = Callable[[int, int], None]


def run(config: Config, say: Say, progress: Progress) -> int:
    """Serve until a signal. A built-in model that is not here yet is fetched first."""
    app.prepare_data_dir(config)
    card = prepared_model(config, say, progress)
    store, key = app.open_store(config)

    def announce(urls: list[str]) -> None:
        public, admin = urls
        say(f"trunkline serves {card.name} at {public}/v1")
        say(f"  metrics and health:  {admin}/metrics  {public}/readyz")
        if key is not None:
            say(f"  key of the tenant 'default' (shown once): {key}")
        say(f"  key file:            {config.data / app.KEY_FILE}")

    try:
        return asyncio.run(app.serve(config, card, store, announce))
    finally:
        store.close()


def prepared_model(config: Config, say: Say, progress: Progress) -> ModelCard:
    """Resolve, fetch if it is built in, and prepare. Raises ModelError."""
    name, models = config.model.name, config.models_dir
    try:
        source = resolve(name, models)
    except ModelError as error:
        if error.code != "not_found" or name not in CATALOGUE:
            raise
        say(f"fetching {name}, once")
        source = pull(name, models, progress)
    short = name if name in CATALOGUE else source.stem if source.is_file() else source.name
    return prepare(short, source, models)
