"""Sums over lanes against their reference, in the interpreter or on a GPU.

All lanes are on one device and run one after the other: nothing meets, or flags are raised
beforehand. `tests/unit/kernels/test_meetings.py` has the protocol.
"""

from __future__ import annotations

import pytest
import torch

from kernels import reference_lanes
from kernels.gpu.peer_reduce import GATHER_PROGRAMS, Meeting, gather_parts, sum_parts
from kernels.reference_weights import FP8_MAX, round_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, EPS = 64, 1e-5


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([one.data_ptr() for one in tensors], device=DEVICE)


class Lanes:
    """Meetings of lanes that share a device."""

    def __init__(self, lanes: int) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=DEVICE)

        self.flags = [zeros(SLOTS, lanes) for _ in range(lanes)]
        table = addresses(self.flags)
        told = [torch.zeros(1, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")] * lanes
        self.meetings = [
            Meeting(lane, lanes, table, zeros(SLOTS), zeros(1), told[lane]) for lane in range(lanes)
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [64, 576])
def test_a_sum_with_residual_and_norm_is_the_references(
    lanes: int, channels: int, dtype: torch.dtype
) -> None:
    """Every lane has the same bits; sums are in fp32, rounded once. In fp16 beside fp32: to bf16
    the interpreter does not round to the nearest."""
    parts = [rand(5, channels, seed=lane, dtype=dtype) for lane in range(lanes)]
    residual, weight = rand(5, channels, seed=9, dtype=dtype), rand(channels, seed=8, dtype=dtype)
    normed, total = reference_lanes.sum_and_norm(parts, residual, weight, EPS)
    found = []

    for meeting in Lanes(lanes).meetings:
        updated, out = residual.clone(), torch.full_like(residual, float("nan"))
        sum_parts(addresses(parts), meeting, 0, updated, add=True, weight=weight, out=out, eps=EPS)
        found.append((updated, out))

    for updated, out in found:
        assert torch.equal(updated, total)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out, normed, rtol=tolerance, atol=tolerance)
        assert torch.equal(out, found[0][1])


def test_a_plain_sum_ignores_what_the_target_held() -> None:
    parts = [rand(3, 96, seed=lane) for lane in range(2)]
    total = torch.full_like(parts[0], float("nan"))

    sum_parts(addresses(parts), Lanes(2).meetings[1], 0, total, add=False)

    assert torch.equal(total, reference_lanes.sum_parts(parts))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_norm_may_be_rounded_to_8_bits(groups: int) -> None:
    """As the map that reads it takes its rows."""
    parts = [rand(3, 256, seed=lane, dtype=torch.float16) for lane in range(2)]
    weight = rand(256, seed=8, dtype=torch.float16)
    normed, total = reference_lanes.sum_and_norm(parts, None, weight, EPS)
    codes, scales = round_rows(normed, 256 // groups)
    out = torch.zeros(3, 256, dtype=torch.float8_e4m3fn, device=DEVICE)
    found = torch.zeros(3, groups, device=DEVICE)
    updated = torch.empty_like(total)

    sum_parts(
        addresses(parts), Lanes(2).meetings[0], 0, updated, add=False, weight=weight, out=out,
        eps=EPS, scales=found,
    )  # fmt: skip

    torch.testing.assert_close(found, scales, rtol=1e-2, atol=1e-6)
    wide = (out.float() * found.repeat_interleave(256 // groups, 1)).cpu()
    expected = (codes.float() * scales.repeat_interleave(256 // groups, 1)).cpu()
    torch.testing.assert_close(wide, expected, rtol=0.13, atol=float(scales.max()) * FP8_MAX / 200)


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("columns", [24, 2050])
def test_parts_are_gathered_side_by_side(lanes: int, columns: int) -> None:
    parts = [rand(3, columns, seed=lane) for lane in range(lanes)]
    out = torch.full((3, lanes * columns), float("nan"), device=DEVICE)

    gather_parts(addresses(parts), Lanes(lanes).meetings[-1], 0, out)

    assert torch.equal(out, reference_lanes.gather_parts(parts))


def test_a_meeting_raises_this_lanes_flag_at_its_peers_alone() -> None:
    """Each launch raises the flags of its rows by one; those of other rows stay."""
    lanes = Lanes(3)
    parts = [rand(4, 64, seed=lane) for lane in range(3)]
    lanes.flags[1][:, [0, 2]] = 9  # the peers have come to this meeting, and to later ones
    total = torch.empty_like(parts[0])
    for _ in range(2):
        sum_parts(addresses(parts), lanes.meetings[1], 10, total, add=False)

    for peer in (0, 2):
        assert lanes.flags[peer][:4, 1].tolist() == [2] * 4
        assert not lanes.flags[peer][4:].any()
        assert not lanes.flags[peer][:, [0, 2]].any()
    assert not lanes.flags[1][:, 1].any()
    assert not lanes.meetings[1].failed.any()
    assert torch.equal(total, reference_lanes.sum_parts(parts))


def test_a_gathering_program_meets_by_a_flag_of_its_own() -> None:
    lanes = Lanes(2)
    parts = [rand(2, 48, seed=lane) for lane in range(2)]
    lanes.flags[0][:, 1] = 1

    gather_parts(addresses(parts), lanes.meetings[0], 10, torch.empty(2, 96, device=DEVICE))

    assert lanes.flags[1][:, 0].tolist() == [1] * 2 * GATHER_PROGRAMS + [0] * (
        SLOTS - 2 * GATHER_PROGRAMS
    )


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("flag", "is_late"), [(-(2**31), False), (2**31 - 1, True)])
def test_meetings_may_be_more_than_a_flag_counts(flag: int, is_late: bool) -> None:
    """Some days of steps: the number wraps around."""
    lanes = Lanes(2)
    lanes.meetings[0].counts.fill_(2**31 - 1)
    lanes.flags[0][:, 1] = flag
    parts = [rand(2, 64, seed=lane) for lane in range(2)]

    sum_parts(addresses(parts), lanes.meetings[0], 3, torch.empty_like(parts[0]), add=False)

    assert bool(lanes.meetings[0].failed.item()) == is_late


@pytest.mark.parametrize("late", [0, 2])
def test_a_peer_that_does_not_come_fails_the_wait_and_the_later_ones(late: int) -> None:
    """The wait ends after so many polls, and the host is told. A lane that has failed polls no
    more, so that the rest of its graph ends soon."""
    lanes = Lanes(3)
    parts = [rand(2, 64, seed=lane) for lane in range(3)]
    lanes.flags[1][:, 2 - late] = 5
    total = torch.empty_like(parts[0])
    meeting = lanes.meetings[1]

    sum_parts(addresses(parts), meeting, 3, total, add=False)
    assert meeting.failed.item() == 1
    assert meeting.told.item() == 1
    for _ in range(2):  # would take minutes with so many polls
        sum_parts(addresses(parts), meeting, 2**30, total, add=False)

    assert lanes.flags[0][:2, 1].tolist() == [3, 3]
