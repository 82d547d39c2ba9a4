"""Loads the draft model of an engine: a small model beside the one that it serves.

It gets a runner of its own, of the same code as the model's, over a pool of places
(`engine.drafts.model`). `engine.server.composition` calls it before it loads the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from engine.api import CacheGrant, Request
from engine.config import DRAFT_PLACE_TOKENS, DRAFT_PLACES_MAX, EngineConfig
from engine.drafts.model import DEPTH_MAX, READ_TOKENS, ModelSource
from engine.drafts.step_times import StepTimes
from engine.errors import ModelError
from engine.kv.format import deal_groups
from engine.model_store import ModelCard
from engine.runner.loaded_model import LoadedModel
from engine.scheduler.request_table import RequestTable

log = logging.getLogger("trunkline.engine")

SLOW_SHARE = 0.5
"""Of a step of the model: a draft model whose steps take more pays little, however right it is."""

TIMED_GUESSES, TIMED_READINGS = 3, 2
"""At the start; the last one counts."""

Build = Callable[[ModelCard, EngineConfig], LoadedModel]


def build_draft_model(
    card: ModelCard, draft: ModelCard, config: EngineConfig, build: Build
) -> ModelSource:
    """Load the draft model of a model, and return it as a source of drafts.

    Memory: its weights, and KV of 512 tokens for each of at most 32 sequences. Raises ModelError,
    `unsupported` for a pair that cannot draft.
    """
    if lack := lacking_for_drafts(draft, config):
        raise ModelError("unsupported", f"engine.draft_model: {lack}")
    places = config.draft_places
    groups = len(deal_groups([layer.window for layer in draft.config.layers]))
    own = replace(
        config,
        draft_model="",
        weights="auto",
        kv_dtype="auto",
        kv_blocks=places * groups * DRAFT_PLACE_TOKENS // config.block_size,
        context_tokens_max=DRAFT_PLACE_TOKENS,
        sequences_max=places,
        step_tokens_max=READ_TOKENS + places,
        prefill_chunk_tokens_max=0,
    )
    loaded = build(draft, own)
    source = ModelSource(
        loaded.runner,
        StepTimes(loaded.draft_step_s),
        time.perf_counter,
        places=places,
        vocab_size=min(card.config.vocab, draft.config.vocab),
        block_size=config.block_size,
        kv_groups=groups,
    )
    count_host_time(source, loaded.draft_step_s)
    return source


def count_host_time(source: ModelSource, step_s: tuple[float, ...]) -> None:
    """Have the times of a source's steps include the host's part, which a device does not tell, and
    those that read texts: by some guesses of a text of one token and of one that is read whole.
    `step_s`: as measured on the device."""
    table = RequestTable()

    def guess(tokens: int, depth: int, times: int) -> float:
        for _ in range(times):
            request = Request("", (0,) * tokens, DEPTH_MAX, CacheGrant(b""))
            sequence = table.add_sequence(table.add(request, 0.0))
            source.begin(sequence)
            source.guess({sequence.sequence_id: depth}, READ_TOKENS)
            source.end(sequence.sequence_id)
            table.remove(sequence.parent)
        return source.spent_s

    host_s = max(0.0, guess(1, DEPTH_MAX, TIMED_GUESSES) / DEPTH_MAX - step_s[0])
    read_s = guess(READ_TOKENS, 1, TIMED_READINGS)
    steps = [one_s + host_s for one_s in step_s[: READ_TOKENS - 1]]
    a_token_s = max(0.0, read_s - steps[-1]) / (READ_TOKENS - len(steps))
    more = range(1, READ_TOKENS + DRAFT_PLACES_MAX - len(steps) + 1)
    source.times = StepTimes([*steps, *(steps[-1] + count * a_token_s for count in more)])


def lacking_for_drafts(draft: ModelCard, config: EngineConfig) -> str:
    """Return why a model cannot draft for another, or "" if it can."""
    if draft.config.recurrent_layers:
        return f"{draft.name} has recurrent states; expected a draft model without"
    if len(config.gpus) > 1:
        return f"engine.gpus names {len(config.gpus)} GPUs; expected one"
    if draft.config.context < DRAFT_PLACE_TOKENS:
        return (
            f"{draft.name} has a context of {draft.config.context} tokens; expected at least"
            f" {DRAFT_PLACE_TOKENS}"
        )
    return ""


def warn_of_slow(source: ModelSource, name: str, step_s: tuple[float, ...]) -> None:
    """Log a draft model whose steps take too long beside the model's own."""
    own_s = source.times.seconds(1)
    if step_s and own_s > SLOW_SHARE * step_s[0]:
        log.warning(
            "draft_model_slow: a step of %s takes %.2f ms, one of the model %.2f; expected less"
            " than half: it will seldom draft", name, 1e3 * own_s, 1e3 * step_s[0],
        )  # fmt: skip
