"""A Llama on the CPU in C: weights packed once, then one call a step.

The same forward as `engine.models.llama`, which reads from top to bottom, with everything between
the token ids and the last norm in `kernels/cpu/cpu_llama.c`. The runner builds it where a C
compiler works and the shape fits.
"""

from __future__ import annotations

import logging

import torch

from engine.attention.cpu_backend import CpuAttention
from engine.attention.torch_backend import rope_tables
from engine.kv.storage import KvStorage
from engine.model_store import ModelConfig
from engine.weights import Weights
from kernels.cpu import build as cpu
from kernels.cpu.build import Kernels, compiled

__all__ = ["CpuLlama", "Kernels", "load_kernels"]

log = logging.getLogger("trunkline.engine")


def load_kernels(config: ModelConfig, threads: int) -> Kernels | None:
    """The C kernels with that many threads; None where no compiler works, or they do not fit the
    model's shape: the torch path runs any."""
    library = compiled()
    if library is None:
        log.warning("kernels_not_compiled: steps run in torch, slower")
        return None
    try:
        kernels = Kernels(library, threads)
    except OSError:
        log.warning("kernels_not_loadable: steps run in torch, slower")
        return None
    if (
        not config.attention_bias
        and not config.mlp_bias
        and config.head_dim % kernels.head_dim_step == 0
        and config.hidden % cpu.PANEL == 0
        and config.intermediate % cpu.PANEL == 0
    ):
        return kernels
    kernels.close()
    return None


class CpuLlama:
    """Weights in panels, scratch memory, and the way through them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        kv: KvStorage,
        context: int,
    ) -> None:
        """Takes the tensors out of `weights`, all bf16 or all fp32."""
        self.config = config
        self._kernels = kernels
        self._kept: list[torch.Tensor] = []
        self._scratch: dict[str, torch.Tensor] = {}
        embeddings = weights.pop("model.embed_tokens.weight")
        self._kind = _kind(embeddings.dtype, kernels)
        layers = (cpu.CLayer * config.layers)(
            *(self._layer(weights, index) for index in range(config.layers))
        )
        cos, sin = rope_tables(config, context)
        self._kept += [kv.data]
        self._model = cpu.CModel(
            layers=config.layers,
            hidden=config.hidden,
            intermediate=config.intermediate,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab,
            kind=self._kind,
            kv_kind=_kind(kv.data.dtype, kernels),
            eps=config.norm_eps,
            layer=layers,
            embeddings=self._keep(embeddings.contiguous()),
            norm=self._keep(weights.pop("model.norm.weight").float()),
            head=self._keep(kernels.pack(weights.pop("lm_head.weight", embeddings))),
            cos=self._keep(cos),
            sin=self._keep(sin),
            kv=kv.data.data_ptr(),
        )

    def forward(self, token_ids: torch.Tensor, attention: CpuAttention) -> torch.Tensor:
        """Hidden states [T, C] after the last norm, of the step laid out in `attention`.

        The tensor is scratch: the next step overwrites it.
        """
        work = attention.work
        assert work is not None
        tokens, config = work.tokens, self.config
        assert len(token_ids) == tokens
        width = config.heads * config.head_dim
        wider = width + 2 * config.kv_heads * config.head_dim
        widest = max(config.hidden, config.intermediate, width)
        normed = self._room("normed", tokens, config.hidden)
        self._kernels.forward(
            self._model,
            cpu.CWork(
                tokens=tokens,
                bundles=len(work.bundles),
                token_ids=work.token_ids.data_ptr(),
                positions=work.positions.data_ptr(),
                tables=work.tables.ctypes.data,
                slots=work.slots.data_ptr(),
                bundle=work.bundles.ctypes.data,
                segment=work.segments.ctypes.data,
                hidden=self._room("hidden", tokens, config.hidden).data_ptr(),
                normed=normed.data_ptr(),
                qkv=self._room("qkv", tokens, wider).data_ptr(),
                attended=self._room("attended", tokens, width).data_ptr(),
                activated=self._room("activated", tokens, config.intermediate).data_ptr(),
                pairs=self._room("pairs", tokens, widest).data_ptr(),
            ),
        )
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, vocab] fp32."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self.config.vocab)
        if len(hidden):
            self._kernels.logits(self._model, hidden, out)
        return out

    def _layer(self, weights: Weights, index: int) -> cpu.CLayer:
        at = f"model.layers.{index}."

        def joined(*names: str) -> torch.Tensor:
            matrices = [weights.pop(f"{at}{name}.weight") for name in names]
            return torch.cat(matrices) if len(matrices) > 1 else matrices[0]

        pack = self._kernels.pack
        return cpu.CLayer(
            attention_norm=self._keep(weights.pop(f"{at}input_layernorm.weight").float()),
            mlp_norm=self._keep(weights.pop(f"{at}post_attention_layernorm.weight").float()),
            qkv=self._keep(
                pack(joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
            ),
            output=self._keep(pack(joined("self_attn.o_proj"))),
            gate_up=self._keep(
                pack(joined("mlp.gate_proj", "mlp.up_proj"), in_turns(self.config.intermediate))
            ),
            down=self._keep(pack(joined("mlp.down_proj"))),
        )

    def _keep(self, tensor: torch.Tensor) -> int:
        """Its address, valid as long as the model is."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _room(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] fp32, the same memory as last time where it was large enough."""
        room = self._scratch.get(name)
        if room is None or len(room) < rows:
            room = self._scratch[name] = torch.empty(rows, columns)
        return room[:rows]


def in_turns(intermediate: int) -> torch.Tensor:
    """Columns of gate and up for `SILU`: a panel of gate, the same panel of up, and so on."""
    gate = torch.arange(intermediate, dtype=torch.int32).view(-1, cpu.PANEL)
    return torch.stack([gate, gate + intermediate], 1).flatten().contiguous()


def _kind(dtype: torch.dtype, kernels: Kernels) -> int:
    if dtype == torch.float32:
        return cpu.WIDE
    return cpu.DOT if kernels.prefers_dot else cpu.PAIRS
