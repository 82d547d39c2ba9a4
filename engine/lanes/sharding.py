"""What each lane of an engine has of a model's weights.

`engine.model_store.tensors` says how lanes share a tensor; this cuts it. It knows no device and no
layer. `engine.runner.gpu_build` passes the result to `engine.weights.load_shares`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.errors import ModelError
from engine.model_store import Architecture
from engine.model_store.tensors import cut_of, lacks_lanes, sections_of
from engine.weights import Share
from kernels.reference_weights import Packed, Weight, each


def sharing(config: Architecture, lanes: int) -> Share:
    """Return the share of each of so many lanes. Raises ModelError `unsupported` for a model that
    they cannot share.

    A share is contiguous and keeps no memory of the whole. A packed weight whose groups a cut would
    split is unpacked first.
    """
    lacking = lacks_lanes(config, lanes)
    if lacking:
        raise ModelError("unsupported", f"engine.gpus names {lanes} GPUs: {lacking}")

    def share(name: str, weight: Weight, lane: int) -> Weight:
        cut = "whole" if lanes == 1 else cut_of(name)
        if cut == "whole":
            return weight
        if cut == "first":
            return each(weight, torch.zeros_like) if lane else weight
        if cut == "inputs":
            return _columns(weight, lane, lanes)
        dim = -2 if name.endswith(".weight") and len(weight.shape) > 1 else -1
        sizes = sections_of(config, name) if cut == "sections" else (weight.shape[dim],)
        return each(weight, lambda part: _rows(part, lane, lanes, dim, sizes))

    return share


def _rows(
    part: torch.Tensor, lane: int, lanes: int, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    """Return a lane's outputs of a matrix [..., N, K], whose dimension `dim` is -2, or of values
    [..., N]: an even part of each of the sections of these sizes."""
    found = [
        one.narrow(dim, lane * (size // lanes), size // lanes)
        for one, size in zip(torch.split(part, list(sizes), dim), sizes, strict=True)
    ]
    return torch.cat(found, dim)


def _columns(weight: Weight, lane: int, lanes: int) -> Weight:
    """Return a lane's inputs of a matrix [..., N, K]."""
    own = weight.shape[-1] // lanes
    if isinstance(weight, Packed):
        part = weight.columns(lane * own, (lane + 1) * own)
        if part is not None:
            return part.each(lambda one: one.clone(memory_format=torch.contiguous_format))
        weight = weight.dense(torch.bfloat16)
    own_columns = weight.narrow(-1, lane * own, own)
    return own_columns.clone(memory_format=torch.contiguous_format)
