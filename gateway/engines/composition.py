"""The replicas of the served models, as a server starts them.

They are the slowest part of a start to be ready, so this module imports little, and
`gateway.cli.serve` calls it before it imports the rest of the gateway.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model_store import ModelCard
from gateway.config import Config, ServedModelSettings
from gateway.engines.keeper import COMMAND, RESTARTS, EngineKeeper
from gateway.engines.memory import MemoryPlan, size_host_levels
from gateway.engines.model_files import with_draft_folder
from gateway.engines.replicas import Replicas
from gateway.levels.placement import engine_config, with_host_mib
from gateway.processes.child_process import Report, RestartPolicy


def own_engine(
    model_dir: Path,
    config: EngineConfig,
    report: Report,
    *,
    command: tuple[str, ...] = COMMAND,
    restarts: RestartPolicy = RESTARTS,
    keeps_host_memory: bool = True,
) -> Replicas:
    """Return the one replica of a model whose engine runs on this machine, not started."""
    replicas = Replicas(report)
    replica = replicas.add()
    replica.link = EngineKeeper(
        *(model_dir, config, report, replica),
        command=command,
        restarts=restarts,
        keeps_host_memory=keeps_host_memory,
    )
    return replicas


def replicas_of_models(
    config: Config,
    cards: Sequence[ModelCard | ModelError],
    log: Report,
    start: str = "",
    process: int | None = None,
) -> list[Replicas]:
    """Return the replicas of each model that has a card, none of them started; their reports name
    the model, if there are several.

    `cards`: of `config.served_models()`; an error takes the place of a model that cannot be served.
    `start`: names this start of the gateway to engines elsewhere. `process`: this one of several
    processes of the gateway.
    """
    found: list[Replicas] = []
    plan, host_mib = size_host_levels(config)
    for settings, card in zip(config.served_models(), cards, strict=True):
        if isinstance(card, ModelError):
            continue
        is_alone = len(cards) == 1
        report = log if is_alone else partial(_report, log, settings.name)
        for warning in card.warnings:
            report("model_warning", {"warning": warning})
        if settings.is_elsewhere:
            found.append(_elsewhere(config, settings, card, report, start, process))
            continue
        own = config.engine_of(settings)
        if settings.name in host_mib:
            own = _sized(own, host_mib[settings.name], plan, report)
        own = with_draft_folder(own, config.models_dir)
        engine = engine_config(config, own, "" if is_alone else settings.name)
        found.append(own_engine(Path(card.folder), engine, report))
    return found


def engine_settings(config: Config, log: Report) -> EngineConfig:
    """Return the settings of the one engine of a keeper."""
    settings = config.served_models()[0]
    plan, host_mib = size_host_levels(config)
    own = config.engine_of(settings)
    if settings.name in host_mib:
        own = _sized(own, host_mib[settings.name], plan, log)
    return engine_config(config, with_draft_folder(own, config.models_dir))


def _sized(
    engine: EngineConfig, size_mib: int, plan: MemoryPlan | None, report: Report
) -> EngineConfig:
    free_mib = None if plan is None else plan.free_mib
    report("host_level_sized", {"host_mib": size_mib, "free_mib": free_mib})
    return with_host_mib(engine, size_mib)


def _elsewhere(
    config: Config,
    settings: ServedModelSettings,
    card: ModelCard,
    report: Report,
    start: str,
    process: int | None,
) -> Replicas:
    """Return the replicas of a model whose engines others start."""
    from gateway.engines.elsewhere.dialer import FleetIdentity  # only where engines are elsewhere
    from gateway.engines.elsewhere.fleet import FleetReplicas

    name = config.fleet.name if process is None else f"{config.fleet.name}/{process}"
    folder = config.fleet_folder
    identity, is_apart = FleetIdentity(name, folder, start), config.fleet.prompts_apart == "auto"
    return FleetReplicas(card.digest, settings, identity, report, prompts_apart=is_apart)


def _report(log: Report, model: str, event: str, facts: dict[str, object]) -> None:
    log(event, {"model": model, **facts})
