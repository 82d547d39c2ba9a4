"""Compile the sampling kernels for sm_90 without a GPU, and report the result.

Run as a program, as `compile_for_hopper`. It prints one JSON object per kernel and dtype of the
logits.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kernels.gpu import sampling
from tests.unit.kernels.gpu.compile_for_hopper import report, source_of

VOCAB = 128_256
POINTERS = {
    "table": "*i32", "masks": "*i32", "counts": "*i16", "bias_ids": "*i32",
    "bias_values": "*fp32", "adjusted": "*fp32", "alive": "*i32", "candidates": "*i32",
    "out": "*i32", "best": "*i64", "sums": "*fp32", "drawn": "*i32", "reports": "*i32",
    "first": "i32",
}  # fmt: skip


def compile_kernel(kernel: Any, logits: str) -> dict[str, object]:
    """Compile one launch's kernel as it is launched for this vocabulary."""
    constants, options = sampling.launch_options(kernel, VOCAB, 128, 1024)
    types = {**POINTERS, "logits": logits}
    source = source_of(kernel, types, constants)
    return {"kernel": kernel.fn.__name__, "logits": logits, **report(source, options)}


def main() -> None:
    for kernel in sampling.KERNELS:
        # Adjusted logits are always fp32.
        for logits in ("*bf16", "*fp32") if "logits" in kernel.arg_names else ("*fp32",):
            sys.stdout.write(json.dumps(compile_kernel(kernel, logits)) + "\n")


if __name__ == "__main__":
    main()
