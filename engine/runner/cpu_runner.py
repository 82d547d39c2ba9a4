"""The CPU runner: executes step plans on a model, and builds that runner from a model card.

In torch it also runs on a GPU, operation by operation: models whose attention or experts the GPU
kernels lack run there, right and slow. It owns the KV storage, the model, the sampler and the last
token of each sequence, and decides nothing: the plan says everything. `engine.server.composition`
calls `build_runner`; core calls `launch` and `collect`.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from typing import Any

import numpy as np
import torch

from engine.api import SampledToken
from engine.attention.batch import Batch, make_batch
from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import (
    AttentionBackend,
    attention_spec,
    lacks_attention_windows,
)
from engine.attention.torch_backend import TorchAttention
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.kv.format import KvFormat, Layout, kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture, ModelCard
from engine.models.cpu_decoder import CpuDecoder, Kernels, load_kernels
from engine.models.decoder import DecoderModel
from engine.models.interface import Model
from engine.models.layers import TorchOps
from engine.models.packing import cpu_form
from engine.plan import BegunSequence, BlockCopy, Mask, Row, StepPlan, StepResult, TokensBySequence
from engine.runner.loaded_model import (
    LoadedModel,
    blocks_of,
    check_room_for_states,
    context_of,
)
from engine.sampling.logprobs import logprob_entries
from engine.sampling.sampler import FAILURES, Sampler
from engine.states.cpu_states import CpuStates
from engine.states.places import blocks_for_kv, blocks_of_state
from engine.states.sequence_states import SequenceStates
from engine.weights import load_packed

CPU = torch.device("cpu")

DRAFTED_TOKENS_MAX = 64
"""Most tokens of a step with drafts."""

TIMED_TOKENS, TIMES = (1, 2, 4, 8, 16, 32, 64), 3
"""The steps that are timed at the start, and how often each at most."""
TOKEN_COST_MIN = 0.01
"""Of a step of one token: each further one is taken to cost that at least, whatever other programs
did while it was timed."""
TIMING_S_MAX = 1.0
"""Seconds after which no larger step is timed: a start must not wait long for a large model."""

WARM_UP_TOKENS = 33
"""Tokens of the prompt that is run before the first request: of two whole blocks and one more."""


class CpuRunner:
    """`engine.plan.Runner` on the CPU. `launch` computes the step before it returns.

    The model runs in C with `kernels`, else in torch on `device`. `dtype` "auto" means bf16 weights
    and KV in C, whose arithmetic is fp32 where the CPU has no bf16 products, fp32 in torch on the
    CPU, and bf16 in torch on a GPU. KV in int8 changes no weight. Tokens are drawn on the CPU.
    """

    def __init__(
        self,
        card: ModelCard,
        config: EngineConfig,
        *,
        blocks: int,
        context: int,
        kernels: Kernels | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.block_size = config.block_size
        self.kv = KvStorage(_kv_format(card.config, config, kernels, device), blocks, device)
        dtype = _weights_dtype(config, kernels, device)
        keeping = kernels if config.weights == "auto" else None
        weights = load_packed(card, dtype, device, cpu_form(dtype, keeping))
        self.model: Model[Any]  # takes the attention backend that is made beside it
        self.attention: AttentionBackend
        self.states: SequenceStates | CpuStates | None = None
        pool = self.kv.data.view(torch.uint8).flatten(1) if card.config.recurrent_layers else None
        if kernels is not None:
            states = None if pool is None else CpuStates(card.config, pool)
            self.model = CpuDecoder(card.config, weights, kernels, self.kv, context, states)
            self.attention, self.states = CpuAttention(attention_spec(card.config)), states
        else:
            own = None if pool is None else SequenceStates(card.config, dtype, device, pool)
            self.model = DecoderModel(card.config, weights, TorchOps(), own)
            self.attention, self.states = TorchAttention(card.config, self.kv, context), own
        self.sampler = Sampler(card.config.vocab)
        self._tokens_max = min(context, blocks * self.block_size)
        self._last: dict[int, int] = {}
        self._results: deque[StepResult] = deque()

    @property
    def state_blocks(self) -> int:
        """Blocks that a kept state takes; 0 where a run-up replaces it."""
        if self.states is None or self.model.config.run_up:
            return 0
        return blocks_of_state(self.states.layout, self.kv.format.block_bytes)

    def launch(self, plan: StepPlan) -> None:
        """Compute the step."""
        started_s = time.perf_counter()
        with torch.inference_mode():
            self._results.append(self._run(plan, started_s))

    def collect(self) -> StepResult:
        """Return the oldest launched step's result."""
        return self._results.popleft()

    def warm_up(self) -> None:
        """Run a prompt and a decoding step, so that no client waits for first allocations.

        Call it while no block is in use: it writes the first blocks and zeroes them again.
        """
        for count in (min(WARM_UP_TOKENS, self._tokens_max), 1):
            self._run_tokens(count, slice(-1, None))
        self.kv.data[: -(-WARM_UP_TOKENS // self.block_size)].zero_()

    def time_steps(self, tokens_max: int) -> tuple[float, ...]:
        """Return the seconds of steps of 1, 2, 3… up to `tokens_max` tokens that all need logits; a
        few are measured, the others lie between them. Under the conditions of `warm_up`.
        """
        sizes = [size for size in TIMED_TOKENS if size <= min(tokens_max, self._tokens_max)]
        took_s: list[float] = []
        until_s = time.perf_counter() + TIMING_S_MAX
        while len(took_s) < len(sizes) and (len(took_s) < 2 or time.perf_counter() < until_s):
            least_s = math.inf
            for _ in range(TIMES):
                began_s = time.perf_counter()
                self._run_tokens(sizes[len(took_s)], slice(None))
                least_s = min(least_s, time.perf_counter() - began_s)
                if time.perf_counter() > until_s:
                    break
            took_s.append(least_s)
        timed = sizes[: len(took_s)]
        self.kv.data[: -(-timed[-1] // self.block_size)].zero_()
        every = np.interp(range(1, timed[-1] + 1), timed, np.maximum.accumulate(took_s))
        least = took_s[0] * (1 + TOKEN_COST_MIN * np.arange(len(every)))
        return tuple(np.maximum(every, least).tolist())

    def _run_tokens(self, count: int, logits: slice) -> None:
        """Compute the first `count` tokens of the vocabulary, which take different experts, in the
        first blocks, and some logits."""
        blocks = list(range(-(-count // self.block_size)))
        beside = (blocks,) * len(self.kv.format.windows)
        row = Row(-1, 0, count, blocks, 0, list(range(count)), beside=beside)
        plan = StepPlan(step=0, rows=(row,), copies=(BlockCopy(0, 0, 1),))
        with torch.inference_mode():
            batch = make_batch(plan, self.block_size, lambda _: 0)
            if self.states is not None:
                self.states.begin(plan)
            self.attention.begin(plan, batch)
            self.model.logits(self._hidden(batch)[logits])

    def _run(self, plan: StepPlan, started_s: float) -> StepResult:
        for sequence_id in plan.ended:
            self.sampler.end(sequence_id)
            self._last.pop(sequence_id, None)
        for begun in plan.begun:
            self._begin(begun)
        if self.states is not None:
            self.states.begin(plan)
            self.states.clear(blocks_for_kv(plan, self.block_size))
        self.kv.copy(plan.copies)
        if not plan.rows:
            return StepResult(step=plan.step, elapsed_s=time.perf_counter() - started_s)
        batch = make_batch(plan, self.block_size, self._last.__getitem__)
        self.attention.begin(plan, batch)
        logits = self.model.logits(self._hidden(batch)[batch.logit_rows]).float().cpu()
        if self.states is not None:
            self.states.end(plan)
        sampled, failed, prompt_logprobs = self._sample(plan, logits)
        return StepResult(
            step=plan.step,
            sampled=sampled,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
            elapsed_s=time.perf_counter() - started_s,
        )

    def _hidden(self, batch: Batch) -> torch.Tensor:
        return self.model.forward(batch.token_ids.to(self.device), self.attention)

    def _begin(self, begun: BegunSequence) -> None:
        self.sampler.begin(begun)
        self._last[begun.sequence_id] = begun.token_ids[-1]

    def _sample(
        self, plan: StepPlan, logits: torch.Tensor
    ) -> tuple[TokensBySequence, dict[int, str], TokensBySequence]:
        """Return the drawn tokens, the failed sequences and the prompt logprobs of a step.

        logits [rows, vocab] fp32: the plan's rows that need logits, in order.
        """
        drawing: list[tuple[int, int, Row]] = []
        prompt_logprobs: TokensBySequence = {}
        end = 0
        for row in plan.rows:
            count = row.count if row.prompt_logprobs is not None else bool(row.samples) + row.drafts
            if row.prompt_logprobs is not None:
                known = logits[end : end + count]
                prompt_logprobs[row.sequence_id] = self._prompt_logprobs(row, known)
            end += count
            first = end - 1 - row.drafts
            drawing.extend((sequence_id, first, row) for sequence_id in row.samples)
        sampled, failed = self._draw(drawing, logits, plan.masks)
        return sampled, failed, prompt_logprobs

    def _draw(
        self, drawing: list[tuple[int, int, Row]], logits: torch.Tensor, masks: dict[int, Mask]
    ) -> tuple[TokensBySequence, dict[int, str]]:
        """Return the tokens of sequences, each with its row and its first row of logits, and the
        sequences without one.

        A sequence with drafts goes on to its next row of logits while it draws the draft there.
        """
        sampled: dict[int, tuple[SampledToken, ...]] = {}
        failed: dict[int, str] = {}
        position = 0
        while drawing:
            rows = [first + position for _, first, _ in drawing]
            given = logits if rows == list(range(len(logits))) else logits[rows]
            tokens = self.sampler.sample(
                given, [sequence_id for sequence_id, _, _ in drawing], masks
            )
            right: list[tuple[int, int, Row]] = []
            for one, token in zip(drawing, tokens, strict=True):
                sequence_id, _, row = one
                if token.token_id < 0:
                    if not position:
                        failed[sequence_id] = FAILURES[token.token_id]
                    continue
                self._last[sequence_id] = token.token_id
                sampled[sequence_id] = (*sampled.get(sequence_id, ()), token)
                if position < row.drafts and _draft(row, position) == token.token_id:
                    right.append(one)
            masks = {id_: row.draft_masks[position] for id_, _, row in right if row.draft_masks}
            drawing, position = right, position + 1
        return sampled, failed

    def _prompt_logprobs(self, row: Row, logits: torch.Tensor) -> tuple[SampledToken, ...]:
        """Return logprobs of the known tokens that follow each computed position."""
        following = list((row.token_ids or ())[1:])
        if row.next_token_id is not None:
            following.append(row.next_token_id)
        top = row.prompt_logprobs or 0
        known = logits[: len(following)]
        return tuple(logprob_entries(known, following, [top] * len(following)))


def _draft(row: Row, number: int) -> int:
    """Return a row's draft, counted from its first."""
    assert row.token_ids is not None, "drafts follow a token that the plan knows"
    return row.token_ids[row.count - row.drafts + number]


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}


def _weights_dtype(
    config: EngineConfig, kernels: Kernels | None, device: torch.device
) -> torch.dtype:
    takes_bf16 = kernels is not None or device != CPU
    return _DTYPES.get(config.dtype, torch.bfloat16 if takes_bf16 else torch.float32)


def _kv_format(
    model: Architecture, config: EngineConfig, kernels: Kernels | None, device: torch.device
) -> KvFormat:
    dtype = _DTYPES.get(config.kv_dtype, _weights_dtype(config, kernels, device))
    layout: Layout = "slots" if kernels is None else "panels"
    return kv_format(model, dtype, config.block_size, layout, has_groups=True)


def build_runner(card: ModelCard, config: EngineConfig, device: torch.device = CPU) -> LoadedModel:
    """Load a model on the CPU, or in torch on another device, and warm it up. Raises ModelError.

    Memory: the weights in the compute dtype, and `kv_memory_mib` of blocks. The first start on a
    machine compiles the kernels, which takes about three seconds.
    """
    if config.weights == "fp8":
        raise ModelError(
            "unsupported",
            "engine.weights is fp8, which only a GPU's kernels multiply; expected auto or bf16 on a"
            " CPU, and for a model that runs in torch",
        )
    threads = config.threads or os.cpu_count() or 1
    kernels = load_kernels(card.config, threads) if device == CPU else None
    # With the kernels, torch gets one thread: its pool would spin for the same cores.
    torch.set_num_threads(1 if kernels is not None else threads)
    context = context_of(card.config, config)
    form = _kv_format(card.config, config, kernels, device)
    blocks = blocks_of(form, config)
    runner = CpuRunner(card, config, blocks=blocks, context=context, kernels=kernels, device=device)
    check_room_for_states(card.config, runner.state_blocks, form, config)
    runner.warm_up()
    is_drafting = config.speculation == "auto"
    return LoadedModel(
        runner,
        runner.kv,
        context,
        pipeline_depth=1,
        attention_lacks=lacks_attention_windows(card.config, form),
        state_blocks=runner.state_blocks,
        draft_step_s=runner.time_steps(DRAFTED_TOKENS_MAX) if is_drafting else (),
    )
