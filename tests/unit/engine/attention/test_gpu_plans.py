"""When a GPU's attention plans a batch anew, and what its tables hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.gpu_backend import REPLAN_EVERY, GpuAttention
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.runner.gpu_inputs import TableEntries
from kernels.gpu.work_list import HostPlan
from tests.unit.engine.runner.gpu_engine import config_of

CONTEXT, MEMBERS = 1024, (4, 7)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def attention() -> GpuAttention:
    config = config_of(4, 2)
    kv = KvStorage(kv_format(config, torch.float32, 16), 8, DEVICE)
    return GpuAttention(config, kv, context=CONTEXT, seats=4, tokens_max=64)


def plan(attention: GpuAttention, counts: list[int], starts: list[int]) -> HostPlan:
    rows, at, seats = (np.array(values, np.int32) for values in (counts, starts, [0, 1]))
    return attention.prepare(MEMBERS, rows, at, seats, (), 32)


def test_as_many_drafts_behind_a_text_that_has_grown_little_need_no_new_plan(
    attention: GpuAttention,
) -> None:
    first = plan(attention, [4, 7], [500, 90])

    assert plan(attention, [4, 7], [503, 90]) is first
    assert plan(attention, [4, 7], [499 + REPLAN_EVERY, 97]) is first


@pytest.mark.parametrize(
    ("counts", "starts"),
    [
        ([4, 6], [503, 90]),
        ([7, 4], [503, 90]),
        ([4, 7], [500 + REPLAN_EVERY, 90]),
        ([4, 7], [503, 89]),  # preempted, and computed again from an earlier place
    ],
)
def test_a_batch_is_planned_anew(
    attention: GpuAttention, counts: list[int], starts: list[int]
) -> None:
    first = plan(attention, [4, 7], [500, 90])

    assert plan(attention, counts, starts) is not first


@pytest.mark.parametrize("count", [1, 3, 4, 700])
def test_table_entries_are_where_they_belong(attention: GpuAttention, count: int) -> None:
    """Also those of a second call, whose values take the place of the first one's in the buffer."""
    entries, wanted = TableEntries(DEVICE), np.zeros(attention.tables.numel(), np.int32)
    for seed in (1, 2):
        chance = np.random.default_rng(seed)
        indices = chance.choice(len(wanted), min(count, len(wanted)), replace=False)
        blocks = chance.integers(0, 99, len(indices), np.int32)
        attention.update_tables(*entries.send(indices.astype(np.int32), blocks))
        wanted[indices] = blocks

    assert np.array_equal(attention.tables.cpu().numpy(), wanted)
