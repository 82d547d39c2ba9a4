"""Mixtures of experts in the C kernels: packed weights and scratch memory.

The same computation as `engine.models.moe`, in `kernels/cpu/cpu_experts.c`. `cpu_decoder` builds
one for a model with experts.
"""

from __future__ import annotations

import torch

from engine.model_store import Architecture, Moe
from engine.models.layers import TensorSource
from engine.models.packing import Packer
from kernels.cpu import build as cpu

TOKENS_MAX = 512
"""Most tokens that have their experts computed at a time: bounds the scratch memory. Twice as many
would read each expert's weights half as often in a long prompt."""


class CpuExperts:
    """The experts of a model's layers in C."""

    def __init__(self, config: Architecture, moe: Moe, packer: Packer) -> None:
        self._config = config
        self._moe = moe
        self._packer = packer
        self._scratch: dict[str, torch.Tensor] = {}
        self._tokens = 0

    def fields(self) -> dict[str, int | float]:
        """Return the fields of `CModel` that experts have."""
        moe = self._moe
        activation = cpu.SILU if self._config.activation == "silu" else cpu.GELU
        return {
            "experts": moe.experts,
            "top_k": moe.top_k,
            "expert_width": moe.intermediate,
            "shared_width": moe.shared_intermediate,
            "expert_gated": cpu.CLAMPED if moe.expert == "clamped" else activation,
            "expert_score": cpu.SCORES.index(moe.score),
            "renormalise": moe.renormalise,
            "expert_groups": moe.groups,
            "expert_groups_kept": moe.groups_kept,
            "expert_scale": moe.scale,
        }

    def pack(self, source: TensorSource) -> cpu.CExperts:
        """Pack a layer's experts, router and shared MLP."""
        keep, packer, moe = self._packer.keep, self._packer, self._moe
        router, router_bias = source.whole("mlp.gate")
        experts = cpu.CExperts(router=packer.matrix(router.float()))
        if router_bias is not None:
            padding = -len(router_bias) % cpu.COLUMNS_STEP
            experts.router_bias = keep(torch.nn.functional.pad(router_bias.float(), (0, padding)))
        if moe.choose_by_bias:
            experts.choice_bias = keep(source.tensor("mlp.gate.e_score_correction_bias").float())
        experts.gate_up, experts.gate_up_bias, experts.gate_up_packing = packer.stacked(
            source, "mlp.experts.gate_proj", "mlp.experts.up_proj", is_gated=True
        )
        experts.down, experts.down_bias, experts.down_packing = packer.stacked(
            source, "mlp.experts.down_proj"
        )
        if moe.shared:
            name = "mlp.shared_expert"
            experts.shared_gate_up = packer.linear(
                source, f"{name}.gate_proj", f"{name}.up_proj", is_gated=True
            ).matrix
            experts.shared_down = packer.linear(source, f"{name}.down_proj").matrix
        if moe.shared == "gated":
            gate, _ = source.whole("mlp.shared_expert_gate")
            experts.shared_gate = keep(gate.float().flatten())
        return experts

    def scratch(self, tokens: int) -> dict[str, int]:
        """Return the fields of `CWork` for a step of `tokens` tokens; the memory is reused while it
        is large enough."""
        tokens = min(max(tokens, 1), TOKENS_MAX)
        if tokens > self._tokens:
            self._tokens = tokens
            self._scratch = self._made(tokens)
        addresses = {name: tensor.data_ptr() for name, tensor in self._scratch.items()}
        return {"expert_tokens": self._tokens, **addresses}

    def _made(self, tokens: int) -> dict[str, torch.Tensor]:
        moe, hidden = self._moe, self._config.hidden
        rows = tokens * moe.top_k

        def ints(count: int) -> torch.Tensor:
            return torch.empty(count, dtype=torch.int32)

        return {
            "expert_of": ints(rows),
            "expert_row": ints(rows),
            "expert_token": ints(rows),
            "expert_weight": torch.empty(rows),
            "expert_logits": torch.empty(tokens, moe.experts),
            "expert_rows": torch.empty(rows, hidden),
            "expert_activated": torch.empty(rows, moe.intermediate),
            "expert_pairs": ints(rows * max(hidden, moe.intermediate)),
            "mixed": torch.empty(tokens, hidden),
            "shared": torch.empty(tokens, hidden),
            "shared_activated": torch.empty(tokens, max(1, moe.shared_intermediate)),
        }
