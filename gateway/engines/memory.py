"""The memory that the served models need beside each other, and what the machine has.

Estimates before anything is loaded: a model's files, its KV blocks, and the programs. `serve`
refuses several models that do not fit, `doctor` reports. Models on an NVIDIA device take its
memory, which is summed by itself (`device_memory`), and of the host's their programs and the host
levels of their caches. A host level of "auto" gets a share of what is left.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from engine.config import DRAFT_PLACE_TOKENS, EngineConfig, WeightsKind
from engine.errors import ModelError
from engine.model_store import CATALOGUE, resolve, size_mib
from gateway.config import Config, ServedModelSettings
from gateway.engines.device_memory import (
    DevicePlan,
    DeviceShare,
    describe_share,
    device_weights_mib,
    read_device_memory,
    runs_on_device,
)
from gateway.levels.model_cost import find_card, kv_bytes_per_token
from gateway.levels.placement import own_cgroups

WORK_MIB = 500
"""Memory of the programs: gateway, ledger, analytics and an engine with its library."""
ENCODER_MIB = 450
"""Memory of the encoder's process with the built-in embedding model."""
ENGINE_MIB = 300
"""Memory of each further engine's program."""
HOST_LEVEL_PART = 2
"""A host level of "auto" takes at most one part in so many of the memory that is left."""
HOST_LEVEL_POOLS = 4
"""It takes at most so many times the pool of an engine on a device: blocks beyond that are rarely
read again before they are evicted."""
HOST_LEVEL_MIB_MIN = 64
"""A share below this, and below the level's bound, is not taken: the level is left out, or has the
memory that copies on their way to the disk need."""


class ModelMemory(Struct, frozen=True):
    """The host memory of one model, in MiB. Weights and KV of a model on an NVIDIA device count
    nothing here."""

    name: str
    """"" for a single model."""
    model_mib: int
    kv_mib: int
    host_mib: int = 0
    """The size of its cache's level in host memory."""
    host_mib_max: int = 0
    """The most that it may get where it is "auto", else 0."""


class MemoryPlan(Struct, frozen=True):
    """The memory of all models, in MiB, and what is free."""

    models: tuple[ModelMemory, ...]
    free_mib: int
    embeddings_mib: int = 0

    @property
    def work_mib(self) -> int:
        """Memory of the programs."""
        return WORK_MIB + ENGINE_MIB * (len(self.models) - 1)

    @property
    def need_mib(self) -> int:
        """Memory of models, KV blocks and programs together."""
        models_mib = sum(one.model_mib + one.kv_mib + one.host_mib for one in self.models)
        return self.work_mib + models_mib + self.embeddings_mib

    @property
    def fits(self) -> bool:
        """Whether the free memory suffices."""
        return self.need_mib <= self.free_mib

    def describe(self) -> str:
        """Return the numbers in words."""
        parts = [
            describe_share(one.name, one.model_mib, one.kv_mib)
            for one in self.models
            if one.model_mib or one.kv_mib
        ]
        host_mib = sum(one.host_mib for one in self.models)
        if host_mib:
            parts.append(f"{host_mib} for the host levels of the cache")
        parts.append(f"{self.work_mib} for the processes")
        if self.embeddings_mib:
            parts.append(f"{self.embeddings_mib} for embeddings")
        return f"{self.free_mib} MiB free, about {self.need_mib} needed ({', '.join(parts)})"


def plan_memory(config: Config) -> MemoryPlan | None:
    """Return the host memory of all models, and what is free; None if the system does not tell,
    or if all models are on an NVIDIA device and have no host level. Reads the sizes of files."""
    free_mib = available_memory_mib(Path("/proc/meminfo"), *own_cgroups())
    here = [one for one in config.served_models() if not one.is_elsewhere]
    models = tuple(_host_share(config, one) for one in here)
    own = config.embeddings
    embeddings_mib = ENCODER_MIB + own.cache_mib if own.model else 0
    if free_mib is None:
        return None
    if not any(one.model_mib + one.kv_mib + one.host_mib + one.host_mib_max for one in models):
        return None
    return with_host_levels(MemoryPlan(models, free_mib, embeddings_mib))


def with_host_levels(plan: MemoryPlan) -> MemoryPlan:
    """Return the plan with a number for each host level of "auto".

    Together they take at most half of what is free beyond all needs, the rest is the file cache's
    and the machine's; each takes at most its bound, and where the half is less than all bounds, its
    part by these.
    """
    wanted = sum(one.host_mib_max for one in plan.models)
    if not wanted:
        return plan
    left = min(wanted, max(0, plan.free_mib - plan.need_mib) // HOST_LEVEL_PART)
    models = []
    for one in plan.models:
        size = one.host_mib_max * left // wanted
        is_enough = size >= max(min(HOST_LEVEL_MIB_MIN, one.host_mib_max), one.host_mib)
        models.append(replace(one, host_mib=size) if is_enough else one)
    return replace(plan, models=tuple(models))


def size_host_levels(config: Config) -> tuple[MemoryPlan | None, dict[str, int]]:
    """Return the plan of memory, and the host memory of each model, in MiB, whose level is "auto":
    0 if there is none left, or where the system does not tell."""
    names = [
        one.name
        for one in config.served_models()
        if not one.is_elsewhere and config.engine_of(one).levels.host_mib == "auto"
    ]
    if not names:
        return None, {}
    plan = plan_memory(config)
    models = () if plan is None else plan.models
    sizes = {one.name: one.host_mib for one in models if one.host_mib_max}
    return plan, {name: sizes.get(name, 0) for name in names}


def plan_device_memories(config: Config) -> list[DevicePlan]:
    """Return what the models on NVIDIA devices need of each, and what it has free, without devices
    that do not tell."""
    shares: dict[int | None, list[DeviceShare]] = {}
    here = [
        (one, engine)
        for one in config.served_models()
        if not one.is_elsewhere and runs_on_device(engine := config.engine_of(one))
    ]
    default = 0 if any(engine.gpus for _, engine in here) else None
    for one, engine in here:
        gpus = engine.gpus or (default,)
        weights_mib = _weights_mib(config, one.source, engine.weights)
        weights_mib += _weights_mib(config, engine.drafting_model, "auto")
        kv_mib = _kv_mib(engine) + _draft_kv_mib(config, engine)
        part = DeviceShare(one.name, -(-weights_mib // len(gpus)), -(-kv_mib // len(gpus)))
        for gpu in gpus:
            shares.setdefault(gpu, []).append(part)
    found = []
    for gpu, parts in shares.items():
        device = read_device_memory(os.environ, gpu=gpu)
        if device is not None:
            found.append(DevicePlan(tuple(parts), device, gpu))
    return found


def lacking_gpus(config: Config) -> str:
    """Return why models cannot have the GPUs that `engine.gpus` names, in words; "" if they can. A
    model over several GPUs shares none of them."""
    owners: dict[int, tuple[str, int]] = {}
    here = [one for one in config.served_models() if not one.is_elsewhere]
    engines = {one.name: config.engine_of(one) for one in here}
    if not any(len(engine.gpus) > 1 for engine in engines.values()):
        return ""
    for name, engine in engines.items():
        if engine.device == "cpu":
            continue
        gpus = engine.gpus or (0,)
        for gpu in gpus:
            other, lanes = owners.setdefault(gpu, (name, len(gpus)))
            if other != name and max(lanes, len(gpus)) > 1:
                return (
                    f"models: {other} and {name} both take GPU {gpu}, which a model over several"
                    " GPUs needs alone; expected other numbers in engine.gpus of one of them"
                )
    return ""


def lacking_memory(config: Config) -> str:
    """Return why several models do not fit beside each other, in words: GPUs, the host's memory or
    a device's; "" if they do, or if there is one."""
    if len(config.models) < 2:
        return ""
    if lack := lacking_gpus(config):
        return lack
    for plan in (plan_memory(config), *plan_device_memories(config)):
        if plan is not None and not plan.fits:
            return (
                f"models: not enough memory: {plan.describe()}; expected less: lower kv_memory_mib"
                " in [models.engine], or serve fewer models"
            )
    return ""


def _host_share(config: Config, model: ServedModelSettings) -> ModelMemory:
    engine = config.engine_of(model)
    is_auto, is_on_device = engine.levels.host_mib == "auto", runs_on_device(engine)
    most, own = 0, engine.levels.arena_mib
    if is_auto:
        # On a CPU the pool is host memory itself: more of it would serve better than a level.
        most = _pool_mib(config, model, engine) * (HOST_LEVEL_POOLS if is_on_device else 1)
    if is_on_device:
        return ModelMemory(model.name, 0, 0, own, most)
    model_mib = _file_mib(config, model.source) + _file_mib(config, engine.drafting_model)
    kv_mib = _kv_mib(engine) + _draft_kv_mib(config, engine)
    return ModelMemory(model.name, model_mib, kv_mib, own, most)


def _pool_mib(config: Config, model: ServedModelSettings, engine: EngineConfig) -> int:
    """Return the memory of an engine's pool; of one configured in blocks once its model is
    prepared, before that of `kv_memory_mib`."""
    if not engine.kv_blocks:
        return engine.kv_memory_mib
    card = find_card(model.source, config.models_dir)
    if card is None:
        return engine.kv_memory_mib
    tokens = engine.kv_blocks * engine.block_size
    return tokens * kv_bytes_per_token(card.config, engine.kv_dtype) // 2**20


def _kv_mib(engine: EngineConfig) -> int:
    return 0 if engine.kv_blocks else engine.kv_memory_mib


def _draft_kv_mib(config: Config, engine: EngineConfig) -> int:
    """Return the memory of a draft model's pool; nothing before the model is prepared."""
    card = find_card(engine.drafting_model, config.models_dir) if engine.drafting_model else None
    if card is None:
        return 0
    tokens = engine.draft_places * DRAFT_PLACE_TOKENS
    return tokens * kv_bytes_per_token(card.config, "auto") // 2**20


def _weights_mib(config: Config, name: str, kind: WeightsKind) -> int:
    """Return the memory of a model's weights on a device: by its card once it has been prepared,
    before that the size of its files, which may hold fewer bits. `name` "": no model."""
    file_mib = _file_mib(config, name)
    card = find_card(name, config.models_dir) if name else None
    return file_mib if card is None else device_weights_mib(card, kind, file_mib)


def _file_mib(config: Config, name: str) -> int:
    if not name:
        return 0
    try:
        source = resolve(name, config.models_dir)
    except ModelError:
        # A built-in model is fetched at the first start; another takes no memory, as it fails.
        return CATALOGUE[name].size // 2**20 if name in CATALOGUE else 0
    return size_mib(source)


def available_memory_mib(meminfo: Path, *cgroups: Path) -> int | None:
    """Return the MiB that a new process may take, of the machine and its containers, by
    `memory.max`. What a container uses for files that it could drop is free, as the machine counts
    its own. None if the system does not tell.
    """
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free_mib = int(fields["MemAvailable"].split()[0]) // 1024
    except (OSError, KeyError, ValueError):
        return None
    for cgroup in cgroups:
        with suppress(OSError, ValueError):  # no group, or one without a limit ("max")
            limit = int((cgroup / "memory.max").read_text())
            used = int((cgroup / "memory.current").read_text()) - _droppable(cgroup)
            free_mib = min(free_mib, max(0, limit - used) // 2**20)
    return free_mib


def _droppable(cgroup: Path) -> int:
    """Return the bytes of files that a group has in memory and does not use; 0 if unknown."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
        return int(dict(line.split(" ", 1) for line in lines).get("inactive_file", 0))
    except (OSError, ValueError):
        return 0
