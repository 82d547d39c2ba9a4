"""The rule of Mamba-2: its forms agree, and say what the rule says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference_mamba2 import mamba2, mamba2_chunk, mamba2_token

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(tokens: int, heads: int, groups: int, seed: int, decay: float = 0.3) -> Inputs:
    """Return random inputs in fp64, and a state."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, b, c = draw(tokens, heads, 5), draw(tokens, groups, 8), draw(tokens, groups, 8)
    return x, -decay * draw(tokens, heads).abs(), b, c, draw(heads, 5, 8)


@given(
    tokens=st.integers(1, 200),
    groups=st.integers(1, 3),
    in_group=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_chunks_compute_what_the_rule_says(
    tokens: int, groups: int, in_group: int, seed: int
) -> None:
    """A chunk's products are what its tokens write and read one by one."""
    given_ = inputs(tokens, groups * in_group, groups, seed)

    read, state = mamba2(*given_)
    in_chunks, after = mamba2_chunk(*given_)

    assert (in_chunks - read).abs().max() < 1e-11
    assert (after - state).abs().max() < 1e-11


def test_a_token_of_many_sequences_is_one_of_each() -> None:
    """Each row reads and changes its own state."""
    given_ = [inputs(1, 4, 2, seed) for seed in range(5)]
    x, decay, b, c = (torch.cat([one[part] for one in given_]) for part in range(4))

    read, states = mamba2_token(x, decay, b, c, torch.stack([one[4] for one in given_]))

    for row, one in enumerate(given_):
        alone, after = mamba2(*one)
        assert (read[row] - alone[0]).abs().max() < 1e-12
        assert (states[row] - after).abs().max() < 1e-12


def test_a_strong_decay_overflows_nothing() -> None:
    """Ratios of decays above the diagonal are infinite, and are not used."""
    given_ = tuple(part.float() for part in inputs(150, 2, 1, 1, decay=40.0))

    read, after = mamba2_chunk(*given_)

    expected, _ = mamba2(*given_)
    assert torch.isfinite(read).all()
    assert torch.isfinite(after).all()
    assert read.numpy() == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-3)


def test_what_is_written_is_read_at_its_place_decayed() -> None:
    """Into an empty state; each head of a group reads its own x at the group's c."""
    x, _, b, _, state = inputs(2, 4, 2, 0)
    half = torch.full((2, 4), 0.5, dtype=torch.float64).log()
    b[1] = 0

    read, _ = mamba2(x, half, b, b[:1].expand(2, -1, -1), 0 * state)

    lengths = (b[0] * b[0]).sum(-1).repeat_interleave(2)[:, None]
    assert (read[0] - x[0] * lengths).abs().max() < 1e-12
    assert (read[1] - x[0] * lengths / 2).abs().max() < 1e-12
