"""One step of the CPU runner against transformers, on the same machine in the same minute.

    python -m tests.bench.bench_step [--threads N] [--repeats N]

Random weights in SmolLM2-135M's shape; speed does not depend on their values. Best of `repeats`,
with alternating contenders, so that other load affects all of them. `c` is the runner with the C
kernels (bf16 weights and KV), `torch` the same runner without a compiler (fp32), `transformers`
LlamaForCausalLM with SDPA in fp32. Cases: a prompt of 2,048 tokens cold; 32 more on 2,048 cached;
decoding alone after 128 tokens; decoding 16 sequences of 1,100 tokens of which 1,024 are shared.

Arithmetic: weights 269 MB in bf16 per step, 538 in fp32. Prompt of 2,048: 435 GFLOP in the linears,
145 in attention, minus the masked half.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.attention.batch import make_batch
from engine.attention.cpu_backend import CpuAttention
from engine.attention.interface import attention_spec
from engine.attention.torch_backend import TorchAttention
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture
from engine.models.cpu_decoder import CpuDecoder, Kernels, load_kernels
from engine.models.decoder import DecoderModel
from engine.models.layers import TorchOps
from engine.plan import Group, Row, StepPlan
from engine.weights import random_weights
from tests.bench.models import BLOCK, SMOLLM2_135M

SHAPE = SMOLLM2_135M
CPU = torch.device("cpu")
BLOCKS, CHUNK = 360, 512
TABLE = list(range(140))


def decoding() -> StepPlan:
    rows = tuple(
        Row(i, 1100, 1, [*range(64), *range(140 + 8 * i, 146 + 8 * i)], 0, [5], (i,))
        for i in range(16)
    )
    return StepPlan(0, rows, (Group(0, 16, 0, 64),))


CASES: dict[str, list[StepPlan]] = {
    "prefill 2,048": [
        StepPlan(0, (Row(1, at, CHUNK, TABLE, 0, [7] * CHUNK, (1,)),))
        for at in range(0, 2048, CHUNK)
    ],
    "2,048 cached + 32": [StepPlan(0, (Row(1, 2048, 32, TABLE, 0, [7] * 32, (1,)),))],
    "decode 1": [StepPlan(0, (Row(1, 128, 1, TABLE, 0, [5], (1,)),))],
    "decode 16, 1,024 shared": [decoding()],
}


class CpuSteps:
    """A model with random weights on the CPU, step by step."""

    def __init__(self, shape: Architecture, kv: KvStorage, kernels: Kernels | None) -> None:
        """`kernels`: those in C; without them it runs in torch."""
        self.model: Any
        self._attention: Any
        if kernels is not None:
            weights = random_weights(shape, torch.bfloat16, 0, CPU)
            self.model = CpuDecoder(shape, weights, kernels, kv, shape.context)
            self._attention = CpuAttention(attention_spec(shape))
        else:
            weights = random_weights(shape, torch.float32, 0, CPU)
            self.model = DecoderModel(shape, weights, TorchOps())
            self._attention = TorchAttention(shape, kv, shape.context)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Return the hidden states of the rows that are sampled."""
        batch = make_batch(plan, BLOCK, lambda _: 0)
        self._attention.begin(plan, batch)
        hidden: torch.Tensor = self.model.forward(batch.token_ids, self._attention)
        return hidden[batch.logit_rows]

    def seconds(self, plans: Sequence[StepPlan]) -> float:
        """Run steps; return the seconds."""
        started_s = time.perf_counter()
        for plan in plans:
            self.model.logits(self.forward(plan))
        return time.perf_counter() - started_s


def ours(kernels: Kernels | None) -> Callable[[str], float]:
    """Return a function that runs a case by name and returns its seconds."""
    if kernels is None:
        form = kv_format(SHAPE, torch.float32, BLOCK)
    else:
        form = kv_format(SHAPE, torch.bfloat16, BLOCK, "panels")
    steps = CpuSteps(SHAPE, KvStorage(form, BLOCKS, CPU), kernels)
    return lambda case: steps.seconds(CASES[case])


def theirs() -> Callable[[str], float]:
    """Return the same for transformers; filling the cache beforehand is not counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        model: Any = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=SHAPE.vocab,
                hidden_size=SHAPE.hidden,
                intermediate_size=SHAPE.intermediate,
                num_hidden_layers=len(SHAPE.layers),
                num_attention_heads=SHAPE.heads,
                num_key_value_heads=SHAPE.kv_heads,
                tie_word_embeddings=True,
            )
        ).eval()
    shapes = {
        "prefill 2,048": (1, 0, 2048),
        "2,048 cached + 32": (1, 2048, 32),
        "decode 1": (1, 128, 1),
        "decode 16, 1,024 shared": (16, 1100, 1),
    }

    def run(case: str) -> float:
        batch, cached, tokens = shapes[case]
        cache = transformers.DynamicCache()
        for layer in range(len(SHAPE.layers) if cached else 0):
            kv = torch.zeros(batch, SHAPE.kv_heads, cached, SHAPE.head_dim)
            cache.update(kv, kv, layer)
        ids = torch.full((batch, tokens), 7)
        started_s = time.perf_counter()
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - started_s

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contenders = {
        "c": ours(load_kernels(SHAPE, options.threads)),
        "torch": ours(None),
        "transformers": theirs(),
    }
    best = {(case, who): float("inf") for case in CASES for who in contenders}
    with torch.inference_mode():
        for case in CASES:
            for _ in range(options.repeats):
                for who, run in contenders.items():
                    best[case, who] = min(best[case, who], run(case))
    print(f"{options.threads} threads, best of {options.repeats}, ms")
    for case in CASES:
        times = [best[case, who] * 1e3 for who in contenders]
        cells = "  ".join(f"{who} {t:8.1f}" for who, t in zip(contenders, times, strict=True))
        print(f"{case:26} {cells}  ratio {times[2] / times[0]:5.1f}")


if __name__ == "__main__":
    main()
