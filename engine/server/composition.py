"""The composition root: builds a core over the real runner of a prepared model folder.

`engine.server.server` calls it once the gateway has named the model. Torch is imported inside the
function, and in no other module of this folder but `levels_below`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.api import EngineInfo
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.constraints import Constraints
from engine.core.core import Core
from engine.errors import ModelError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.grammar import MaskFiller
from engine.grammar.sandbox import SandboxSettings
from engine.model_store import ModelCard, load_card
from engine.server.links.keeper_link import ListenSettings

if TYPE_CHECKING:
    from engine.drafts.model import ModelSource
    from engine.runner.loaded_model import LoadedModel


def core_of_model(
    folder: Path,
    config: EngineConfig,
    host_fds: tuple[int, int] | None = None,
    listen: ListenSettings | None = None,
) -> tuple[Core, EngineInfo]:
    """Return a core over a model's runner, and what the gateway needs to know of it.

    `host_fds`: the files of host memory that outlives the engine; `listen`: where others reach it,
    if it may have peers. Takes as long as reading the weights. Raises ModelError.
    """
    show_gpus(config.gpus, os.environ)
    from engine.server.levels_below import build_levels

    card = load_card(folder)
    draft = load_card(Path(config.drafting_model)) if config.drafting_model else None
    built, draft_model = _load(card, draft, config)
    cache = PrefixCache(
        blocks=built.blocks,
        block_size=config.block_size,
        context_tokens=built.context,
        windows=built.kv_format.windows,
        state_blocks=built.state_blocks,
    )
    digest = _digest(card, config, built.kv_format.name)
    what = digest, host_fds, time.monotonic(), listen
    levels, off = build_levels(cache, config, built.kv, *what)
    core = Core(
        *(cache, built.runner, config.for_device(built.device), time.monotonic),
        vocab_size=card.config.vocab,
        context_tokens=built.context,
        pipeline_depth=built.pipeline_depth,
        constraints=_constraints(card, config, is_elsewhere=listen is not None),
        levels=levels,
        kv_fidelity=built.kv_format.fidelity,
        attention_lacks=built.attention_lacks,
        run_up=card.config.run_up,
        draft_step_s=built.draft_step_s,
        draft_model=draft_model,
    )
    core.engine_stats.levels_off = off
    info = EngineInfo(
        epoch=secrets.token_hex(8),
        model=card.name,
        model_digest=digest,
        model_dir=str(folder),
        vocab_size=card.config.vocab,
        context_tokens=built.context,
        block_size=config.block_size,
        blocks=built.blocks,
        floor_blocks_max=core.cache.floor_blocks_max,
        kv_bytes_per_block=built.kv_format.block_bytes,
        kv_format=built.kv_format.name,
        device=built.device,
        pid=os.getpid(),
        promisable_blocks=core.cache.promisable_blocks,
        kv_windows=built.kv_format.windows,
        kv_fidelity=built.kv_format.fidelity,
        promisable_on_device=core.cache.promisable_on_device,
        attention_policies=config.attention_policies,
        attention_lacks=built.attention_lacks,
        draft_model="" if draft is None else draft.name,
        role=config.role,
        pool_domain="" if levels is None else levels.pool_domain,
    )
    return core, info


def _load(
    card: ModelCard, draft: ModelCard | None, config: EngineConfig
) -> tuple[LoadedModel, ModelSource | None]:
    """Load a model, and its draft model before it: torch's threads are as the last one needs
    them."""
    import torch

    from engine.runner.draft_model import Build, build_draft_model, warn_of_slow

    build: Build
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        from engine.runner.gpu_build import build_gpu_runner as build
    else:
        from engine.runner.cpu_runner import build_runner as build
    if draft is None:
        return build(card, config), None
    source = build_draft_model(card, draft, config, build)
    built = build(card, config)
    warn_of_slow(source, draft.name, built.draft_step_s)
    return built, source


def show_gpus(gpus: Sequence[int], environment: MutableMapping[str, str]) -> None:
    """Let CUDA see only these GPUs of its own, in this order; all if there are none. Call it before
    CUDA is used. Raises ModelError `unsupported` for a number that CUDA_VISIBLE_DEVICES lacks.
    """
    if not gpus:
        return
    names = [str(number) for number in gpus]
    seen = environment.get("CUDA_VISIBLE_DEVICES")
    if seen is not None:
        known = [one.strip() for one in seen.split(",") if one.strip()]
        if max(gpus) >= len(known):
            raise ModelError(
                "unsupported",
                f"engine.gpus names GPU {max(gpus)}; CUDA_VISIBLE_DEVICES has {len(known)}:"
                f" expected numbers below {len(known)}",
            )
        names = [known[number] for number in gpus]
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi numbers them
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def _digest(card: ModelCard, config: EngineConfig, kv_format: str) -> str:
    """Return the digest of all that decides the bytes of KV."""
    weights = "" if config.weights == "auto" else f"-{config.weights}"
    return f"{card.digest}-{kv_format}-{config.block_size}{weights}"


def _constraints(card: ModelCard, config: EngineConfig, *, is_elsewhere: bool) -> Constraints:
    """Build the grammar compiler. It costs nothing before the first grammar, unless gateways would
    take an engine for lost that stands still for two seconds."""
    settings = SandboxSettings(str(card.tokenizer_path), card.config.vocab, card.stop_token_ids)
    threads = config.threads or os.cpu_count() or 1
    compiler = GrammarCompiler(settings, time.monotonic)
    if is_elsewhere:
        compiler.load()
    return Constraints(compiler, MaskFiller(min(threads, 8)))
