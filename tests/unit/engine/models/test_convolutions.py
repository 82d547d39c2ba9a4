"""Short convolutions: their twin, and how many tokens a hit runs again, proved in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Sampling
from engine.attention.batch import make_batch
from engine.attention.torch_backend import TorchAttention
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture, Layer, Rope
from engine.models.decoder import DecoderModel
from engine.models.layers import TorchOps
from engine.plan import BegunSequence, Row, StepPlan
from engine.states.sequence_states import SequenceStates
from engine.weights import random_weights
from kernels.reference_convolution import short_convolution

CPU, BLOCK, CONTEXT = torch.device("cpu"), 16, 128
KINDS = "ccaccaccacacacac"
"""LFM2's order: ten convolutions among six layers of attention."""
CONFIG = Architecture(
    family="lfm2",
    layers=tuple(Layer("conv" if kind == "c" else "gqa") for kind in KINDS),
    hidden=32, intermediate=48, heads=2, kv_heads=1, head_dim=16, vocab=64, context=CONTEXT,
    ropes={"full": Rope(10_000.0, 16)}, qk_norm="head", tie_embeddings=True, conv_width=3,
)  # fmt: skip
ROUNDING = 1e-12
"""Sums in fp64 depend on the size of a product."""
TOKENS = [5 + i * i % 53 for i in range(70)]


class Run:
    """A model in fp64 over its own KV and states."""

    def __init__(self) -> None:
        weights = random_weights(CONFIG, torch.float64, 0, CPU)
        generator = torch.Generator().manual_seed(1)
        for tensor in weights.values():
            if tensor.dim() > 1:  # large enough that no layer is near nothing
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(noise * 1.2 * tensor.shape[-1] ** -0.5)
        self.kv = KvStorage(kv_format(CONFIG, torch.float64, BLOCK), 8, CPU)
        self.attention = TorchAttention(CONFIG, self.kv, CONTEXT)
        self.states = SequenceStates(CONFIG, torch.float64, CPU)
        self.model = DecoderModel(CONFIG, dict(weights), TorchOps(), self.states)

    def logits(self, start: int, *, silent: int = 0) -> torch.Tensor:
        """Return the logits from `start` on; `silent` tokens before it run again."""
        begun = (BegunSequence(0, Sampling(), TOKENS, len(TOKENS)),)
        first = start - silent
        row = Row(0, first, len(TOKENS) - first, list(range(8)), 0, TOKENS[first:], silent=silent)
        plan = StepPlan(step=0, rows=(row,), begun=begun)
        with torch.inference_mode():
            batch = make_batch(plan, BLOCK, lambda _: 0)
            self.attention.begin(plan, batch)
            self.states.begin(plan)
            hidden = self.model.forward(batch.token_ids, self.attention)
            return self.model.logits(hidden)[silent:]


def test_twenty_tokens_bring_ten_convolutions_of_three_up_to_a_hit() -> None:
    """From states of zeros each layer loses two exact positions, so ten layers need twenty."""
    assert CONFIG.run_up == 20
    for start in (41, 48, 60):
        run = Run()
        whole = run.logits(0)[start:]

        assert (run.logits(start, silent=20) - whole).abs().max() < ROUNDING
        assert (run.logits(start, silent=19) - whole).abs().max() > 1000 * ROUNDING


def test_silent_tokens_write_no_kv() -> None:
    """Their own keys are wrong before the states are right: the cached ones have to stay."""
    run = Run()
    run.logits(0)
    before = run.kv.data[:3].clone()

    run.logits(48, silent=20)

    assert torch.equal(run.kv.data[:3], before)


@given(
    width=st.integers(2, 5), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    steps=st.integers(1, 3), has_bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_states_of_a_batch_are_those_of_each_sequence(
    width: int, lengths: list[int], steps: int, has_bias: bool, seed: int
) -> None:
    """Rows of any length over several steps equal the twin's convolution of each sequence alone."""
    config = Architecture(
        family="lfm2", layers=(Layer("conv"), Layer()), hidden=8, intermediate=8, heads=1,
        kv_heads=1, head_dim=8, vocab=8, context=64, ropes={"full": Rope(1e4, 8)}, conv_width=width,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(8, width, generator=generator)
    bias = torch.randn(8, generator=generator) if has_bias else None
    states = SequenceStates(config, torch.float32, CPU)
    kept = [torch.zeros(width - 1, 8) for _ in lengths]
    for step in range(steps):
        counts = [max(1, count - step) for count in lengths]
        begun = tuple(BegunSequence(i, Sampling(), [1], 1) for i in range(len(lengths)) if not step)
        rows = tuple(Row(i, step, n, [0], 0, [1] * n) for i, n in enumerate(counts))
        states.begin(StepPlan(step=step, rows=rows, begun=begun))
        x = torch.randn(sum(counts), 8, generator=generator)

        out = states.convolve(0, x, taps, bias)

        for i, part in enumerate(torch.split(x, counts)):
            expected, kept[i] = short_convolution(part, kept[i], taps, bias)
            found = torch.split(out, counts)[i]
            assert found.numpy() == pytest.approx(expected.numpy(), abs=1e-5)
