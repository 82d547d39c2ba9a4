"""The gated delta rule: its forms agree, and say what the rule says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference_delta import gated_delta, gated_delta_chunk, unit

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(tokens: int, heads: int, seed: int, decay: float = 0.3) -> Inputs:
    """Return random inputs in fp64, and a state."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = unit(draw(tokens, heads, 8)), unit(draw(tokens, heads, 8))
    v, state = draw(tokens, heads, 12), draw(heads, 8, 12)
    return q, k, v, -decay * draw(tokens, heads).abs(), draw(tokens, heads).sigmoid(), state


@given(tokens=st.integers(1, 200), heads=st.integers(1, 3), seed=st.integers(0, 99))
def test_chunks_compute_what_the_rule_says(tokens: int, heads: int, seed: int) -> None:
    """The triangular system of a chunk is the corrections that its tokens make one by one."""
    given_ = inputs(tokens, heads, seed)

    read, state = gated_delta(*given_)
    in_chunks, after = gated_delta_chunk(*given_)

    assert (in_chunks - read).abs().max() < 1e-11
    assert (after - state).abs().max() < 1e-11


def test_a_strong_decay_overflows_nothing() -> None:
    """Ratios of decays above the diagonal are infinite, and are not used."""
    q, k, v, decay, beta, state = (x.float() for x in inputs(150, 2, 1, decay=40.0))

    read, after = gated_delta_chunk(q, k, v, decay, beta, state)

    expected, _ = gated_delta(q, k, v, decay, beta, state)
    assert torch.isfinite(read).all()
    assert torch.isfinite(after).all()
    assert read.numpy() == pytest.approx(expected.numpy(), abs=1e-4)


def test_a_key_that_is_written_whole_is_read_back() -> None:
    """With a beta of 1 and no decay, what a key had is replaced, and reading it gives the value."""
    _, k, v, _, _, state = inputs(1, 2, 0)
    ones = torch.ones(1, 2, dtype=torch.float64)

    read, _ = gated_delta(k, k, v, 0 * ones, ones, state)

    assert (read - v).abs().max() < 1e-5  # keys are of a length of 1 to within their epsilon
