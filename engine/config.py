"""The engine's settings: one strict struct, made from the gateway's TOML and passed by value.

It reads no file and no environment. Field names end with their unit.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from engine.api import AttentionPolicy, EngineRole

Positive = Annotated[int, Meta(ge=1)]

WeightsKind = Literal["auto", "bf16", "fp8"]


class RemoteConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A remote store below the disk, which holds only sealed copies.

    Credentials come from the environment.
    """

    url: str = ""
    """`s3://BUCKET/PREFIX`, `gs://…`, `az://…` or `file:///FOLDER`; empty: none."""
    gib: Annotated[float, Meta(ge=0)] = 0.0
    """The bound of the store; 0: none."""
    timeout_ms: Annotated[float, Meta(gt=0, le=60_000)] = 2_000.0
    """The longest that any call of it may take."""
    tokens_min: Positive = 1024
    """The shortest prefix that is loaded from it."""
    shared: bool = False
    """All replicas of the model with this address and master key read what each has put there; it
    holds extra copies of what their disks have."""


class LevelsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Levels of the cache below the device: host memory and a disk.

    `disk_tokens_min`, `host_tokens_min`: shortest prefix that is stored without a promise, or
    loaded.
    """

    host_mib: Annotated[int, Meta(ge=0)] | Literal["auto"] = 0
    """Host memory for copies of blocks; 0: none beyond the stage through which the disk reads and
    writes (`stage_mib`); "auto": a share of what is free at the start, which the gateway puts in
    its place."""
    stage_mib: Positive = 256
    disk_gib: Annotated[float, Meta(ge=0)] = 0.0
    """Room on disk, index included; 0: no disk."""
    dir: str = ""
    """The folder on disk."""
    slab_mib: Positive = 1024
    io_threads: Positive = 4
    disk_write_gib_per_day: Annotated[float, Meta(ge=0)] = 0.0
    """The most that is written in a day, because of wear; 0: as much as `disk_gib`; promised
    prefixes are counted and never refused for it."""
    disk_tokens_min: Positive = 256
    host_tokens_min: Positive = 64
    look_ms: Annotated[float, Meta(gt=0)] = 20.0
    """The longest wait for the disk's index."""
    verify_host: Positive = 64
    """One of so many loads from host memory is checked."""
    seal: bool = False
    """What is on disk is encrypted under a key of its own for each namespace, wrapped by the master
    key in `key_file` or in the environment's variable `key_env`."""
    key_file: str = ""
    key_env: str = ""
    key_file_before: str = ""
    """The former master key, to replace."""
    remote: RemoteConfig = RemoteConfig()
    """Where copies go that the disk has no room for, and promised ones too."""
    host_keeps_promises: bool = False
    """Without a disk, a promised prefix may leave the device once host memory has it."""

    @property
    def is_on(self) -> bool:
        """Return whether there is any level below the device."""
        return self.host_mib != 0 or self.disk_gib > 0

    @property
    def arena_mib(self) -> int:
        """Return the host memory that the levels take in MiB, with the disk's stage. An "auto" that
        is still without its number takes no more than the stage."""
        own = 0 if isinstance(self.host_mib, str) else self.host_mib
        return own or (self.stage_mib if self.disk_gib else 0)


GAP_TARGET_SHARED_MS = {"cuda": 12.0}
"""The default by device: on a GPU, steps of 12 ms compute prompts at three quarters of the speed of
long ones, and another tenant's request waits for one and a half of them. A CPU's steps of such
length would hold few tokens."""


SPARE_SEATS = 32
"""Places of sequences on a GPU beyond `sequences_max`, for those that begin in the step in which
others end; one more is for padding. Recurrent layers have a state for each."""
DRAFT_PLACE_TOKENS, DRAFT_PLACES_MAX = 512, 32
"""Tokens of KV that a draft model has for each sequence, and most sequences that have some."""


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one engine.

    `weights` "auto": as the model's files hold them, packed if the device multiplies that, else
    in `dtype`. "bf16": none is packed. "fp8", on a GPU: linear maps that the files do not pack are
    rounded to 8 bits at the start. `kv_dtype` "int8": keys and values of 8 bits with a scale for
    each token and head; a model whose path lacks it is refused. `threads` 0: one per core.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """The GPUs of the engine, by number as `nvidia-smi` has them, or among those that
    CUDA_VISIBLE_DEVICES names; empty: one. Several share the model (tensor parallelism)."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    weights: WeightsKind = "auto"
    kv_dtype: Literal["auto", "bf16", "fp32", "int8"] = "auto"
    block_size: Literal[16] = 16
    kv_memory_mib: Positive = 512
    """Device memory for KV blocks; `kv_blocks` overrides it when not 0."""
    kv_blocks: Annotated[int, Meta(ge=0)] = 0
    context_tokens_max: Annotated[int, Meta(ge=0)] = 0
    step_tokens_max: Positive = 2048
    """The token budget of one step; each stream has its token and prompts have one, even beyond
    it."""
    prefill_chunk_tokens_max: Annotated[int, Meta(ge=0)] = 0
    """The longest slice of one prompt in a step; 0: as long as the step allows."""
    gap_target_ms: Annotated[float, Meta(gt=0)] = 50.0
    """The longest time between two tokens of a stream that prompts of other requests may cause: a
    step gets as many prompt tokens as its measured cost allows."""
    gap_target_shared_ms: Annotated[float, Meta(ge=0)] = 0.0
    """The same while several tenants have requests; 0: `GAP_TARGET_SHARED_MS` by the device, or
    `gap_target_ms`, if that is less."""
    sequences_max: Positive = 64
    queue_requests_max: Positive = 512
    queue_tokens_max: Positive = 1_000_000
    preemptions_max: Positive = 3
    threads: Annotated[int, Meta(ge=0)] = 0
    heartbeat_s: Annotated[float, Meta(gt=0)] = 0.5
    step_timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    check_interval_s: Annotated[float, Meta(gt=0)] = 600.0
    drain_timeout_s: Annotated[float, Meta(ge=0)] = 60.0
    levels: LevelsConfig = LevelsConfig()
    speculation: Literal["auto", "off"] = "auto"
    """Drafts, which change no token; "auto": where they pay."""
    draft_model: str = ""
    """A small model of the same tokens that drafts, by name as `model.name`; empty: none. Engines
    get the folder of the prepared one."""
    attention_policies: tuple[AttentionPolicy, ...] = ()
    """Attention windows that requests may ask for; none by default."""
    role: EngineRole = "any"
    """What gateways use it for, where a model has several engines."""

    def __post_init__(self) -> None:
        if len(set(self.gpus)) < len(self.gpus):
            twice = next(one for one in self.gpus if self.gpus.count(one) > 1)
            raise ValueError(f"gpus names GPU {twice} twice: {list(self.gpus)}; expected each once")
        if self.gpus and self.device == "cpu":
            raise ValueError('gpus is set, and device is "cpu"; expected "auto" or "cuda"')

    @property
    def drafting_model(self) -> str:
        """Return the draft model that is loaded; empty: none."""
        return self.draft_model if self.speculation == "auto" else ""

    @property
    def draft_places(self) -> int:
        """Return how many sequences have KV in a draft model's pool."""
        return min(self.sequences_max, DRAFT_PLACES_MAX)

    def for_device(self, device: str) -> EngineConfig:
        """Return the settings with `gap_target_shared_ms` as it is on this device."""
        usual = GAP_TARGET_SHARED_MS.get(device, self.gap_target_ms)
        shared = min(self.gap_target_shared_ms or usual, self.gap_target_ms)
        return replace(self, gap_target_shared_ms=shared)
