"""Kernels of recurrent layers against their twins, in the interpreter or on a GPU.

Each step has runs of any length and padding rows; each sequence's twin goes on alone from its own
state, and no other seat changes.
"""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.gpu.recurrent.convolution import convolve
from kernels.gpu.recurrent.delta import DeltaShape, delta
from kernels.gpu.recurrent.mamba2 import MambaShape, mamba2
from kernels.gpu.recurrent.states import gated_norm, move_states
from kernels.gpu.recurrent.step import StepRuns
from kernels.reference_convolution import short_convolution
from kernels.reference_delta import delta_inputs, gated_delta
from kernels.reference_mamba2 import mamba2 as mamba2_rule
from kernels.reference_mamba2 import mamba2_inputs
from tests.unit.kernels.gpu.recurrent_steps import runs_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR_MAX = 1e-4 if DEVICE.type == "cpu" else 5e-3
"""On a GPU products of fp32 may be made of three in tf32."""
SEATS = 6
STEPS = {
    "one row": ([3], [1], 0, []),
    "decoding": ([4, 0, 2], [1, 1, 1], 3, []),
    "a prompt": ([1], [70], 2, []),
    "prompts among decoding rows": ([5, 0, 3, 2], [1, 68, 2, 64], 7, []),
    "drafts": ([4, 1, 0], [5, 31, 1], 3, [3, 15, 0]),
    "drafts beside prompts": ([2, 5, 3, 0], [2, 33, 12, 9], 2, [1, 0, 1, 0]),
    "few rows": ([2, 5], [8, 2], 1, []),
}
"""Seats, rows of each, padding rows, and how many of each seat's rows are drafts."""
STEP = pytest.mark.parametrize("step", STEPS)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of nothing, in numpy


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def memory(*shape: int) -> torch.Tensor:
    """Return states of all seats and one more, rows of a wider memory as in an engine."""
    size = int(torch.tensor(shape).prod())
    wide = rand(SEATS + 1, size + 16, seed=9)
    return wide[:, 16:].view(SEATS + 1, *shape)


def parts(step: str) -> list[tuple[int, slice, int]]:
    """Return the seat, the rows and the number of drafts of each run."""
    seats, counts, _, drafts = STEPS[step]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    own = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return list(zip(seats, own, drafts or [0] * len(counts), strict=True))


def runs_in(step: str) -> StepRuns:
    """Return the runs of a step on the device."""
    seats, counts, padding, drafts = STEPS[step]
    return runs_of(seats, counts, SEATS, DEVICE, padding, drafts)


def rows_of(step: str) -> int:
    _, counts, padding, _ = STEPS[step]
    return sum(counts) + padding


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@STEP
@pytest.mark.parametrize(("width", "silu", "has_bias"), [(2, False, True), (4, True, False)])
def test_convolutions_go_on_from_their_windows(
    step: str, width: int, silu: bool, has_bias: bool
) -> None:
    """Of rows shorter than the window too; inputs are columns of a wider matrix."""
    channels, rows = 140, rows_of(step)
    windows, x = memory(width - 1, channels), rand(rows, channels + 20)[:, 20:]
    taps, bias = rand(channels, width, seed=1), rand(channels, seed=2) if has_bias else None
    expected, out = windows.clone(), torch.zeros(rows, channels, device=DEVICE)
    for seat, own, drafts in parts(step):
        out[own], _ = short_convolution(x[own], windows[seat], taps, bias)
        kept = slice(own.start, own.stop - drafts)
        _, expected[seat] = short_convolution(x[kept], windows[seat], taps, bias)
    if silu:
        out = torch.nn.functional.silu(out)

    found = convolve(x, windows, taps, bias, runs_in(step), silu=silu)

    assert error(found, out) < 1e-5
    assert torch.equal(windows, expected)


@STEP
@pytest.mark.parametrize("shape", [DeltaShape(2, 4, 16, 24), DeltaShape(1, 2, 24, 16)])
def test_the_delta_rule_goes_on_from_its_states(step: str, shape: DeltaShape) -> None:
    """Rows read what the rule says, whatever the cut into chunks. A run leaves its state before its
    drafts."""
    heads, keys, rows = shape.heads, shape.key_heads * shape.key_dim, rows_of(step)
    states = memory(heads, shape.key_dim, shape.value_dim)
    projected = rand(rows, 2 * keys + heads * (shape.value_dim + 2))
    mixed, beta, decay = torch.split(
        projected, [2 * keys + heads * shape.value_dim, heads, heads], dim=1
    )
    rate, bias = rand(heads, seed=1).exp() * 0.1, rand(heads, seed=2)
    given = delta_inputs(mixed.double(), beta, decay, rate, bias, keys, shape.key_dim)
    expected, out = states.double(), torch.zeros(rows, heads, shape.value_dim, device=DEVICE)
    for seat, own, drafts in parts(step):
        for part in (slice(own.start, own.stop - drafts), own):
            q, k, v, fades, strengths = (x[part] for x in given)
            read, after = gated_delta(q, k, v, fades, strengths, states[seat].double())
            out[part] = read.float()
            if part.stop == own.stop - drafts:
                expected[seat] = after
    runs = runs_in(step)

    found = delta(mixed, beta, decay, rate, bias, states, runs, shape)

    assert error(found, out) < ERROR_MAX
    assert error(states, expected) < ERROR_MAX
    unseen = [seat for seat in range(SEATS) if seat not in STEPS[step][0]]
    assert torch.equal(states[unseen].double(), expected[unseen])


def test_equal_keys_lose_no_digits() -> None:
    """The system of a chunk whose keys are all the same has powers of up to 10^18."""
    shape = DeltaShape(1, 1, 16, 16)
    mixed = rand(128, 48)
    mixed[:, 16:32] = mixed[0, 16:32]
    beta, decay = torch.full((2, 128, 1), 9.0, device=DEVICE)
    decay.neg_()
    one, states = torch.ones(1, device=DEVICE), memory(1, 16, 16)
    given = delta_inputs(mixed, beta, decay, one, one, 16, 16)
    read, after = gated_delta(*given, states[2])

    found = delta(mixed, beta, decay, one, one, states, runs_of([2], [128], SEATS, DEVICE), shape)

    assert error(found, read) < 10 * ERROR_MAX
    assert error(states[2], after) < 10 * ERROR_MAX


@STEP
@pytest.mark.parametrize("shape", [MambaShape(8, 16, 12, 2), MambaShape(3, 40, 32, 1)])
def test_mamba_goes_on_from_its_states(step: str, shape: MambaShape) -> None:
    """What is read and every state, whatever the cut into chunks."""
    heads, inner, rows = shape.heads, shape.heads * shape.head_dim, rows_of(step)
    states = memory(heads, shape.head_dim, shape.state_dim)
    channels = inner + 2 * shape.groups * shape.state_dim
    mixed, gate = torch.split(rand(rows, channels + heads), [channels, heads], dim=1)
    rate, bias, through = rand(heads, seed=1).exp() * 0.1, rand(heads, seed=2), rand(heads, seed=3)
    given = mamba2_inputs(mixed.double(), gate, rate, bias, inner, shape.groups)
    expected, out = states.double(), torch.zeros(rows, heads, shape.head_dim, device=DEVICE)
    for seat, own, drafts in parts(step):
        for part in (slice(own.start, own.stop - drafts), own):
            x, fades, b, c, inputs = (one[part] for one in given)
            read, after = mamba2_rule(x, fades, b, c, states[seat].double())
            out[part] = (read + inputs * through[:, None]).float()
            if part.stop == own.stop - drafts:
                expected[seat] = after
    runs = runs_in(step)

    found = mamba2(mixed, gate, rate, bias, through, states, runs, shape)

    assert error(found, out) < ERROR_MAX
    assert error(states, expected) < ERROR_MAX
    unseen = [seat for seat in range(SEATS) if seat not in STEPS[step][0]]
    assert torch.equal(states[unseen].double(), expected[unseen])


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize(("groups", "channels"), [(4, 24), (11, 128), (1, 600)])
def test_norms_are_gated_before_or_after(groups: int, channels: int, gate_first: bool) -> None:
    """Gates are columns of a wider matrix; one weight a channel, or one a channel and group."""
    x, gate = rand(5, groups, channels), rand(5, groups * channels + 8, seed=1)[:, 8:]
    weight = rand(groups * channels if gate_first else channels, seed=2)

    found = gated_norm(x, gate, weight, 1e-5, gate_first=gate_first)

    expected = reference.gated_norm(x, gate, weight, 1e-5, gate_first=gate_first)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_states_are_copied_to_blocks_and_back() -> None:
    """A state that does not fill its last block leaves the rest of it."""
    pool = torch.arange(40 * 5000, dtype=torch.int32, device=DEVICE).view(40, 5000)
    states = -torch.arange(4 * 12_000, dtype=torch.int32, device=DEVICE).view(4, 12_000)
    blocks = [7, 39, 0]
    moves = torch.tensor(
        [[block, 2, i * 5000] for i, block in enumerate(blocks)], dtype=torch.int32, device=DEVICE
    )
    expected, state = pool.clone(), states[2].clone()
    expected[[7, 39]], expected[0, :2000] = state[:10_000].view(2, 5000), state[10_000:]

    move_states(pool, states, moves, to_pool=True)
    moves[:, 1] = 0
    move_states(pool, states, moves, to_pool=False)

    assert torch.equal(pool, expected)
    assert torch.equal(states[0], state)
