"""The engines of the served models, as a server starts them: a supervisor for each model.

They are the slowest part of a start to be ready, so this module imports little, and
`gateway.cli.serve` calls it before it imports the rest of the gateway.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.errors import ModelError
from engine.model_store import ModelCard
from gateway.child_process import Report
from gateway.config import Config
from gateway.engine_supervisor import EngineSupervisor
from gateway.engines.memory import size_host_levels
from gateway.levels.placement import engine_config, with_host_mib


def supervise_engines(
    config: Config, cards: Sequence[ModelCard | ModelError], log: Report
) -> list[EngineSupervisor]:
    """Return a supervisor for each model that has a card, none of them started; its reports name
    the model, if there are several.

    `cards`: of `config.served_models()`; an error takes the place of a model that cannot be served.
    """
    found = []
    plan, host_mib = size_host_levels(config)
    for settings, card in zip(config.served_models(), cards, strict=True):
        if isinstance(card, ModelError):
            continue
        is_alone = len(cards) == 1
        report = log if is_alone else partial(_report, log, settings.name)
        for warning in card.warnings:
            report("model_warning", {"warning": warning})
        own = config.engine_of(settings)
        if settings.name in host_mib:
            size_mib = host_mib[settings.name]
            own = with_host_mib(own, size_mib)
            free_mib = None if plan is None else plan.free_mib
            report("host_level_sized", {"host_mib": size_mib, "free_mib": free_mib})
        engine = engine_config(config, own, "" if is_alone else settings.name)
        found.append(EngineSupervisor(Path(card.folder), engine, report))
    return found


def _report(log: Report, model: str, event: str, facts: dict[str, object]) -> None:
    log(event, {"model": model, **facts})
