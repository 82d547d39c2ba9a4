"""`trunkline plan`, and what `trunkline doctor` says of `engine.gpus`: which models fit which GPUs.

Estimates by the model's card, as `gateway.engines.device_memory` makes them. It asks no GPU but for
its memory, and needs none where the memory is given.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model_store import ModelCard, load_card, size_mib
from engine.model_store.tensors import lacks_lanes
from gateway.cli.arguments import UsageError
from gateway.cli.doctor.check import Check
from gateway.cli.result import CommandCall, CommandError, CommandResult, Entry, Table, table_text
from gateway.config import Config
from gateway.engines.device_memory import (
    ENGINE_DEVICE_MIB,
    device_weights_mib,
    read_device_memory,
    runs_on_device,
)
from gateway.levels.model_cost import find_card, kv_bytes_per_token, running_states_bytes

LANES = (1, 2, 4, 8)
"""GPUs of one engine that a plan tries."""
KV_TOKENS_MIN = 32_768
"""Fewer tokens of KV serve nobody: the model does not fit."""
FREE_PART = 0.95
"""How much of a GPU's free memory a plan fills: the rest is for steps."""


def plan_lanes(
    card: ModelCard, engine: EngineConfig, free_mib: Sequence[int], file_mib: int
) -> Table:
    """Return a row for each number of GPUs that one engine of a model could have: memory of the
    weights on each, tokens of KV in what is left of all beside the states of running sequences, and
    whether that is enough.

    `free_mib`: of each GPU, in order; the least of those used decides.
    """
    weights_mib = device_weights_mib(card, engine.weights, file_mib)
    token_bytes = kv_bytes_per_token(card.config, engine.kv_dtype)
    states_bytes = running_states_bytes(card.config, engine)
    rows: Table = []
    for lanes in LANES:
        if lanes > len(free_mib):
            break
        lacking = lacks_lanes(card.config, lanes)
        own_mib = -(-weights_mib // lanes)
        left_mib = int(min(free_mib[:lanes]) * FREE_PART) - own_mib - ENGINE_DEVICE_MIB
        tokens = max(0, left_mib * lanes * 2**20 - states_bytes) // token_bytes
        fits = not lacking and tokens >= KV_TOKENS_MIN
        note = lacking or ("" if fits else f"expected {KV_TOKENS_MIN:,} tokens of KV or more")
        rows.append(
            {
                "model": card.name, "gpus": lanes, "fits": fits, "weights_mib": own_mib,
                "kv_mib": max(0, left_mib) * lanes, "kv_tokens": 0 if lacking else tokens,
                "note": note,
            }
        )  # fmt: skip
    return rows


def advice_of(rows: Table, gpus: int) -> str:
    """Return what is best on so many GPUs, in a sentence."""
    fitting = [int(str(row["gpus"])) for row in rows if row["fits"]]
    if not fitting:
        return "fits none of these: take weights of fewer bits, or more or larger GPUs"
    least = fitting[0]
    replicas = gpus // least
    if replicas < 2:
        return f"one engine over {least} GPUs" if least > 1 else "one engine"
    each = "a GPU each" if least == 1 else f"{least} GPUs each"
    return (
        f"{replicas} replicas with {each} serve more requests than one engine over all"
        f" {replicas * least}; more GPUs an engine only make one stream faster"
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, help="GPUs to plan for; default: those here")
    parser.add_argument("--gpu-mib", type=int, help="free memory of each; default: what they tell")


def _plan(call: CommandCall) -> CommandResult:
    """Say which prepared models fit, and how."""
    options, config = call.options, call.config
    free_mib = _free_mib(options.gpus, options.gpu_mib)
    rows: Table = []
    words: list[str] = []
    for card in _cards(config):
        found = plan_lanes(card, config.engine, free_mib, size_mib(Path(card.source)))
        rows += found
        words.append(f"{card.name}: {advice_of(found, len(free_mib))}")
    if not rows:
        raise CommandError(
            f"no prepared model in {config.models_dir}; expected one that `trunkline serve` or"
            " `trunkline pull` has brought there"
        )
    numbers = ("gpus", "weights_mib", "kv_mib", "kv_tokens")
    return CommandResult("\n".join([table_text(rows, right=numbers), "", *words]), rows)


def _free_mib(gpus: int | None, gpu_mib: int | None) -> list[int]:
    """Return the free memory of each GPU to plan for."""
    if gpus is not None and gpus < 1:
        raise UsageError(f"plan: --gpus is {gpus}; expected 1 or more")
    if gpu_mib is not None:
        return [gpu_mib] * (gpus or 1)
    found: list[int] = []
    for number in range(gpus or LANES[-1]):
        memory = read_device_memory(os.environ, gpu=number)
        if memory is None:
            break
        found.append(memory.free_mib)
    if not found or len(found) < (gpus or 1):
        raise CommandError(
            f"nvidia-smi tells of {len(found)} GPUs here; expected {gpus or 'one'}, or --gpu-mib"
        )
    return found


def _cards(config: Config) -> list[ModelCard]:
    """Return the cards of all models that a server has prepared, by name."""
    found = []
    for path in sorted((config.models_dir / "prepared").glob("*/model_card.json")):
        try:
            found.append(load_card(path.parent))
        except ModelError:  # of another version, or damaged
            continue
    return sorted(found, key=lambda card: card.name)


def check_gpus(config: Config) -> list[Check]:
    """Return a finding for each prepared model over several GPUs."""
    found = []
    for model in config.served_models():
        engine = config.engine_of(model)
        card = find_card(model.source, config.models_dir)
        lanes = len(engine.gpus)
        if card is None or lanes < 2:
            continue
        name = f"GPUs {model.name}".strip()
        if lacking := lacks_lanes(card.config, lanes):
            fix = "set engine.gpus to one GPU, or to a number that divides its heads"
            found.append(Check(name, False, f"engine.gpus names {lanes} GPUs: {lacking}", fix))
            continue
        text = f"{card.name} over GPUs {', '.join(map(str, engine.gpus))}"
        found.append(Check(name, True, text, _replicas_advice(card, engine)))
    return found


def _replicas_advice(card: ModelCard, engine: EngineConfig) -> str | None:
    """Return that replicas would serve more, where the model fits fewer GPUs than it has."""
    if not runs_on_device(engine):
        return None
    memory = [read_device_memory(os.environ, gpu=number) for number in engine.gpus]
    total = [one.total_mib for one in memory if one is not None]
    if len(total) < len(engine.gpus):
        return None
    rows = plan_lanes(card, engine, total, size_mib(Path(card.source)))
    advice = advice_of(rows, len(total))
    return advice if "replicas" in advice else None


COMMANDS: Mapping[str, Entry] = {"plan": Entry(_add_plan, _plan)}
