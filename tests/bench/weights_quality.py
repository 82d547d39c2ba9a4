"""What packed weights cost in quality: perplexity and divergence beside the weights of the files.

    python -m tests.bench.weights_quality [--model NAME] [--text FILE] [--context 768] [--windows 1]

Runs on any machine: fp8 is computed as `kernels.reference_weights` specifies the GPU's products,
activations rounded too. All variants read the same tokens; *exact* are the weights of the files in
fp32, and *bf16* is what an engine without packed weights multiplies. Perplexity, KL and top-1 are
those of `kv_quality`. About 3 minutes on 2 free cores.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.attention.batch import make_batch
from engine.attention.torch_backend import TorchAttention
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import DEFAULT_MODEL, ModelCard
from engine.models.decoder import DecoderModel
from engine.models.gpu_layers import gpu_form
from engine.models.layers import Linear, TorchOps
from engine.plan import Row, StepPlan
from engine.weights import Weights, load_packed
from kernels.reference_weights import Packed, Weight, as_dense, fp8_product, round_rows
from tests.bench import kv_texts
from tests.bench.kv_quality import compare
from tests.bench.models import BLOCK, default_card
from tests.bench.results import print_line

CPU = torch.device("cpu")
VARIANTS = ("bf16", "fp8", "fp8, blocks")
GROUP = 128


class RoundingOps(TorchOps):
    """Operations whose maps in fp8 round their rows, as on a GPU."""

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        if not isinstance(weight, Packed) or weight.kind != "fp8":
            return super().linear(weight, bias)

        def rounded(x: torch.Tensor) -> torch.Tensor:
            out = fp8_product(x, weight)
            return out if bias is None else out + bias

        return rounded


class WeightsReader:
    """Reads texts with one model in several forms of its weights."""

    def __init__(self, card: ModelCard, context: int) -> None:
        self._config, self._context = card.config, context
        self._models = {name: self._model(card, name) for name in ("", *VARIANTS)}
        form = kv_format(card.config, torch.float32, BLOCK, has_groups=True)
        self._groups = form.blocks_per_run
        self._blocks = -(-context // BLOCK)
        self._kv = KvStorage(form, self._blocks * self._groups, CPU)

    def _model(self, card: ModelCard, name: str) -> DecoderModel:
        form = gpu_form("fp8")

        def loaded(part: str, weight: Weight) -> Weight:
            if not name.startswith("fp8"):
                return as_dense(weight, torch.bfloat16 if name else torch.float32).float()
            found = form(part, as_dense(weight, torch.bfloat16))
            if "blocks" in name and isinstance(found, Packed):
                columns = found.shape[-1]
                group = GROUP if columns % GROUP == 0 else columns
                codes, scales = round_rows(as_dense(weight, torch.bfloat16), group)
                return Packed("fp8", codes, scales, group)
            return found if isinstance(found, Packed) else found.float()

        weights: Weights = load_packed(card, torch.float32, CPU, loaded)
        return DecoderModel(card.config, weights, RoundingOps())

    def read(
        self, tokens: Sequence[int], variants: Sequence[str]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the position 0 and the logits [variants, n, vocab] of a whole window."""
        tables = [
            list(range(first, first + self._blocks))
            for first in range(0, self._blocks * self._groups, self._blocks)
        ]
        row = Row(-1, 0, len(tokens), tables[0], 0, list(tokens), beside=tuple(tables[1:]))
        plan = StepPlan(step=0, rows=(row,))
        found = []
        with torch.inference_mode():
            for name in variants:
                attention = TorchAttention(self._config, self._kv, self._context)
                batch = make_batch(plan, BLOCK, lambda _: 0)
                attention.begin(plan, batch)
                model = self._models[name]
                found.append(model.logits(model.forward(batch.token_ids, attention)).float())
        yield 0, torch.stack(found)


def main() -> None:
    """Print a table for each text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--context", type=int, default=768)
    parser.add_argument("--windows", type=int, default=1)
    options = parser.parse_args()
    card = default_card(options.model, options.models)
    reader = WeightsReader(card, options.context)
    tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
    for name, text in kv_texts.texts(options.text).items():
        windows = kv_texts.windows(text, tokenizer, options.context, options.windows, 1)
        found = compare(reader.read, VARIANTS, windows)
        exact = found[VARIANTS[0]].exact_losses
        print_line(
            f"\n{name}: {len(exact):,} tokens, perplexity {math.exp(statistics.fmean(exact)):.3f}"
            " with the weights of the files\n"
        )
        print_line("| weights | perplexity | KL mean, p99 | top-1 the same |")
        print_line("| --- | --- | --- | --- |")
        for variant, comparison in found.items():
            s = comparison.summary()
            print_line(
                f"| {variant} | {100 * s.change:+.2f} % | {s.divergence:.5f},"
                f" {s.divergence_p99:.4f} | {100 * s.same:.2f} % |"
            )


if __name__ == "__main__":
    main()
