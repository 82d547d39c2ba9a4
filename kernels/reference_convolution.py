"""What a short convolution computes, in plain torch: the specification of every kernel for it."""

from __future__ import annotations

import torch


def short_convolution(
    x: torch.Tensor, state: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the causal convolution of each channel over a sequence's next inputs, and its state
    after them.

    x [n, C]: the inputs. state [W - 1, C]: the inputs before them, oldest first; zeros before a
    sequence's beginning. taps [C, W], of which the last is the input's own. Output [n, C] in x's
    dtype, with sums in fp32 at least; the state as it was given.
    """
    width = taps.shape[1]
    inputs = torch.cat([state, x])
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    for tap in range(width):
        total += inputs[tap : tap + len(x)].to(wide) * taps[:, tap].to(wide)
    if bias is not None:
        total += bias.to(wide)
    return total.to(x.dtype), inputs[len(inputs) - width + 1 :]
