"""Dependent launches are used on GPUs that support them."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import dependent_launch
from kernels.gpu.dependent_launch import dependent_options


def test_cpu_tensor_gets_no_launch_options() -> None:
    """The interpreter does not support dependent launches."""
    assert dependent_options(torch.zeros(1)) == {}


@pytest.mark.gpu
def test_gpu_gets_supported_launch_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs before Hopper do not have the instructions."""
    tensor = torch.zeros(1, device="cuda")
    expected = {"launch_pdl": True} if torch.cuda.get_device_capability()[0] >= 9 else {}

    assert dependent_options(tensor) == expected

    monkeypatch.setattr(dependent_launch, "IS_IN_TRITON", False)
    assert dependent_options(tensor) == {}
