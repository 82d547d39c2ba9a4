"""The CPU runner: executes step plans on a model, and builds that runner from a model card.

In torch it also runs on a GPU, operation by operation: models whose attention or experts the GPU
kernels lack run there, right and slow. It owns the KV storage, the model, the sampler and the last
token of each sequence, and decides nothing: the plan says everything. `engine.server.composition`
calls `build_runner`; core calls `launch` and `collect`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

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
from engine.plan import BegunSequence, BlockCopy, Row, StepPlan, StepResult, TokensBySequence
from engine.runner.loaded_model import LoadedModel, blocks_of, context_of
from engine.sampling.logprobs import logprob_entries
from engine.sampling.sampler import FAILURES, Sampler
from engine.weights import load_packed

CPU = torch.device("cpu")

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
        if kernels is not None:
            self.model = CpuDecoder(card.config, weights, kernels, self.kv, context)
            self.attention = CpuAttention(attention_spec(card.config))
        else:
            self.model = DecoderModel(card.config, weights, TorchOps())
            self.attention = TorchAttention(card.config, self.kv, context)
        self.sampler = Sampler(card.config.vocab)
        self._warm_up_tokens = min(WARM_UP_TOKENS, context, blocks * self.block_size)
        self._last: dict[int, int] = {}
        self._results: deque[StepResult] = deque()

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
        for count in (self._warm_up_tokens, 1):
            blocks = list(range(-(-count // self.block_size)))
            beside = (blocks,) * len(self.kv.format.windows)
            row = Row(-1, 0, count, blocks, 0, [0] * count, beside=beside)
            plan = StepPlan(step=0, rows=(row,), copies=(BlockCopy(0, 0, 1),))
            with torch.inference_mode():
                batch = make_batch(plan, self.block_size, lambda _: 0)
                self.attention.begin(plan, batch)
                self.model.logits(self._hidden(batch)[-1:])
        self.kv.data[: -(-WARM_UP_TOKENS // self.block_size)].zero_()

    def _run(self, plan: StepPlan, started_s: float) -> StepResult:
        for sequence_id in plan.ended:
            self.sampler.end(sequence_id)
            self._last.pop(sequence_id, None)
        for begun in plan.begun:
            self._begin(begun)
        self.kv.copy(plan.copies)
        if not plan.rows:
            return StepResult(step=plan.step, elapsed_s=time.perf_counter() - started_s)
        batch = make_batch(plan, self.block_size, self._last.__getitem__)
        self.attention.begin(plan, batch)
        logits = self.model.logits(self._hidden(batch)[batch.logit_rows]).float().cpu()
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
        drawing: list[int] = []
        source_rows: list[int] = []
        prompt_logprobs: TokensBySequence = {}
        failed: dict[int, str] = {}
        end = 0
        for row in plan.rows:
            count = row.count if row.prompt_logprobs is not None else bool(row.samples)
            if row.prompt_logprobs is not None:
                known = logits[end : end + count]
                prompt_logprobs[row.sequence_id] = self._prompt_logprobs(row, known)
            end += count
            drawing.extend(row.samples)
            source_rows.extend([end - 1] * len(row.samples))
        if not drawing:
            return {}, failed, prompt_logprobs
        if source_rows != list(range(len(logits))):
            logits = logits[source_rows]
        sampled: TokensBySequence = {}
        tokens = self.sampler.sample(logits, drawing, plan.masks)
        for sequence_id, token in zip(drawing, tokens, strict=True):
            if token.token_id < 0:
                failed[sequence_id] = FAILURES[token.token_id]
                continue
            self._last[sequence_id] = token.token_id
            sampled[sequence_id] = (token,)
        return sampled, failed, prompt_logprobs

    def _prompt_logprobs(self, row: Row, logits: torch.Tensor) -> tuple[SampledToken, ...]:
        """Return logprobs of the known tokens that follow each computed position."""
        following = list((row.token_ids or ())[1:])
        if row.next_token_id is not None:
            following.append(row.next_token_id)
        top = row.prompt_logprobs or 0
        known = logits[: len(following)]
        return tuple(logprob_entries(known, following, [top] * len(following)))


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
    runner.warm_up()
    lacks = lacks_attention_windows(card.config, form)
    return LoadedModel(runner, runner.kv, context, pipeline_depth=1, attention_lacks=lacks)
