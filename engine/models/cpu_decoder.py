"""A decoder on the CPU in C: weights packed once, then one call per step.

The same computation as `engine.models.decoder`, with everything from the token ids to the last norm
in `kernels/cpu/cpu_decoder.c`. The CPU runner builds it where `load_kernels` finds a C compiler and
a model that the kernels fit.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable

import torch

from engine.attention.cpu_backend import CpuAttention, CpuPlace
from engine.attention.interface import attention_spec
from engine.attention.rope import rope_tables
from engine.kv.storage import KvStorage
from engine.model_store import Architecture
from engine.models.cpu_experts import CpuExperts
from engine.models.layers import TensorSource
from engine.models.packing import Packer
from engine.models.recurrent_blocks import DELTA_PARTS
from engine.states.cpu_states import CpuStates
from engine.weights import Weights, give_back_freed
from kernels.cpu import build as cpu
from kernels.cpu.build import Kernels, compile_library
from kernels.reference_weights import Packed, as_dense

__all__ = ["CpuDecoder", "Kernels", "c_place", "load_kernels"]

log = logging.getLogger("trunkline.engine")

_ACTIVATIONS = {"silu": cpu.SILU, "gelu_tanh": cpu.GELU, "relu2": cpu.SQUARED}


def load_kernels(config: Architecture, threads: int) -> Kernels | None:
    """Return the C kernels with `threads` threads.

    Return None if no compiler works or the kernels do not fit the model; the torch path runs
    any model.
    """
    if not config.fits_c_kernels:
        log.info("kernels_not_used: the C kernels do not compute %s; steps run in torch, slower",
                 config.family)  # fmt: skip
        return None
    library = compile_library()
    if library is None:
        log.warning("kernels_not_used: no C compiler works; steps run in torch, slower")
        return None
    try:
        kernels = Kernels(library, threads)
    except OSError:
        log.warning("kernels_not_loadable: steps run in torch, slower")
        return None
    widths = [*_widths(config), *_recurrent_widths(config)]
    if config.head_dim % kernels.head_dim_step == 0 and not any(w % cpu.PANEL for w in widths):
        return kernels
    kernels.close()
    log.info("kernels_not_used: the C kernels take no heads of %d channels or widths of %s; steps"
             " run in torch, slower", config.head_dim, widths)  # fmt: skip
    return None


def _widths(config: Architecture) -> list[int]:
    """Return the channels of the hidden states, and of what MLPs and experts compute inside."""
    widths = [config.hidden]
    if any(layer.ffn == "dense" for layer in config.layers):
        widths.append(config.intermediate)
    if config.moe is not None:
        widths += [config.moe.intermediate, config.moe.shared_intermediate]
    return widths


def _recurrent_widths(config: Architecture) -> list[int]:
    """Return the channels that recurrent layers take a vector at a time."""
    if (rule := config.rule) is None:
        return []
    # Rows of Mamba-2's states are taken one by one.
    return [*rule.state[1 if config.delta else 2 :], rule.inner, rule.inner // rule.groups]


class CpuDecoder:
    """`engine.models.interface.Model` in C: packed weights and scratch memory."""

    def __init__(
        self,
        config: Architecture,
        weights: Weights,
        kernels: Kernels,
        kv: KvStorage,
        context: int,
        states: CpuStates | None = None,
    ) -> None:
        """Removes the tensors from `weights`; they are all bf16 or all fp32, or packed as
        `cpu_form` keeps them. `states`: of the architecture's recurrent layers, if it has any."""
        self.config = config
        self._spec = attention_spec(config)
        self._kernels = kernels
        self._packer = Packer(kernels)
        self._scratch: dict[str, torch.Tensor] = {}
        top = TensorSource(weights, "")
        embeddings, _ = top.joined("model.embed_tokens")
        moe = config.moe
        self._experts = None if moe is None else CpuExperts(config, moe, self._packer)
        self._recurrence = None if states is None else CpuRecurrence(config, states, self._packer)
        width = self._recurrence.width if self._recurrence else config.hidden
        depths = (*_widths(config), self._spec.query_width, width)
        dtype = torch.bfloat16 if isinstance(embeddings, Packed) else embeddings.dtype
        self._kind = _kind(dtype, kernels, depths)
        layers = self._layers(weights, kv, context)
        # Tied embeddings are read from the panels of the head: one copy of the largest matrix.
        is_tied = "lm_head.weight" not in weights
        head = embeddings if is_tied else top.joined("lm_head")[0]
        packed_head = self._packer.head(head, is_tied=is_tied)
        self._model = cpu.CModel(
            layers=len(config.layers),
            hidden=config.hidden,
            intermediate=config.intermediate,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab,
            kind=self._kind,
            kv_kind=_kind(kv.data.dtype, kernels, (config.head_dim,)),
            q_norm_width=self._norm_width(config.heads),
            k_norm_width=self._norm_width(config.kv_heads),
            centred=config.norm == "mean",
            parallel=config.place == "parallel",
            growth_context=config.query_growth[1] if config.query_growth else 0,
            growth=config.query_growth[0] if config.query_growth else 0.0,
            # The stream is kept divided by what blocks' outputs are multiplied by: each block norms
            # what it reads, so the stream's scale shows nowhere else.
            stream_eps=config.norm_eps / config.residual_scale**2,
            eps=config.norm_eps,
            scale=self._spec.scale,
            cap=config.score_cap,
            embed_scale=config.embed_scale / config.residual_scale,
            **({} if self._experts is None else self._experts.fields()),
            **({} if self._recurrence is None else self._recurrence.fields()),
            kv_rows=kv.format.layers,
            gated=_ACTIVATIONS[config.activation],
            layer=layers,
            embeddings=None if is_tied else self._packer.keep(as_dense(embeddings, dtype)),
            norm=self._packer.keep(top.weight("model.norm").float()),
            head=packed_head.matrix,
            head_packing=packed_head.packing,
            kv=self._packer.keep(kv.data),
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        attention: CpuAttention,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `engine.models.interface.Model`. All rows are computed; [T, C] fp32 is scratch that
        the next step overwrites."""
        work = attention.work
        assert work is not None
        tokens, config = work.tokens, self.config
        assert len(token_ids) == tokens
        reader, width, more = self._spec.qkv_width, self._spec.query_width, dict[str, int]()
        if config.output_gate:
            more["gates"] = self._scratch_rows("gates", tokens, width).data_ptr()
        if (recurrence := self._recurrence) is not None:
            reader, width = max(reader, recurrence.reader_width), max(width, recurrence.width)
            convolved = self._scratch_rows("convolved", tokens, recurrence.channels)
            more |= recurrence.work() | {"convolved": convolved.data_ptr()}
        widest = max(*_widths(config), width)
        normed = self._scratch_rows("normed", tokens, config.hidden)
        self._kernels.forward(
            self._model,
            cpu.CWork(
                tokens=tokens,
                bundles=len(work.places[0].bundles),
                token_ids=work.token_ids.data_ptr(),
                positions=work.positions.data_ptr(),
                place=(cpu.CPlace * len(work.places))(*map(c_place, work.places)),
                hidden=self._scratch_rows("hidden", tokens, config.hidden).data_ptr(),
                normed=normed.data_ptr(),
                qkv=self._scratch_rows("qkv", tokens, reader).data_ptr(),
                attended=self._scratch_rows("attended", tokens, width).data_ptr(),
                activated=self._scratch_rows("activated", tokens, config.intermediate).data_ptr(),
                pairs=self._scratch_rows("pairs", tokens, widest).data_ptr(),
                **({} if self._experts is None else self._experts.scratch(tokens)),
                **more,
            ),
        )
        return normed if output_rows is None else normed[output_rows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `engine.models.interface.Model`; fp32."""
        hidden = hidden.contiguous()
        out = torch.empty(len(hidden), self.config.vocab)
        if len(hidden):
            self._kernels.logits(self._model, hidden, out)
        if self.config.logit_scale != 1.0:
            out.mul_(self.config.logit_scale)
        if self.config.logit_cap:
            out.div_(self.config.logit_cap).tanh_().mul_(self.config.logit_cap)
        return out

    def _layers(self, weights: Weights, kv: KvStorage, context: int) -> ctypes.Array[cpu.CLayer]:
        """Pack all layers."""
        config = self.config
        places = list(zip(kv.format.group_of_layer, kv.format.row_of_layer, strict=True))
        tables = {
            name: (self._packer.keep(cos), self._packer.keep(sin))
            for name, (cos, sin) in rope_tables(config, context).items()
        }
        packed = (cpu.CLayer * len(config.layers))()
        for index, layer in enumerate(config.layers):
            packed[index] = self._layer(weights, index, tables[layer.rope], places[index])
            give_back_freed()  # else a second copy of all layers stays
        return packed

    def _layer(
        self, weights: Weights, index: int, table: tuple[int, int], place: tuple[int, int]
    ) -> cpu.CLayer:
        """Pack a layer. `table`: addresses of cos and sin. `place`: its KV group and row."""
        source = TensorSource(weights, f"model.layers.{index}.")
        config = self.config

        linear, mixer = self._packer.linear, config.layers[index].mixer
        names = list(config.layer_norms)
        if config.qk_norm and mixer == "gqa":
            names += ["self_attn.q_norm", "self_attn.k_norm"]
        norms = {name: self._packer.keep(source.weight(name).float()) for name in names}
        layer = cpu.CLayer(
            attention_norm=norms.get("input_layernorm"),
            mlp_norm=norms.get("post_attention_layernorm"),
            attention_output_norm=norms.get("attention_output_layernorm"),
            mlp_output_norm=norms.get("mlp_output_layernorm"),
            window=config.layers[index].window,
            q_norm=norms.get("self_attn.q_norm"),
            k_norm=norms.get("self_attn.k_norm"),
            cos=table[0],
            sin=table[1],
            group=place[0],
            kv_row=place[1],
        )
        reader, output = (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                          "self_attn.o_proj")  # fmt: skip
        if mixer == "none":
            reader, layer.mlp_norm = [], layer.attention_norm
        elif mixer != "gqa":
            assert self._recurrence is not None, "a layer is recurrent, and there are no states"
            reader, output = self._recurrence.maps
            layer.recurrence = ctypes.pointer(self._recurrence.pack(source, index))
        elif config.output_gate:
            layer.gate, layer.gate_bias, layer.gate_packing = linear(source, "self_attn.gate_proj")
        if reader:
            layer.qkv, layer.qkv_bias, layer.qkv_packing = linear(source, *reader)
            layer.output, layer.output_bias, layer.output_packing = linear(source, output)
        if config.sinks and mixer == "gqa":
            layer.sinks = self._packer.keep(source.tensor("self_attn.sinks").float())
        if config.layers[index].ffn == "dense":
            is_gated = config.activation != "relu2"
            parts = ["mlp.gate_proj", "mlp.up_proj"] if is_gated else ["mlp.up_proj"]
            layer.gate_up, layer.gate_up_bias, layer.gate_up_packing = linear(
                source, *parts, is_gated=is_gated
            )
            layer.down, layer.down_bias, layer.down_packing = linear(source, "mlp.down_proj")
        elif config.layers[index].ffn == "moe":
            assert self._experts is not None, "a layer has experts, and the model has no moe"
            layer.experts = ctypes.pointer(self._experts.pack(source))
        return layer

    def _norm_width(self, heads: int) -> int:
        """Return the channels that a norm of `heads` heads takes together."""
        return self.config.head_dim * (heads if self.config.qk_norm == "whole" else 1)

    def _scratch_rows(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Return scratch [rows, columns] fp32; the memory is reused while it is large enough."""
        scratch = self._scratch.get(name)
        if scratch is None or len(scratch) < rows:
            scratch = self._scratch[name] = torch.empty(rows, columns)
        return scratch[:rows]


class CpuRecurrence:
    """The recurrent layers of a model in C: the same as `engine.models.recurrent_blocks`, in
    `kernels/cpu/cpu_recurrent.c`.

    `channels`: of their convolution. `reader_width`, `width`: of what the first of a layer's two
    maps gives, and of what the second takes.
    """

    def __init__(self, config: Architecture, states: CpuStates, packer: Packer) -> None:
        self._config, self._states, self._packer = config, states, packer
        rule = config.rule
        self.channels = config.hidden if rule is None else rule.channels
        self.width = config.hidden if rule is None else rule.inner
        self.reader_width = 3 * config.hidden
        if rule is not None:
            logits = rule.heads * (2 if config.delta else 1)
            self.reader_width = rule.channels + rule.inner + logits

    @property
    def maps(self) -> tuple[list[str], str]:
        """Names of the parts of a layer's first map, and of its second."""
        if self._config.delta is not None:
            return list(DELTA_PARTS), "linear_attn.out_proj"
        name = "conv" if self._config.mamba is None else "mamba"
        return [f"{name}.in_proj"], f"{name}.out_proj"

    def fields(self) -> dict[str, int]:
        """Return the fields of `CModel` that recurrent layers have."""
        config, rule = self._config, self._config.rule
        own = {
            "rule": cpu.RULES.index("delta" if config.delta else "mamba" if rule else "conv"),
            "conv_width": config.conv_width,
            "conv_channels": self.channels,
            "reader_width": self.reader_width,
        }
        if rule is not None:
            heads, rows, columns = rule.state
            own |= {"rule_heads": heads, "rule_rows": rows, "rule_columns": columns}
            own["rule_groups"] = rule.groups
        return own

    def pack(self, source: TensorSource, index: int) -> cpu.CRecurrence:
        """Pack what a layer has between its two maps."""
        keep, layout = self._packer.keep, self._states.layout
        name = "linear_attn" if self._config.delta else "mamba" if self._config.mamba else "conv"
        taps, bias = source.whole(f"{name}.conv")
        inputs, matrices = layout.starts(index)
        found = cpu.CRecurrence(
            taps=keep(taps.float().T.contiguous()), inputs_at=inputs, matrices_at=matrices
        )
        if bias is not None:
            found.taps_bias = keep(bias.float())
        if self._config.rule is not None:
            found.rate = keep(source.tensor(f"{name}.A_log").float().exp())
            found.dt_bias = keep(source.tensor(f"{name}.dt_bias").float())
            found.norm = keep(source.weight(f"{name}.norm").float())
        if self._config.mamba is not None:
            found.through = keep(source.tensor(f"{name}.D").float())
        return found

    def work(self) -> dict[str, int]:
        """Return the fields of `CWork` that say where the step's states are."""
        states = self._states
        return {
            "rows": len(states.slots),
            "row_first": states.firsts.ctypes.data,
            "row_drafts": states.drafts.ctypes.data,
            "row_slot": states.slots.ctypes.data,
            "states": states.data.data_ptr(),
            "state_bytes": states.layout.bytes,
        }


def c_place(place: CpuPlace) -> cpu.CPlace:
    """Return a place as C reads it, valid as long as `place` lives."""
    return cpu.CPlace(
        place.tables.ctypes.data, place.slots.data_ptr(), place.bundles.ctypes.data,
        place.segments.ctypes.data, place.own_keys.data_ptr(),
    )  # fmt: skip


def _kind(dtype: torch.dtype, kernels: Kernels, depths: Iterable[int]) -> int:
    """Return the kind of storage for right-hand sides of `dtype`; `depths`: their values of k."""
    if dtype == torch.float32:
        return cpu.WIDE
    if dtype == torch.int8:
        return cpu.BYTES
    if kernels.bf16_kind == cpu.TILES and any(depth % cpu.TILE_DEPTH for depth in depths):
        return cpu.PAIRS
    return kernels.bf16_kind
