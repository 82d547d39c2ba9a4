"""Models with recurrent layers in C on the CPU, beside torch and a dense model of equal bytes.

    python -m tests.bench.cpu_hybrids [--shape lfm2-350m|lfm2-1.2b|qwen3.5-0.8b] [--rounds N]
        [--torch] [--threads N] [--drafts]

Random weights in a published shape; speed does not depend on their values. Milliseconds of
processor time of all threads, which other programs on the machine change least, a token: decoding
alone after a prompt, and a prompt of 128 tokens. Contenders alternate; medians of `rounds`, with
the least and the most. `dense` has attention in every layer, and MLPs that make its weights as many
bytes. `--drafts`: instead, a token of an answer with 3 or 7 drafts a step, each right with
probability 0.7 or 0.9, over one without; accepted drafts are computed again where there are states.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from typing import Any

import torch
from msgspec.structs import replace

from engine.api import Sampling
from engine.attention.batch import make_batch
from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import attention_spec
from engine.attention.torch_backend import TorchAttention
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture, Layer, Rope
from engine.model_store.architecture import Delta
from engine.model_store.tensors import expected_shapes
from engine.models.cpu_decoder import CpuDecoder, Kernels, load_kernels
from engine.models.decoder import DecoderModel
from engine.models.layers import TorchOps
from engine.plan import BegunSequence, Row, StepPlan
from engine.states.cpu_states import CpuStates
from engine.states.sequence_states import SequenceStates
from engine.weights import random_weights
from tests.bench.models import BLOCK
from tests.bench.results import print_line

CPU, PROMPT, DECODED, DRAFTED = torch.device("cpu"), 128, 16, 12
CONTEXT = PROMPT + DECODED + 2 * BLOCK
LFM2 = tuple(Layer("gqa" if i in (2, 5, 8, 10, 12, 14) else "conv") for i in range(16))
LFM2_350M = Architecture(
    family="lfm2", layers=LFM2, hidden=1024, intermediate=4608, heads=16, kv_heads=8, head_dim=64,
    vocab=65_536, context=CONTEXT, ropes={"full": Rope(1e6, 64)}, qk_norm="head",
    tie_embeddings=True, conv_width=3,
)  # fmt: skip
SHAPES = {
    "lfm2-350m": LFM2_350M,
    "lfm2-1.2b": replace(LFM2_350M, hidden=2048, intermediate=8192, heads=32),
    "qwen3.5-0.8b": Architecture(
        family="qwen3_5_text", layers=((Layer("delta"),) * 3 + (Layer(),)) * 6, hidden=1024,
        intermediate=3584, heads=8, kv_heads=2, head_dim=256, vocab=248_320, context=CONTEXT,
        ropes={"full": Rope(1e7, 64)}, qk_norm="head", output_gate=True, tie_embeddings=True,
        delta=Delta(16, 16, 128, 128), conv_width=4,
    ),
}  # fmt: skip


def weights_of(shape: Architecture) -> int:
    return sum(math.prod(one) for one in expected_shapes(shape).values())


def dense(shape: Architecture) -> Architecture:
    """Return the same with attention alone, and MLPs that make up for the difference."""
    plain = replace(
        shape, layers=(Layer(),) * len(shape.layers), delta=None, conv_width=0, output_gate=False
    )
    a_channel = 3 * shape.hidden * len(shape.layers)
    more = (weights_of(shape) - weights_of(plain)) / a_channel
    return replace(plain, intermediate=plain.intermediate + round(more / 16) * 16)


class Steps:
    """A model with random weights, and the processor time of its steps."""

    def __init__(self, shape: Architecture, kernels: Kernels | None) -> None:
        """`kernels`: those in C, bf16; without them it runs in torch, fp32."""
        dtype = torch.float32 if kernels is None else torch.bfloat16
        form = kv_format(shape, dtype, BLOCK, "slots" if kernels is None else "panels")
        kv = KvStorage(form, -(-CONTEXT // BLOCK), CPU)
        weights = random_weights(shape, dtype, 0, CPU)
        self._states: CpuStates | SequenceStates | None = None
        self._attention: Any
        self._model: Any
        if kernels is not None:
            states = CpuStates(shape) if shape.recurrent_layers else None
            self._model = CpuDecoder(shape, weights, kernels, kv, CONTEXT, states)
            self._attention, self._states = CpuAttention(attention_spec(shape)), states
        else:
            own = SequenceStates(shape, dtype, CPU) if shape.recurrent_layers else None
            self._model = DecoderModel(shape, weights, TorchOps(), own)
            self._attention, self._states = TorchAttention(shape, kv, CONTEXT), own

    def round_ms(self) -> tuple[float, float]:
        """Return the processor time of a token of the prompt, and of one decoded alone."""
        begun = (BegunSequence(0, Sampling(), [7] * PROMPT, PROMPT),)
        prompt = self._ms(Row(0, 0, PROMPT, self._blocks(), 0, [7] * PROMPT, (0,)), begun)
        decoded = sum(
            self._ms(Row(0, PROMPT + i, 1, self._blocks(), 0, [5], (0,))) for i in range(DECODED)
        )
        return prompt / PROMPT, decoded / DECODED

    def drafted_ms(self, right: float, drafts: int) -> float:
        """Return the processor time of a token where each step has so many drafts."""
        begun = (BegunSequence(0, Sampling(), [7] * PROMPT, PROMPT),)
        self._ms(Row(0, 0, PROMPT, self._blocks(), 0, [7] * PROMPT, (0,)), begun)
        chance, took_ms, tokens, silent = random.Random(3), 0.0, 0, 0
        for _ in range(DRAFTED):
            count = silent + 1 + drafts
            row = Row(
                0, PROMPT, count, self._blocks(), 0, [5] * count, (0,), silent=silent, drafts=drafts
            )
            took_ms += self._ms(row)
            accepted = 0
            while accepted < drafts and chance.random() < right:
                accepted += 1
            tokens, silent = tokens + accepted + 1, accepted if self._states is not None else 0
        return took_ms / tokens

    def _blocks(self) -> list[int]:
        return list(range(-(-CONTEXT // BLOCK)))

    def _ms(self, row: Row, begun: tuple[BegunSequence, ...] = ()) -> float:
        plan = StepPlan(0, (row,), begun=begun)
        started_s = time.process_time()
        batch = make_batch(plan, BLOCK, lambda _: 0)
        if self._states is not None:
            self._states.begin(plan)
        self._attention.begin(plan, batch)
        hidden = self._model.forward(batch.token_ids, self._attention)
        self._model.logits(hidden[batch.logit_rows])
        return 1e3 * (time.process_time() - started_s)


def print_drafts(contenders: dict[str, Steps], rounds: int) -> None:
    """Print how much less a token of an answer takes with drafts."""
    with torch.inference_mode():
        for name, steps in contenders.items():
            for right, drafts in ((0.7, 3), (0.9, 7)):
                steps.round_ms()
                found = [
                    steps.round_ms()[1] / steps.drafted_ms(right, drafts) for _ in range(rounds)
                ]
                spread = f"[{min(found):.2f}-{max(found):.2f}]"
                print_line(f"{name:10} {right} {drafts}  {statistics.median(found):.2f} {spread}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="lfm2-350m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--drafts", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    kernels = load_kernels(shape, options.threads)
    contenders = {"c": Steps(shape, kernels), "dense, c": Steps(dense(shape), kernels)}
    if options.torch:
        contenders["torch"] = Steps(shape, None)
    if options.drafts:
        print_drafts(contenders, options.rounds)
        return
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    with torch.inference_mode():
        for number in range(options.rounds + 1):
            for name, steps in contenders.items():
                found = steps.round_ms()
                if number:  # the first round touches the memory
                    took[name].append(found)
    print_line(f"{options.shape}, {2 * weights_of(shape) / 1e6:.0f} MB in bf16, ms a token")
    for name, rounds in took.items():
        for what, times in zip(("prompt", "decode"), zip(*rounds, strict=True), strict=True):
            spread = f"[{min(times):.2f}-{max(times):.2f}]"
            print_line(f"{name:10} {what}  {statistics.median(times):8.2f} {spread}")


if __name__ == "__main__":
    main()
