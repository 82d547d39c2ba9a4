"""The memory that the served models need beside each other, and what the machine has.

Estimates before anything is loaded: a model's files, its KV blocks, and the programs. `serve`
refuses several models that do not fit, `doctor` reports. Models on an NVIDIA device are not
counted: their engines say themselves what does not fit.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from engine.model_store import resolve
from gateway.config import Config

WORK_MIB = 500
"""Memory of the programs: gateway, ledger, analytics and an engine with its library."""
ENCODER_MIB = 450
"""Memory of the encoder's process with the built-in embedding model."""
ENGINE_MIB = 300
"""Memory of each further engine's program."""
NVIDIA_CONTROL = Path("/dev/nvidiactl")


class ModelMemory(Struct, frozen=True):
    """The memory of one model, in MiB. `name`: "" for a single model. `host_mib`: of the host level
    of its cache."""

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
        ]
        host_mib = sum(one.host_mib for one in self.models)
        if host_mib:
            parts.append(f"{host_mib} for the host levels of the cache")
        parts.append(f"{self.work_mib} for the processes")
        if self.embeddings_mib:
            parts.append(f"{self.embeddings_mib} for embeddings")
        return f"{self.free_mib} MiB free, about {self.need_mib} needed ({', '.join(parts)})"


def plan_memory(config: Config) -> MemoryPlan | None:
    """Return the memory of all models that are in host memory, and what is free; None where the
    system does not tell, or no model is. Reads the sizes of files. Raises ModelError for a model
    that is not here."""
    free_mib = available_memory_mib(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))
    found = []
    for one in config.served_models():
        engine = config.engine_of(one)
        if engine.device == "cuda":
            continue
        source = resolve(one.source, config.models_dir)
        files = [source] if source.is_file() else [f for f in source.rglob("*") if f.is_file()]
        model_mib = sum(file.stat().st_size for file in files) // 2**20
        kv_mib = 0 if engine.kv_blocks else engine.kv_memory_mib
        levels = engine.levels
        host_mib = levels.host_mib or (levels.stage_mib if levels.disk_gib else 0)
        found.append(ModelMemory(one.name, model_mib, kv_mib, host_mib))
    own = config.embeddings
    embeddings_mib = ENCODER_MIB + own.cache_mib if own.model else 0
    if free_mib is None or not found:
        return None
    return MemoryPlan(tuple(found), free_mib, embeddings_mib)


def lacking_memory(config: Config) -> str:
    """Return why several models do not fit into memory together, in words; "" if they do, if there
    is one, or if an NVIDIA device may hold them. Raises ModelError."""
    if len(config.models) < 2 or (config.engine.device == "auto" and NVIDIA_CONTROL.exists()):
        return ""
    plan = plan_memory(config)
    if plan is None or plan.fits:
        return ""
    return (
        f"models: not enough memory: {plan.describe()}; expected less: lower kv_memory_mib in"
        " [models.engine], or serve fewer models"
    )


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
