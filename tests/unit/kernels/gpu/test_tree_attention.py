"""Tree attention against float64 attention over gathered keys, in the interpreter or on a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import kernels.gpu.tree_attention
from kernels import reference_int8
from kernels.gpu.tree_attention import PartialOutputs, WorkList, tree_attention
from kernels.gpu.work_list import Slices, WorkPlanner, classes_for
from kernels.reference import paged_attention
from tests.unit.kernels.gpu.plan_checker import check_plan
from tests.unit.kernels.kv_blocks import int8_units

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 16


@pytest.fixture(autouse=True)
def _merge_many_heads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge several heads per program: one head at a time takes minutes in the interpreter."""
    torch.set_num_threads(1)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels.gpu.tree_attention, "FEW_ROW_HEADS", 0)


class Case:
    """A random tree of slices: `levels` of (nodes, blocks per node), then (own keys, rows) per
    slice."""

    def __init__(
        self,
        seed: int,
        levels: list[tuple[int, int]],
        slices: list[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        rng = np.random.default_rng(seed)
        n = len(slices)
        self.tables: list[list[int]] = [[] for _ in range(n)]
        groups: list[tuple[int, int, int, int]] = []
        fresh = iter(rng.permutation(4096).tolist())
        depth = 0
        for nodes, blocks in levels:
            edges = np.linspace(0, n, nodes + 1).astype(int).tolist()
            for a, b in pairwise(edges):
                shared = [next(fresh) for _ in range(blocks)]
                for table in self.tables[a:b]:
                    table.extend(shared)
                if b - a > 1:
                    groups.append((a, b, depth, depth + blocks))
            depth += blocks
        starts, rows = [], []
        for table, (own, count) in zip(self.tables, slices, strict=True):
            start = depth * SIZE + own
            starts.append(start)
            rows.append(count)
            table.extend(next(fresh) for _ in range(-(-(start + count) // SIZE) - depth))
        self.groups = np.array(groups, np.int32).reshape(-1, 4)
        width = max(len(t) for t in self.tables) + 8
        flat = np.zeros((n, width), np.int32)
        for i, table in enumerate(self.tables):
            flat[i, : len(table)] = table
        self.slices = Slices(
            np.array(rows, np.int32),
            np.array(starts, np.int32),
            np.arange(n, dtype=np.int32) * width,
        )
        self.block_ids = torch.from_numpy(flat.reshape(-1)).to(DEVICE)
        g = torch.Generator().manual_seed(seed)
        total = int(sum(rows))
        blocks_used = 1 + max(max(t) for t in self.tables)
        self.kv = torch.randn(
            blocks_used, 2, 2, kv_heads, SIZE, head_dim, generator=g, dtype=torch.float32
        ).to(device=DEVICE, dtype=dtype)
        self.q = torch.randn(total, heads, head_dim, generator=g).to(device=DEVICE, dtype=dtype)
        self.lengths = torch.tensor(
            [s + 1 + j for s, c in zip(starts, rows, strict=True) for j in range(c)],
            dtype=torch.int32,
            device=DEVICE,
        )

    def fill_unseen(self, value: float) -> None:
        """Write `value` to every slot that no row sees."""
        unseen = torch.ones(len(self.kv), SIZE, dtype=torch.bool)
        ends = (self.slices.starts + self.slices.rows).tolist()
        for table, end in zip(self.tables, ends, strict=True):
            for at, block in enumerate(table):
                unseen[block, : max(0, end - at * SIZE)] = False
        self.kv.transpose(1, 4)[unseen.to(DEVICE)] = value

    def expected(self, layer: int = 1, **rule: Any) -> torch.Tensor:
        """Return attention [T, H, D] by a rule of `paged_attention`, in float64."""
        ends = np.cumsum(self.slices.rows).tolist()
        sliced = zip(
            self.tables, self.slices.starts.tolist(), self.slices.rows.tolist(), ends, strict=True
        )
        return torch.cat(
            [
                paged_attention(self.q[end - count : end], self.kv, layer, table, start, **rule)
                for table, start, count, end in sliced
            ]
        )


def planner_for(case: Case, *, multiprocessors: int = 2) -> WorkPlanner:
    heads, kv_heads = case.q.shape[1], case.kv.shape[3]
    return WorkPlanner(
        kv_heads=kv_heads,
        heads_per_group=heads // kv_heads,
        block_size=SIZE,
        multiprocessors=multiprocessors,
        classes=classes_for(case.q.shape[2]),
        group_keys_min=32,
        window_group_keys_min=32,
        span_keys_min=64,
        own_span_keys_min=64,
        own_span_keys_target=128,
    )


def attend(
    case: Case,
    planner: WorkPlanner,
    layer: int = 1,
    *,
    side_by_side: bool = False,
    window: int = 0,
    **rule: Any,
) -> torch.Tensor:
    """Plan, check and run a case. `side_by_side`: shared keys from a queue beside small tiles, as
    in decoding steps. `window` and `rule`: see `tree_attention`."""
    plan = planner.plan(case.slices, case.groups, window=window)
    check_plan(plan, case.slices, planner, case.groups, window)
    rows, heads, d = case.q.shape
    work = WorkList(planner.classes, planner.multiprocessors, rows, 4096, DEVICE)
    work.load(plan)
    out = torch.full_like(case.q, float("nan"))
    parts = PartialOutputs(plan.parts_max, rows, heads, d, DEVICE)
    parts.out.fill_(float("nan"))
    classes = (2, 1) if side_by_side else (0, 1, 2)
    tree_attention(
        case.q, case.kv, layer, work, case.block_ids, case.lengths, out, parts, classes=classes,
        causal=not side_by_side, dependent=side_by_side, window=window, **rule,
    )  # fmt: skip
    assert int(parts.queue) == 0, "the queue is not reset for the next layer"
    return out


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


SHAPES: dict[str, tuple[int, int, int]] = {
    "mha": (2, 2, 16),
    "gqa of three": (6, 2, 16),
    "gqa of four": (8, 2, 32),
    "mqa": (4, 1, 16),
    "a row to a small tile": (16, 1, 16),
}
MIXED = "a prefill chunk beside decoding rows"
"""A tree with tiles of every class."""
TREES: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {
    "one row": ([], [(5, 1)]),
    "no sharing, ragged": ([], [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (200, 1)]),
    "one prefix": ([(1, 5)], [(3, 1), (16, 1), (40, 1), (0, 1), (1, 1)]),
    "three levels": ([(1, 4), (2, 3), (4, 2)], [(3 * i % 29, 1) for i in range(8)]),
    "short suffixes on a shared prefix": ([(1, 6)], [(0, 7), (0, 20), (5, 3), (0, 1)]),
    MIXED: ([(1, 4)], [(0, 1), (0, 35), (30, 1)]),
    "a long prompt from nothing": ([], [(0, 90)]),
}


def nightly_unless(is_quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a case: what the plan does depends on the tree, what the kernel does on
    the shape, so that quick tests try each of them once and not each pair."""
    return () if is_quick else (pytest.mark.nightly,)


@pytest.mark.parametrize(
    ("tree", "shape"),
    [
        pytest.param(tree, shape, marks=nightly_unless(tree == MIXED or shape == "mqa"))
        for tree in TREES
        for shape in SHAPES
    ],
)
def test_tree_attention_equals_float64_attention(tree: str, shape: str) -> None:
    """For any sharing and any cut of the keys."""
    levels, slices = TREES[tree]
    heads, kv_heads, d = SHAPES[shape]
    case = Case(1, levels, slices, heads=heads, kv_heads=kv_heads, head_dim=d, dtype=torch.float32)

    got = attend(case, planner_for(case))

    tolerance = 1e-5 if DEVICE.type == "cpu" else 2e-3  # tf32 products on a GPU
    assert error(got, case.expected()) < tolerance


RULES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "a window": ((4, 2, 16), {"window": 40}),
    "a window of one key": ((4, 2, 16), {"window": 1}),
    "a window longer than all": ((2, 2, 16), {"window": 4096}),
    "a window over most of a tree": ((4, 2, 16), {"window": 90}),
    "a cap": ((4, 2, 16), {"cap": 2.0}),
    "a scale": ((4, 2, 16), {"scale": 0.7}),
    "sinks": ((6, 2, 16), {"sinks": True}),
    "heads of 24": ((4, 2, 24), {}),
    "heads of 80": ((2, 1, 80), {"window": 33}),
    "heads of 256": ((2, 1, 256), {"window": 20, "sinks": True}),
    "all": ((4, 2, 24), {"window": 50, "cap": 3.0, "scale": 0.3, "sinks": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        pytest.param(
            tree, rule, id=f"{name}-{tree}", marks=nightly_unless(tree == MIXED and is_one)
        )
        for tree in ("no sharing, ragged", "three levels", MIXED)
        for name, rule in RULES.items()
        for is_one in [name in ("a window of one key", "sinks", "heads of 256", "all")]
    ],
)
def test_rules_of_families_equal_the_reference(
    tree: str, rule: tuple[tuple[int, int, int], dict[str, Any]]
) -> None:
    """Windows, caps, sinks and scales, in one part and in several, with any sharing."""
    (heads, kv_heads, d), given = rule
    levels, slices = TREES[tree]
    # Tiles of long heads fit a GPU's shared memory in bf16, which is what a GPU serves.
    dtype = torch.bfloat16 if DEVICE.type == "cuda" and d > 64 else torch.float32
    case = Case(3, levels, slices, heads=heads, kv_heads=kv_heads, head_dim=d, dtype=dtype)
    if "sinks" in given:
        generator = torch.Generator().manual_seed(2)
        given = {**given, "sinks": torch.randn(heads, generator=generator).to(DEVICE) * 2}

    got = attend(case, planner_for(case), **given)

    tolerance = 1e-5 if DEVICE.type == "cpu" else 4e-3
    assert error(got, case.expected(**given)) < tolerance


INT8_CASES: dict[str, tuple[str, tuple[int, int, int], dict[str, Any]]] = {
    "decoding rows": ("three levels", (6, 2, 16), {}),
    "a prompt beside them": (MIXED, (4, 2, 24), {}),
    "a window": ("no sharing, ragged", (2, 1, 80), {"window": 33}),
    "a cap": ("one prefix", (4, 2, 16), {"cap": 2.0, "scale": 0.7}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=nightly_unless(n.startswith(("a prompt", "a window"))))
        for n in INT8_CASES
    ],
)
def test_attention_over_int8_equals_the_reference(name: str) -> None:
    """A key's scale multiplies its scores, a value's its probabilities, and no other's."""
    tree, (heads, kv_heads, d), given = INT8_CASES[name]
    levels, slices = TREES[tree]
    case = Case(5, levels, slices, heads=heads, kv_heads=kv_heads, head_dim=d, dtype=torch.float32)
    spread = torch.logspace(-1, 1, SIZE, device=DEVICE)[:, None]
    units = int8_units(case.kv * spread)
    case.kv = reference_int8.widen(units)
    expected = case.expected(**given)
    case.kv = units.view(*units.shape[:-1], SIZE, d + 2)

    got = attend(case, planner_for(case), **given)

    assert error(got, expected) < (1e-5 if DEVICE.type == "cpu" else 4e-3)


@pytest.mark.parametrize("seed", range(3 if DEVICE.type == "cpu" else 200))
def test_random_rules_over_random_trees_equal_the_reference(seed: int) -> None:
    """Any tree, window, cap, sinks and cut of the keys."""
    rng = np.random.default_rng(seed)
    levels = [(1, int(rng.integers(1, 7))), (int(rng.integers(1, 4)), int(rng.integers(1, 5)))]
    slices = [
        (int(rng.integers(0, 90)), int(rng.choice([1, 1, 5, 38])))
        for _ in range(int(rng.integers(1, 6)))
    ]
    kv_heads, group, d = int(rng.integers(1, 3)), int(rng.integers(1, 5)), int(rng.choice([16, 24]))
    heads = kv_heads * group
    case = Case(
        seed, levels, slices, heads=heads, kv_heads=kv_heads, head_dim=d, dtype=torch.float32
    )
    given: dict[str, Any] = {
        "window": int(rng.choice([0, 1, 7, 40, 133])),
        "cap": float(rng.choice([0, 2.5])),
        "sinks": torch.from_numpy(rng.normal(size=heads)).float().to(DEVICE),
    }

    got = attend(case, planner_for(case, multiprocessors=int(rng.choice([1, 4]))), **given)

    tolerance = 1e-5 if DEVICE.type == "cpu" else 4e-3
    assert error(got, case.expected(**given)) < tolerance, given


@pytest.mark.slow
def test_the_first_key_of_a_window_counts_and_the_one_before_does_not() -> None:
    """A window one longer or one shorter is another result; so are a cap and sinks left out."""
    levels, slices = TREES[MIXED]
    case = Case(3, levels, slices, heads=2, kv_heads=1, head_dim=16, dtype=torch.float32)
    sinks = torch.tensor([0.5, -1.0], device=DEVICE)
    given: dict[str, Any] = {"window": 40, "cap": 2.0, "sinks": sinks}
    expected = case.expected(**given)

    for wrong in ({"window": 41}, {"window": 39}, {"cap": 0.0}, {"sinks": None}):
        assert error(attend(case, planner_for(case), **{**given, **wrong}), expected) > 1e-3, wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "window"),
    [
        (MIXED, 24),
        pytest.param("no sharing, ragged", 24, marks=pytest.mark.nightly),
        pytest.param("one prefix", 67, marks=pytest.mark.nightly),
        pytest.param("three levels", 100, marks=pytest.mark.nightly),
    ],
)
def test_blocks_behind_the_window_change_no_bit(tree: str, window: int) -> None:
    """They may be another sequence's: the table's entry is stale. Rows that share keys read them by
    the table of one that still has them.
    """
    levels, slices = TREES[tree]
    case = Case(4, levels, slices, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    planner = planner_for(case)
    expected = attend(case, planner, window=window)

    for row, (start, offset) in enumerate(
        zip(case.slices.starts.tolist(), case.slices.table_offsets.tolist(), strict=True)
    ):
        hidden = max(0, start + 1 - window) // SIZE
        case.block_ids[offset : offset + hidden] = case.tables[-1 - row][0]
    got = attend(case, planner, window=window)

    assert torch.equal(got, expected)


def test_rows_that_share_a_window_read_it_once() -> None:
    """One unit reads the keys for all rows, as it does without a window."""
    rows, start = 8, 400
    slices = Slices(
        np.ones(rows, np.int32),
        np.arange(start, start + rows, dtype=np.int32),
        np.arange(rows, dtype=np.int32) * 64,
    )
    groups = np.array([[0, rows, 0, 24]], np.int32)
    planner = WorkPlanner(2, 2, SIZE, 2, window_group_keys_min=64, span_keys_min=64)

    plan = planner.plan(slices, groups, window=128)

    shared = plan.work[1].tiles
    first = (start + 1 - 128) // SIZE * SIZE
    assert (shared[:, 1] == rows).all()
    assert sorted(shared[:, 3])[0] == first, "from the window's beginning"
    assert shared[:, 4].sum() == 24 * SIZE - first
    assert (plan.work[2].tiles[:, 3] == 24 * SIZE).all(), "own keys begin where the shared end"
    assert len(planner.plan(slices, groups, window=48).work[1].tiles) == 0, "too few to merge"


@pytest.mark.parametrize(
    "tree", [pytest.param("no sharing, ragged", marks=pytest.mark.nightly), MIXED]
)
def test_slots_behind_sequence_end_change_no_bit(tree: str) -> None:
    """Tiles read whole runs of slots, also of blocks of other sequences, with any finite values."""
    levels, slices = TREES[tree]
    case = Case(4, levels, slices, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    planner = planner_for(case)
    case.fill_unseen(0.0)
    expected = attend(case, planner)

    case.fill_unseen(1e30)
    got = attend(case, planner)

    assert torch.equal(expected, got)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree", [pytest.param("one prefix", marks=pytest.mark.nightly), "three levels"]
)
def test_side_by_side_classes_change_no_bit(tree: str) -> None:
    """A queue decides which program takes a unit, and when, not what the unit adds up."""
    levels, slices = TREES[tree]
    case = Case(1, levels, slices, heads=8, kv_heads=2, head_dim=32, dtype=torch.float32)
    planner = planner_for(case)
    expected = attend(case, planner)

    first, second, other = (attend(case, planner, at, side_by_side=True) for at in (1, 1, 0))

    assert torch.equal(expected, first)
    assert torch.equal(expected, second)
    assert error(other, case.expected(0)) < (1e-5 if DEVICE.type == "cpu" else 2e-3)


@pytest.mark.parametrize(
    "shape",
    [pytest.param(one, marks=nightly_unless(one in ("mqa", "gqa of three"))) for one in SHAPES],
)
def test_small_batch_is_merged_one_head_per_program(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge has two launch shapes, by its size; both add the same parts."""
    monkeypatch.setattr(kernels.gpu.tree_attention, "FEW_ROW_HEADS", 1024)
    heads, kv_heads, d = SHAPES[shape]
    case = Case(
        2, [(1, 6)], [(70, 1), (0, 1)], heads=heads, kv_heads=kv_heads, head_dim=d,
        dtype=torch.float32,
    )  # fmt: skip

    got = attend(case, planner_for(case))

    assert error(got, case.expected()) < (1e-5 if DEVICE.type == "cpu" else 2e-3)


def test_half_precision_error_is_within_rounding() -> None:
    """Operands are rounded to 8 (bf16) or 11 bits and accumulated in fp32.

    The interpreter has no bf16, so it uses fp16.
    """
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    case = Case(3, [(1, 6)], [(9, 1), (30, 5)], heads=8, kv_heads=2, head_dim=32, dtype=dtype)

    got = attend(case, planner_for(case))

    assert error(got, case.expected()) < (8e-3 if dtype == torch.bfloat16 else 1e-3)


def random_tree(seed: int) -> tuple[Slices, npt.NDArray[np.int32]]:
    """Return random nested groups and slices for the planner."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 24))
    groups: list[tuple[int, int, int, int]] = []
    own = np.zeros(n, np.int32)

    def descend(a: int, b: int, block: int, depth: int) -> None:
        if b - a < 2 or depth > 3:
            return
        end = block + int(rng.integers(1, 30))
        groups.append((a, b, block, end))
        own[a:b] = end
        middle = int(rng.integers(a, b + 1))
        descend(a, middle, end, depth + 1)
        descend(middle, b, end, depth + 1)

    descend(0, n, 0, 0)
    rows = np.where(rng.random(n) < 0.6, 1, rng.integers(1, 90, n)).astype(np.int32)
    starts = (own * SIZE + rng.integers(0, 700, n)).astype(np.int32)
    offsets = (np.arange(n) * 4096).astype(np.int32)
    return Slices(rows, starts, offsets), np.array(groups, np.int32).reshape(-1, 4)


def test_planner_refuses_more_heads_than_a_small_tile() -> None:
    """Such a row would be in no unit, and its output would be old memory."""
    planner = WorkPlanner(kv_heads=1, heads_per_group=32, block_size=SIZE, multiprocessors=4)
    one = np.ones(1, np.int32)

    with pytest.raises(AssertionError, match="more heads"):
        planner.plan(Slices(one, one, one), np.zeros((0, 4), np.int32))


@pytest.mark.parametrize("seed", range(20))
def test_plan_has_every_key_of_every_row_once(seed: int) -> None:
    """The planner's invariant, over random trees, ragged lengths and prefill chunks."""
    slices, groups = random_tree(seed)
    planner = WorkPlanner(
        kv_heads=2,
        heads_per_group=4,
        block_size=SIZE,
        multiprocessors=4,
        span_keys_min=128,
        own_span_keys_target=256,
    )

    check_plan(planner.plan(slices, groups), slices, planner, groups)


@pytest.mark.parametrize(
    ("shared", "own", "expected"),
    [
        ([(1, 2048)], 64, True),
        ([(8, 2048)], 128, True),
        ([(1, 1024), (8, 2048), (32, 512)], 64, True),
        ([(1, 2048)], 16, False),
        ([(8, 8192)], 128, False),
        ([], 1024, False),
    ],
)
def test_classes_run_side_by_side_where_measured_faster(
    shared: list[tuple[int, int]], own: int, expected: bool
) -> None:
    """With few own keys, or shared keys of many waves, the classes run one after the other. 256
    rows of the 8B shape on 132 multiprocessors."""
    planner = WorkPlanner(kv_heads=8, heads_per_group=4, block_size=SIZE, multiprocessors=132)
    groups, depth = [], 0
    for nodes, keys in shared:
        edges = np.linspace(0, 256, nodes + 1).astype(int).tolist()
        groups += [(a, b, depth, depth + keys // SIZE) for a, b in pairwise(edges)]
        depth += keys // SIZE
    starts = np.full(256, depth * SIZE + own - 1, np.int32)
    slices = Slices(np.ones(256, np.int32), starts, np.arange(256, dtype=np.int32) * 1024)

    plan = planner.plan(slices, np.array(groups, np.int32).reshape(-1, 4))

    assert plan.side_by_side == expected
    assert plan.classes == ((2, 1) if expected else (0, 2) if shared else (2,))


@pytest.mark.parametrize(("rows", "parts"), [(1, 8), (8, 8), (64, 2), (256, 1)])
def test_few_rows_are_cut_into_many_parts(rows: int, parts: int) -> None:
    """8 of 132 multiprocessors would read a lone row of 512 keys in one part."""
    planner = WorkPlanner(kv_heads=8, heads_per_group=4, block_size=SIZE, multiprocessors=132)
    starts, offsets = np.full(rows, 511, np.int32), np.arange(rows, dtype=np.int32) * 64
    slices = Slices(np.ones(rows, np.int32), starts, offsets)

    plan = planner.plan(slices, np.zeros((0, 4), np.int32))

    assert plan.parts_max == parts


@pytest.mark.parametrize("part_rows", [0, 64, 256, 1024, 65_536])
@pytest.mark.parametrize("seed", range(6))
def test_parts_fit_scratch_memory(seed: int, part_rows: int) -> None:
    """Every level of a tree adds a part to the rows below. Rows read keys without room for a part
    themselves, because an allocation within a step could fail the step."""
    slices, groups = random_tree(seed)
    planner = WorkPlanner(
        kv_heads=2, heads_per_group=4, block_size=SIZE, multiprocessors=4,
        span_keys_min=128, own_span_keys_target=256, part_rows=part_rows,
    )  # fmt: skip

    plan = planner.plan(slices, groups)

    check_plan(plan, slices, planner, groups)
    assert plan.parts_max == 1 or plan.parts_max * len(plan.parts_of_row) <= part_rows


@pytest.mark.parametrize("levels", [4, 6, 7, 12, 40])
def test_longest_step_over_deep_tree_allocates_nothing(levels: int) -> None:
    """128 prompts of 64 tokens and 128 decoding rows below `levels` turns of a conversation: from
    the seventh turn, each row would have more parts than the scratch holds."""
    planner = WorkPlanner(kv_heads=8, heads_per_group=4, block_size=SIZE, multiprocessors=132)
    groups = [(0, 256 - 2 * level, 80 * level, 80 * level + 80) for level in range(levels)]
    rows = np.array([64, 1] * 128, np.int32)
    starts = np.full(256, levels * 80 * SIZE + 100, np.int32)
    slices = Slices(rows, starts, np.arange(256, dtype=np.int32) * 8192)

    plan = planner.plan(slices, np.array(groups, np.int32))

    assert min(levels, 6) < plan.parts_max <= planner.part_rows // int(rows.sum())
