"""The memory that the served models need beside each other, and what the machine has.

Estimates before anything is loaded: a model's files, its KV blocks, and the programs. `serve`
refuses several models that do not fit, `doctor` reports. Models on an NVIDIA device take its
memory, which is summed by itself (`device_memory`), and of the host's their programs and the host
levels of their caches.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model_store import CATALOGUE, resolve
from gateway.config import Config, ServedModelSettings
from gateway.engines.device_memory import (
    WEIGHT_BYTES,
    DevicePlan,
    DeviceShare,
    read_device_memory,
    runs_on_device,
)
from gateway.levels.model_cost import find_architecture, weights_of

WORK_MIB = 500
"""Memory of the programs: gateway, ledger, analytics and an engine with its library."""
ENCODER_MIB = 450
"""Memory of the encoder's process with the built-in embedding model."""
ENGINE_MIB = 300
"""Memory of each further engine's program."""


class ModelMemory(Struct, frozen=True):
    """The host memory of one model, in MiB. `name`: "" for a single model. `host_mib`: of the host
    level of its cache. Weights and KV of a model on an NVIDIA device count nothing here."""

    name: str
    model_mib: int
    kv_mib: int
    host_mib: int = 0


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
            f"{one.model_mib} for {one.name or 'the model'}, {one.kv_mib} for "
            + (f"{one.name}'s KV" if one.name else "KV")
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
    """Return the host memory of all models, and what is free; None where the system does not tell,
    or if all models are on an NVIDIA device and have no host level. Reads the sizes of files.
    Raises ModelError for a model that is not here."""
    free_mib = available_memory_mib(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))
    models = tuple(_host_share(config, one) for one in config.served_models())
    own = config.embeddings
    embeddings_mib = ENCODER_MIB + own.cache_mib if own.model else 0
    if free_mib is None or not any(one.model_mib + one.kv_mib + one.host_mib for one in models):
        return None
    return MemoryPlan(models, free_mib, embeddings_mib)


def plan_device_memory(config: Config) -> DevicePlan | None:
    """Return what the models on an NVIDIA device need of it, and what it has free; None if there
    are none, or where the device does not tell. Raises ModelError for a model that is not here."""
    found = []
    for one in config.served_models():
        engine = config.engine_of(one)
        if runs_on_device(engine):
            found.append(DeviceShare(one.name, _weights_mib(config, one), _kv_mib(engine)))
    device = read_device_memory(os.environ) if found else None
    return None if device is None else DevicePlan(tuple(found), device)


def lacking_memory(config: Config) -> str:
    """Return why several models do not fit into memory together, in words: the host's or a
    device's; "" if they do, or if there is one. Raises ModelError."""
    if len(config.models) < 2:
        return ""
    for plan in (plan_memory(config), plan_device_memory(config)):
        if plan is not None and not plan.fits:
            return (
                f"models: not enough memory: {plan.describe()}; expected less: lower kv_memory_mib"
                " in [models.engine], or serve fewer models"
            )
    return ""


def _host_share(config: Config, model: ServedModelSettings) -> ModelMemory:
    engine = config.engine_of(model)
    levels = engine.levels
    host_mib = levels.host_mib or (levels.stage_mib if levels.disk_gib else 0)
    if runs_on_device(engine):
        return ModelMemory(model.name, 0, 0, host_mib)
    return ModelMemory(model.name, _file_mib(config, model), _kv_mib(engine), host_mib)


def _kv_mib(engine: EngineConfig) -> int:
    return 0 if engine.kv_blocks else engine.kv_memory_mib


def _weights_mib(config: Config, model: ServedModelSettings) -> int:
    """Return the memory of a model's weights on a device: by its shape once it has been prepared,
    before that the size of its files, which may hold fewer bits."""
    file_mib = _file_mib(config, model)
    try:
        source = resolve(model.source, config.models_dir)
    except ModelError:
        return file_mib
    shape = find_architecture(source, config.models_dir)
    return file_mib if shape is None else weights_of(shape) * WEIGHT_BYTES // 2**20


def _file_mib(config: Config, model: ServedModelSettings) -> int:
    try:
        source = resolve(model.source, config.models_dir)
    except ModelError:
        if model.source in CATALOGUE:  # fetched at the first start
            return CATALOGUE[model.source].size // 2**20
        raise
    files = [source] if source.is_file() else [f for f in source.rglob("*") if f.is_file()]
    return sum(file.stat().st_size for file in files) // 2**20


def available_memory_mib(meminfo: Path, cgroup: Path) -> int | None:
    """Return the MiB that a new process may take, of the machine and its container.

    None where the system does not tell.
    """
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free_mib = int(fields["MemAvailable"].split()[0]) // 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free_mib
    return min(free_mib, max(0, limit - used) // 2**20)
