"""The CPU runner: executes step plans on a real model.

Holds the KV storage, the model, the sampler and each sequence's last token. It takes what the plan
says and decides nothing. `engine.server.service` builds it; core sees `launch` and `collect`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, Protocol

import torch

from engine.api import SampledToken
from engine.attention.batch import Batch, make_batch
from engine.attention.cpu_backend import CpuAttention
from engine.attention.torch_backend import TorchAttention
from engine.config import EngineConfig
from engine.kv.storage import KvFormat, KvStorage, kv_format
from engine.model_store import ModelCard, ModelConfig
from engine.models.cpu_llama import CpuLlama, Kernels, load_kernels
from engine.models.layers import TorchOps
from engine.models.registry import build_model
from engine.plan import BegunSequence, BlockCopy, Row, Sampled, StepPlan, StepResult
from engine.runner.loaded_model import LoadedModel
from engine.sampling.sampler import Sampler
from engine.weights import load_weights


class StepModel(Protocol):
    """What the runner sees of a model; `attention` is the backend that goes with it."""

    config: ModelConfig

    def forward(self, token_ids: torch.Tensor, attention: Any) -> torch.Tensor:
        """Hidden states [T, C] after the last norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, vocab] fp32."""


class CpuRunner:
    """`engine.plan.Runner` on the CPU. A launched step is computed at once.

    In C where a compiler works and the model's shape fits, else in torch. `dtype` auto is bf16
    weights (and KV) in C, whose arithmetic is fp32 where the CPU has no bf16 products; in torch,
    which has no such thing, it is fp32.
    """

    def __init__(
        self,
        card: ModelCard,
        config: EngineConfig,
        *,
        blocks: int,
        context: int,
        kernels: Kernels | None = None,
    ) -> None:
        dtype, kv_dtype = _dtypes(config, in_c=kernels is not None)
        device = torch.device("cpu")
        self.block_size = config.block_size
        form = _form(card.config, config, in_c=kernels is not None)
        self.kv = KvStorage(form, blocks, kv_dtype, device)
        weights = load_weights(card, dtype)
        self.model: StepModel
        self.attention: TorchAttention | CpuAttention
        if kernels is not None:
            self.model = CpuLlama(card.config, weights, kernels, self.kv, context)
            self.attention = CpuAttention(card.config.heads // card.config.kv_heads)
        else:
            self.model = build_model(card.config, weights, TorchOps())
            self.attention = TorchAttention(card.config, self.kv, context)
        self.sampler = Sampler(card.config.vocab, device)
        self._last: dict[int, int] = {}
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        """Compute the whole step."""
        started_s = time.perf_counter()
        with torch.inference_mode():
            self._results.append(self._run(plan, started_s))

    def collect(self) -> StepResult:
        """The oldest launched step's result."""
        return self._results.popleft()

    def warm_up(self) -> None:
        """One step that touches every code path's allocations, so that no client waits for them."""
        longest = 33
        for count in (longest, 1):
            row = Row(-1, 0, count, list(range(-(-count // self.block_size))), 0, [0] * count)
            plan = StepPlan(step=0, rows=(row,), copies=(BlockCopy(0, 0, 1),))
            with torch.inference_mode():
                batch = make_batch(plan, self.block_size, lambda _: 0)
                self.attention.begin(plan, batch)
                self.model.logits(self.model.forward(batch.token_ids, self.attention)[-1:])
        self.kv.data[: -(-longest // self.block_size)].zero_()

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
        hidden = self.model.forward(batch.token_ids, self.attention)
        logits = self.model.logits(hidden[batch.logit_rows])
        sampled, failed, prompt_logprobs = self._sample(plan, batch, logits)
        return StepResult(
            step=plan.step,
            sampled=tuple(sampled),
            prompt_logprobs=prompt_logprobs,
            failed=failed,
            elapsed_s=time.perf_counter() - started_s,
        )

    def _begin(self, begun: BegunSequence) -> None:
        self.sampler.begin(begun)
        self._last[begun.sequence_id] = begun.token_ids[-1]

    def _sample(
        self, plan: StepPlan, batch: Batch, logits: torch.Tensor
    ) -> tuple[list[Sampled], dict[int, str], dict[int, tuple[SampledToken, ...]]]:
        drawing: list[int] = []
        from_row: list[int] = []
        prompt_logprobs: dict[int, tuple[SampledToken, ...]] = {}
        failed: dict[int, str] = {}
        at = 0
        for row in plan.rows:
            count = row.count if row.prompt_logprobs is not None else bool(row.samples)
            if row.prompt_logprobs is not None:
                prompt_logprobs[row.sequence_id] = self._prompt(row, logits[at : at + count])
            at += count
            drawing.extend(row.samples)
            from_row.extend([at - 1] * len(row.samples))
        if not drawing:
            return [], failed, prompt_logprobs
        picked = logits[from_row] if from_row != list(range(len(logits))) else logits
        sampled: list[Sampled] = []
        tokens = self.sampler.sample(picked, drawing, plan.masks)
        for sequence_id, token in zip(drawing, tokens, strict=True):
            if token.token_id < 0:
                failed[sequence_id] = "nan_logits"
                continue
            self._last[sequence_id] = token.token_id
            sampled.append(Sampled(sequence_id, token))
        return sampled, failed, prompt_logprobs

    def _prompt(self, row: Row, logits: torch.Tensor) -> tuple[SampledToken, ...]:
        """Logprobs of the tokens that follow each computed position and are known."""
        following = list((row.token_ids or ())[1:])
        if row.next_token_id is not None:
            following.append(row.next_token_id)
        top = row.prompt_logprobs or 0
        return self.sampler.prompt_logprobs(logits[: len(following)], following, top)


def _dtypes(config: EngineConfig, *, in_c: bool) -> tuple[torch.dtype, torch.dtype]:
    """Of the weights and of the KV."""
    named = {"bf16": torch.bfloat16, "fp32": torch.float32}
    weights = named.get(config.dtype, torch.bfloat16 if in_c else torch.float32)
    return weights, named.get(config.kv_dtype, weights)


def _form(shape: ModelConfig, config: EngineConfig, *, in_c: bool) -> KvFormat:
    _, dtype = _dtypes(config, in_c=in_c)
    return kv_format(shape, dtype, config.block_size, "panels" if in_c else "slots")


def build_runner(card: ModelCard, config: EngineConfig) -> LoadedModel:
    """Load the model and make it ready to step. Raises ModelError.

    Memory: the weights in the compute dtype, and `kv_memory_mib` of blocks. The first start on a
    machine compiles the kernels, in about three seconds.
    """
    threads = config.threads or os.cpu_count() or 1
    kernels = load_kernels(card.config, threads)
    # Beside the kernels' own threads torch needs none: its pool would spin for the same cores.
    torch.set_num_threads(1 if kernels is not None else threads)
    context = min(card.config.context, config.context_tokens_max or card.config.context)
    form = _form(card.config, config, in_c=kernels is not None)
    blocks = config.kv_blocks or max(1, config.kv_memory_mib * 2**20 // form.block_bytes)
    runner = CpuRunner(card, config, blocks=blocks, context=context, kernels=kernels)
    runner.warm_up()
    return LoadedModel(runner, form, blocks, context, device="cpu", pipeline_depth=1)
