"""Attention in torch against the reference, with groups at several levels."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
import torch

from engine.attention.batch import make_batch
from engine.attention.rope import frequencies, rope_table, rope_tables
from engine.attention.torch_backend import TorchAttention
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture, Layer, Rope
from engine.model_store.rope_parameters import read_rope
from engine.plan import Row, StepPlan
from kernels import reference_int8
from kernels.reference import paged_attention, rotate
from tests.models import LLAMA3_SCALING, tiny_config
from tests.tables import each_row
from tests.unit.engine.attention.test_cpu_backend import random_tree
from tests.unit.engine.models.dense_llama import rope_rotations

BLOCK, CONTEXT = 16, 1024
LAYER = 1


CASES: dict[str, dict[str, Any]] = {
    "MHA": {"heads": (4, 4)},
    "GQA": {"heads": (6, 2)},
    "MQA": {"heads": (4, 1)},
    "a window": {"window": 24},
    "a window of one block": {"window": BLOCK},
    "a window longer than any prompt": {"window": 4096},
    "a cap": {"cap": 3.0},
    "sinks": {"sinks": True},
    "a scale": {"scale": 0.7},
    "all": {"window": 40, "cap": 5.0, "sinks": True, "scale": 0.4},
}


@each_row("case", CASES.values())
@each_row("seed", range(5))
def test_attention_with_shared_runs_equals_reference(seed: int, case: dict[str, Any]) -> None:
    """Prompts and decoding rows in one batch, runs shared at several levels, ragged lengths; a
    window's first key lies inside a block."""
    heads, kv_heads = case.get("heads", (6, 2))
    window, sinks = case.get("window", 0), None
    config = msgspec.structs.replace(
        tiny_config(heads=heads, kv_heads=kv_heads),
        layers=(Layer(), Layer(window=window)),
        score_cap=case.get("cap", 0.0),
        score_scale=case.get("scale", 0.0),
        sinks="sinks" in case,
    )
    plan = random_tree(random.Random(seed))
    generator = torch.Generator().manual_seed(seed)
    kv = storage_for(plan, config, torch.float32)
    kv.data.normal_(generator=generator)
    if config.sinks:
        sinks = torch.randn(config.heads, generator=generator)

    got, q = attend(config, kv, plan, generator, sinks)

    how = {"window": window, "cap": config.score_cap, "sinks": sinks}
    assert_reference(plan, got, q, kv.data, scale=config.score_scale or None, **how)


def storage_for(plan: StepPlan, config: Architecture, dtype: torch.dtype) -> KvStorage:
    """Return a pool that has the blocks of a plan."""
    blocks = max(max(row.block_ids) for row in plan.rows if row.block_ids) + 1
    return KvStorage(kv_format(config, dtype, BLOCK), blocks, torch.device("cpu"))


def assert_reference(
    plan: StepPlan, got: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, **how: Any
) -> None:
    """Compare each row's output with the reference over the pool as it is afterwards."""
    at = 0
    for row in plan.rows:
        rows = slice(at, at + row.count)
        expected = paged_attention(q[rows], kv, LAYER, row.block_ids, row.start, **how).flatten(1)
        assert float((got[rows] - expected).abs().max()) < 1e-5
        at += row.count


def attend(
    config: Architecture,
    kv: KvStorage,
    plan: StepPlan,
    generator: torch.Generator,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the backend's output, and the rotated queries."""
    attention = TorchAttention(config, kv, CONTEXT)
    batch = make_batch(plan, BLOCK, lambda _: 0)
    attention.begin(plan, batch)
    tokens = len(batch.token_ids)
    heads = config.heads + 2 * config.kv_heads
    qkv = torch.randn(tokens, heads * config.head_dim, generator=generator)
    cos, sin = (table[batch.positions] for table in rope_tables(config, CONTEXT)["full"])
    q = qkv[:, : config.heads * config.head_dim].view(tokens, config.heads, config.head_dim)
    return attention.attend(LAYER, qkv.clone(), sinks), rotate(q, cos, sin)


@each_row("seed", range(4))
def test_attention_over_8_bits_equals_reference(seed: int) -> None:
    """The step's own tokens are rounded when they are written, and read as the others are."""
    config = tiny_config(heads=6, kv_heads=2)
    plan = random_tree(random.Random(seed))
    generator = torch.Generator().manual_seed(seed)
    kv = storage_for(plan, config, torch.int8)
    units = kv.data.flatten(-2)
    values = reference_int8.values_of(units)
    x = torch.randn(values.shape, generator=generator)
    found, scales = reference_int8.quantise(x)
    values.copy_(found)
    reference_int8.scales_of(units).copy_(scales)

    got, q = attend(config, kv, plan, generator)

    wide = reference_int8.widen(units)
    assert_reference(plan, got, q, wide)
    assert not torch.equal(wide[:, LAYER], reference_int8.widen(reference_units(x))[:, LAYER])


def reference_units(x: torch.Tensor) -> torch.Tensor:
    """Return int8 units of KV [..., S, D]."""
    values, scales = reference_int8.quantise(x)
    return torch.cat([values.flatten(-2), scales.view(torch.int8)], -1)


@pytest.mark.parametrize(
    "scaling",
    [None, LLAMA3_SCALING, Rope(10_000.0, 64, kind="linear", factor=4.0)],
    ids=["plain", "llama3", "linear"],
)
def test_rope_tables_rotate_complex_numbers(scaling: Rope | None) -> None:
    """Compare with complex numbers; Llama 3's scaling is written out by cases."""
    config = tiny_config(head_dim=64, rope_scaling=scaling)
    x = torch.randn(100, 2, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(config, 100)["full"]

    rotated = rotate(x, cos, sin)

    first, second = x.double().chunk(2, -1)
    expected = torch.complex(first, second) * rope_rotations(config, 100)[:, None]
    assert float((rotated - torch.cat([expected.real, expected.imag], -1)).abs().max()) < 1e-5


def test_window_reads_no_block_behind_it() -> None:
    """A block behind the window may have been let go, and may hold anything."""
    config = msgspec.structs.replace(tiny_config(), layers=(Layer(window=20), Layer(window=20)))
    kv = KvStorage(kv_format(config, torch.float32, BLOCK), 8, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    kv.data.normal_(generator=generator)
    rows = (Row(0, 70, 1, [0, 1, 2, 3, 4], 0, [5]), Row(1, 70, 3, [0, 1, 2, 5, 6], 0, [5, 6, 7]))
    state = generator.get_state()
    first, _ = attend(config, kv, StepPlan(0, rows), generator)
    kv.data[:3] = math.nan  # positions 0 to 47; the first key of a window is 51

    again, _ = attend(config, kv, StepPlan(0, rows), generator.set_state(state))

    assert torch.equal(first, again)


def test_layer_without_rotation_leaves_keys_as_they_are() -> None:
    """Its table is ones and zeros, so that kernels know one kind of layer."""
    config = msgspec.structs.replace(tiny_config(), layers=(Layer(rope=""), Layer()))

    cos, sin = rope_tables(config, 64)[""]

    assert bool((cos == 1).all())
    assert not sin.any()


def test_channels_that_do_not_rotate_have_columns_of_one_and_zero() -> None:
    """The loader puts rotating channels at the front of each half of a head."""
    cos, sin = rope_table(Rope(10_000.0, 8), 16, 8)

    assert bool((cos[:, 4:] == 1).all())
    assert not sin[:, 4:].any()
    assert bool((sin[1, :4] != 0).all())


def test_long_factors_are_chosen_by_the_served_context() -> None:
    """Once for all positions: a cached key is rotated by the table of the query that reads it."""
    rope = Rope(1e4, 4, "divisors", divisors=(1.0, 2.0), long_divisors=(4.0, 8.0),
                original_context=64)  # fmt: skip

    short, long = frequencies(rope, 64), frequencies(rope, 65)

    assert torch.equal(short, long * 4)


@pytest.mark.slow
@each_row(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
         "truncate": False},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
         "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 24.0, "beta_slow": 2.0},
    ],
)  # fmt: skip
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    """Each scaling, with the parameters of published models."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"rope_theta": 150_000.0, **parameters}
    theirs = LlamaConfig(head_dim=64, max_position_embeddings=8192, rope_parameters=dict(given))
    expected, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, "cpu")

    rope = read_rope({**given, "max_position_embeddings": 8192}, 64)

    assert rope.amplitude == pytest.approx(amplitude)
    torch.testing.assert_close(frequencies(rope, 8192).float(), expected, rtol=1e-6, atol=0)
