"""Dependent launches are asked for where the device has them."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu import dependent_launch
from kernels.gpu.dependent_launch import dependent_options


def test_a_tensor_on_the_host_is_launched_plainly() -> None:
    """The interpreter knows no such launch."""
    assert dependent_options(torch.zeros(1)) == {}


@pytest.mark.gpu
def test_a_device_is_asked_for_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Hopper the instructions do not exist."""
    tensor = torch.zeros(1, device="cuda")
    expected = {"launch_pdl": True} if torch.cuda.get_device_capability()[0] >= 9 else {}

    assert dependent_options(tensor) == expected

    monkeypatch.setattr(dependent_launch, "IS_IN_TRITON", False)
    assert dependent_options(tensor) == {}
