"""Compile attention over latents for sm_90 without a GPU, and report the result.

Run as a program, as `compile_for_hopper`; a JSON object for each tile class.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kernels.gpu.latent_attention import latent_attention_kernel
from kernels.gpu.work_list import BIG_LATENT, SMALL_LATENT, TileConfig
from tests.unit.kernels.gpu.compile_for_hopper import POINTERS, report, source_of

CASES = ((SMALL_LATENT, False), (BIG_LATENT, False), (SMALL_LATENT, True), (BIG_LATENT, True))


def compile_class(config: TileConfig, *, causal: bool) -> dict[str, Any]:
    """Compile a tile class over latents of DeepSeek's size, for groups of 16 of 128 heads."""
    slots, width, layers = 16, 576, 61
    constants = {
        "G": 16, "GP": 16, "M": config.vectors, "H": 128, "R": 64, "L": 512, "SLOTS": slots,
        "KEYS": config.keys, "BLOCK_STRIDE": layers * slots * width, "STAGES": config.stages,
        "CAUSAL": causal, "WAITS": True, "TRIGGERS": False, "FOLLOWS": False, "QUEUE": False,
    }  # fmt: skip
    types = {**POINTERS, "rows_total": "i32", "scale": "fp32"}
    source = source_of(latent_attention_kernel, types, constants)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return {"name": config.name, "causal": causal, **report(source, options)}


def main() -> None:
    for config, causal in CASES:
        sys.stdout.write(json.dumps(compile_class(config, causal=causal)) + "\n")


if __name__ == "__main__":
    main()
