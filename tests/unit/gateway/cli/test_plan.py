"""`trunkline plan`: which models fit which GPUs, and what is best."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.model_store import Architecture, Layer, ModelCard, Rope
from engine.model_store.architecture import Delta
from gateway.cli.doctor.gpus import advice_of, plan_lanes
from tests.bench.models import LLAMA_8B

H200_MIB = 140_000
LLAMA_70B = Architecture(
    family="llama", layers=(Layer(),) * 80, hidden=8192, intermediate=28_672, heads=64, kv_heads=8,
    head_dim=128, vocab=128_256, context=16_384, ropes={"full": Rope(500_000.0, 128)},
)  # fmt: skip


def card_of(config: Architecture) -> ModelCard:
    return ModelCard(
        name=config.family, digest="", config=config, source="random:0", folder="",
        template_digest="", stop_token_ids=(0,), special_token_ids=(),
    )  # fmt: skip


def test_an_8b_model_is_better_as_two_replicas() -> None:
    """It fits one GPU; over two the weights are halved and KV has what both have left."""
    rows = plan_lanes(card_of(LLAMA_8B), EngineConfig(), [H200_MIB] * 2, 0)

    assert [row["fits"] for row in rows] == [True, True]
    assert [row["weights_mib"] for row in rows] == [15_316, 7_658]
    assert int(str(rows[1]["kv_tokens"])) > 2 * int(str(rows[0]["kv_tokens"]))
    assert advice_of(rows, 2).startswith("2 replicas with a GPU each serve more")


def test_a_70b_model_needs_two_gpus() -> None:
    rows = plan_lanes(card_of(LLAMA_70B), EngineConfig(), [H200_MIB] * 4, 0)

    assert [row["fits"] for row in rows] == [False, True, True]
    assert rows[0]["note"] == "expected 32,768 tokens of KV or more"
    assert "2 replicas with 2 GPUs each" in advice_of(rows, 4)
    assert advice_of(rows[:2], 2) == "one engine over 2 GPUs"


def test_a_model_that_gpus_cannot_share_says_why() -> None:
    odd = replace(LLAMA_8B, heads=9, kv_heads=3)

    rows = plan_lanes(card_of(odd), EngineConfig(), [H200_MIB] * 2, 0)

    assert rows[1]["note"] == "num_key_value_heads is 3, which 2 GPUs cannot share evenly"
    assert (rows[1]["fits"], rows[1]["kv_tokens"]) == (False, 0)


def test_what_fits_nowhere_is_said() -> None:
    rows = plan_lanes(card_of(LLAMA_70B), EngineConfig(), [40_000], 0)

    assert advice_of(rows, 1).startswith("fits none of these")


def test_states_of_running_sequences_leave_less_kv() -> None:
    """Of Qwen3.5-35B-A3B's 64.4 MB a state, 97 are 6.2 GB."""
    rule = Delta(16, 32, 128, 128)
    layers = ((Layer("delta"),) * 3 + (Layer(),)) * 10
    hybrid = replace(LLAMA_8B, layers=layers, delta=rule, conv_width=4)
    many, few = (
        plan_lanes(card_of(hybrid), EngineConfig(sequences_max=count), [H200_MIB], 0)[0]
        for count in (64, 1)
    )

    assert many["kv_mib"] == few["kv_mib"]
    more = int(str(few["kv_tokens"])) - int(str(many["kv_tokens"]))
    assert more == pytest.approx(63 * 64.4e6 / (10 * 2 * 8 * 128 * 2), rel=0.01)
