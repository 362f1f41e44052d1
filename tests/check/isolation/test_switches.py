"""PyTorch's switches in a candidate's process."""

from __future__ import annotations

import pytest
import torch

from postlude.check.isolation.host import set_switches


@pytest.mark.parametrize(("device", "precision", "allowed"), [("cuda", "fp32", False), ("cuda", "tf32", True)])
def test_its_process_has_the_switches_of_the_declared_precision(device: str, precision: str, allowed: bool) -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not allowed
        set_switches("cpu", precision)
        set_switches(device, "auto")
        assert torch.backends.cudnn.allow_tf32 is not allowed
        set_switches(device, precision)
        assert torch.backends.cudnn.allow_tf32 is allowed
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
