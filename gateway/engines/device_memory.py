"""The memory that the served models need beside each other on NVIDIA devices, and what these have.

An engine takes the first device that it sees, so several models share its memory, unless
`engine.gpus` names others; of a model over several each has an even part. Estimates before anything
is loaded: weights by the model's card, KV blocks, and what CUDA and the kernels of an engine take.
Devices are asked through `nvidia-smi`, which comes with their driver.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

from engine.config import EngineConfig, WeightsKind
from engine.model_store import ModelCard
from engine.model_store.gguf_header import read_header
from gateway.levels.model_cost import weights_of

NVIDIA_CONTROL = Path("/dev/nvidiactl")
NVIDIA_SMI_TIMEOUT_S = 10.0
ENGINE_DEVICE_MIB = 700
"""Device memory of an engine beside weights and KV: CUDA's context, kernels, graphs, scratch."""
WEIGHT_BYTES = 2
"""Bytes of a weight on a device: bf16."""
INT4_BYTES = 5 / 8
"""Bytes of a packed weight of 4 bits on a device, with its part of a scale and a shift."""
MXFP4_BYTES = 17 / 32
"""Bytes of a weight in MXFP4, with its part of a scale."""

_PACKED_LAYOUTS = ("fp8", "mxfp4", "mxfp4_rows")
_PACKED_MATRICES = ("awq", "gptq", "gptq_v2", "packed_rows")
"""Layouts whose matrices stay packed, and experts do not."""
_GGUF_INT4, _GGUF_MXFP4 = (2, 3, 12), 39
"""Types of tensors: Q4_0, Q4_1, Q4_K; MXFP4."""

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
    gpu: int | None = None
    """Its number in `engine.gpus`; None where no model names any."""

    @property
    def need_mib(self) -> int:
        """Memory of weights, KV blocks and engines together."""
        own = sum(one.weights_mib + one.kv_mib for one in self.shares)
        return own + ENGINE_DEVICE_MIB * len(self.shares)

    @property
    def fits(self) -> bool:
        """Whether the device's free memory suffices."""
        return self.need_mib <= self.device.free_mib

    @property
    def name(self) -> str:
        """The device in words."""
        return "the NVIDIA device" if self.gpu is None else f"GPU {self.gpu}"

    def describe(self) -> str:
        """Return the numbers in words."""
        parts = [describe_share(one.name, one.weights_mib, one.kv_mib) for one in self.shares]
        count = len(self.shares)
        programs = "the engine" if count == 1 else f"{count} engines"
        parts.append(f"{ENGINE_DEVICE_MIB * count} for {programs}")
        return (
            f"{self.device.free_mib} of {self.device.total_mib} MiB free on {self.name},"
            f" about {self.need_mib} needed ({', '.join(parts)})"
        )


def describe_share(name: str, weights_mib: int, kv_mib: int) -> str:
    """Return the memory of a model in words. `name`: "" for a single model."""
    owner = f"{name}'s " if name else ""
    return f"{weights_mib} for {name or 'the model'}, {kv_mib} for {owner}KV"


def device_weights_mib(card: ModelCard, kind: WeightsKind, file_mib: int) -> int:
    """Return the memory of a prepared model's weights on a device, about. `kind`: its engine's
    setting. Reads the header of a GGUF file.

    Two bytes each, but where the kernels take packed ones: a folder takes the size of its files, of
    a GGUF file each matrix of 4 bits `INT4_BYTES` a weight and experts in MXFP4 `MXFP4_BYTES`, and
    one rounded to fp8 a byte.
    """
    weights = weights_of(card.config)
    if kind == "bf16" or card.config.recurrent_layers:
        return weights * WEIGHT_BYTES // 2**20
    layout = "" if card.quantisation is None else card.quantisation.layout
    if layout in _PACKED_LAYOUTS or (layout in _PACKED_MATRICES and card.config.moe is None):
        return file_mib
    if kind == "fp8":
        dense = card.config.vocab * card.config.hidden * (1 if card.config.tie_embeddings else 2)
        return (weights + dense) // 2**20
    packed, packed_bytes = (0, 0.0) if layout else _packed_of(Path(card.source))
    return int((weights - packed) * WEIGHT_BYTES + packed_bytes) // 2**20


def _packed_of(source: Path) -> tuple[int, float]:
    """Return how many weights of a GGUF file stay packed, and their bytes; none of a folder."""
    if not source.is_file():
        return 0, 0.0
    tensors = read_header(source).tensors
    int4 = sum(
        math.prod(one.shape)
        for one in tensors
        if one.type_id in _GGUF_INT4 and len(one.shape) == 2 and one.name != "token_embd.weight"
    )
    mxfp4 = sum(
        math.prod(one.shape)
        for one in tensors
        if one.type_id == _GGUF_MXFP4 and len(one.shape) == 3
    )
    return int4 + mxfp4, int4 * INT4_BYTES + mxfp4 * MXFP4_BYTES


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
    environment: Mapping[str, str], ask: Ask | None = None, gpu: int | None = None
) -> DeviceMemory | None:
    """Return the memory of the device that engines will take, or of a number in `engine.gpus`; None
    if `nvidia-smi` does not tell. Of several devices without a number or CUDA_VISIBLE_DEVICES,
    which CUDA orders by speed, the one with most free memory. Takes about 0.1 s."""
    seen = [one.strip() for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    seen = [one for one in seen if one]
    if gpu is not None and seen and gpu >= len(seen):
        return None
    visible = (seen[gpu or 0]) if seen else ("" if gpu is None else str(gpu))
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
