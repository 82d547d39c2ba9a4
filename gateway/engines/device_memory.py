"""The memory that the served models need beside each other on one NVIDIA device, and what it has.

Every engine takes the first device that it sees, so several models share its memory. Estimates
before anything is loaded: weights in bf16 by the model's shape, KV blocks, and what CUDA and the
kernels of an engine take. The device is asked through `nvidia-smi`, which comes with its driver.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

from engine.config import EngineConfig

NVIDIA_CONTROL = Path("/dev/nvidiactl")
NVIDIA_SMI_TIMEOUT_S = 10.0
ENGINE_DEVICE_MIB = 700
"""Device memory of an engine beside weights and KV: CUDA's context, kernels, graphs, scratch."""
WEIGHT_BYTES = 2
"""Bytes of a weight on a device: bf16."""

Ask = Callable[[Sequence[str]], str]
"""Runs a command and returns its standard output; raises OSError or SubprocessError."""


class DeviceMemory(Struct, frozen=True):
    """The memory of one device, in MiB: what no process has taken, and all."""

    free_mib: int
    total_mib: int


class DeviceShare(Struct, frozen=True):
    """What one model needs of a device, in MiB."""

    name: str
    weights_mib: int
    kv_mib: int


class DevicePlan(Struct, frozen=True):
    """What all models need of a device, and the device."""

    shares: tuple[DeviceShare, ...]
    device: DeviceMemory

    @property
    def need_mib(self) -> int:
        """Memory of weights, KV blocks and engines together."""
        own = sum(one.weights_mib + one.kv_mib for one in self.shares)
        return own + ENGINE_DEVICE_MIB * len(self.shares)

    @property
    def fits(self) -> bool:
        """Whether the device's free memory suffices."""
        return self.need_mib <= self.device.free_mib

    def describe(self) -> str:
        """Return the numbers in words."""
        parts = [describe_share(one.name, one.weights_mib, one.kv_mib) for one in self.shares]
        count = len(self.shares)
        programs = "the engine" if count == 1 else f"{count} engines"
        parts.append(f"{ENGINE_DEVICE_MIB * count} for {programs}")
        return (
            f"{self.device.free_mib} of {self.device.total_mib} MiB free on the NVIDIA device,"
            f" about {self.need_mib} needed ({', '.join(parts)})"
        )


def describe_share(name: str, weights_mib: int, kv_mib: int) -> str:
    """Return the memory of a model in words. `name`: "" for a single model."""
    owner = f"{name}'s " if name else ""
    return f"{weights_mib} for {name or 'the model'}, {kv_mib} for {owner}KV"


def runs_on_device(engine: EngineConfig) -> bool:
    """Return whether an engine will take an NVIDIA device: it must, or it may and there is one.
    PyTorch's CPU build never does."""
    if engine.device == "auto":
        return not lacking_device()
    return engine.device == "cuda"


def lacking_device() -> str:
    """Return why no engine can run on an NVIDIA device here, or "" if one can."""
    if not NVIDIA_CONTROL.exists():
        return f"no NVIDIA device is here ({NVIDIA_CONTROL})"
    if _is_cpu_build():
        return "the installed torch is a build without CUDA (TORCH=cuda make serve installs one)"
    return ""


def read_device_memory(
    environment: Mapping[str, str], ask: Ask | None = None
) -> DeviceMemory | None:
    """Return the memory of the device that engines will take; None if `nvidia-smi` does not
    tell. Of several devices without CUDA_VISIBLE_DEVICES, which CUDA orders by speed, the one with
    most free memory. Takes about 0.1 s."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    fields = "--query-gpu=memory.free,memory.total"
    chosen = ["-i", visible] if visible else []
    command = ["nvidia-smi", *chosen, fields, "--format=csv,noheader,nounits"]
    try:
        text = (ask or _ask)(command)
        found = [DeviceMemory(*map(int, row.split(","))) for row in text.strip().splitlines()]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None
    return max(found, key=lambda one: one.free_mib, default=None)


def _ask(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
    )
    return done.stdout


def _is_cpu_build() -> bool:
    """Return whether the installed PyTorch has no CUDA, by its version, without importing it."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True
