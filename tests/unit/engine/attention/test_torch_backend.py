"""Attention in torch against the reference, with groups at several levels."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention.batch import make_batch
from engine.attention.rope import rope_tables
from engine.attention.torch_backend import TorchAttention
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import ModelConfig, RopeScaling
from engine.plan import StepPlan
from kernels.reference import paged_attention, rotate
from tests.models import LLAMA3_SCALING, tiny_config
from tests.unit.engine.attention.test_cpu_backend import random_tree
from tests.unit.engine.models.dense_llama import rope_rotations

BLOCK, CONTEXT = 16, 1024
LAYER = 1


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("seed", range(8))
def test_attention_with_shared_runs_equals_reference(seed: int, heads: tuple[int, int]) -> None:
    """Prompts and decoding rows in one batch, runs shared at several levels, ragged lengths."""
    config = tiny_config(heads=heads[0], kv_heads=heads[1])
    plan = random_tree(random.Random(seed))
    generator = torch.Generator().manual_seed(seed)
    blocks = max(max(row.block_ids) for row in plan.rows if row.block_ids) + 1
    kv = KvStorage(kv_format(config, torch.float32, BLOCK), blocks, torch.device("cpu"))
    kv.data.normal_(generator=generator)

    got, q = attend(config, kv, plan, generator)

    at = 0
    for row in plan.rows:
        expected = paged_attention(
            q[at : at + row.count], kv.data, LAYER, row.block_ids, row.start
        ).flatten(1)
        assert float((got[at : at + row.count] - expected).abs().max()) < 1e-5
        at += row.count


def attend(
    config: ModelConfig, kv: KvStorage, plan: StepPlan, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the backend's output, and the rotated queries."""
    attention = TorchAttention(config, kv, CONTEXT)
    batch = make_batch(plan, BLOCK, lambda _: 0)
    attention.begin(plan, batch)
    tokens = len(batch.token_ids)
    heads = config.heads + 2 * config.kv_heads
    qkv = torch.randn(tokens, heads * config.head_dim, generator=generator)
    cos, sin = (table[batch.positions] for table in rope_tables(config, CONTEXT))
    q = qkv[:, : config.heads * config.head_dim].view(tokens, config.heads, config.head_dim)
    return attention.attend(LAYER, qkv.clone()), rotate(q, cos, sin)


@pytest.mark.parametrize(
    "scaling",
    [None, LLAMA3_SCALING, RopeScaling(kind="linear", factor=4.0)],
    ids=["plain", "llama3", "linear"],
)
def test_rope_tables_rotate_complex_numbers(scaling: RopeScaling | None) -> None:
    """Compare with complex numbers; Llama 3's scaling is written out by cases."""
    config = tiny_config(head_dim=64, rope_scaling=scaling)
    x = torch.randn(100, 2, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(config, 100)

    rotated = rotate(x, cos, sin)

    first, second = x.double().chunk(2, -1)
    expected = torch.complex(first, second) * rope_rotations(config, 100)[:, None]
    assert float((rotated - torch.cat([expected.real, expected.imag], -1)).abs().max()) < 1e-5
