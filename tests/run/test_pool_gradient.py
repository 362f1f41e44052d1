"""The gradient of max_pool3d as a gather: PyTorch's own, to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.run import pool_gradient

CASES = {
    "cubes": ((2, 2, 2), (2, 3, 4, 6, 8)),
    "positions after the last window": ((2, 2, 2), (2, 3, 5, 7, 9)),
    "windows of other sizes": ((1, 3, 2), (1, 2, 4, 6, 5)),
}


def both(kernel: tuple[int, ...], x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Result and gradient, by the operator and by PyTorch."""
    found = []
    for pool in (torch.ops.postlude.max_pool3d, F.max_pool3d):
        leaf = x.clone().requires_grad_()
        y = pool(leaf, list(kernel))
        torch.manual_seed(1)
        found.append((y, torch.autograd.grad(y, leaf, torch.randn(y.shape).to(y.dtype))[0]))
    return found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_pytorchs(case: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    kernel, shape = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(shape).round(decimals=1).to(dtype)  # with ties, of which PyTorch takes one
    x[0, 0, 0, :2, :2] = torch.nan
    for ours, theirs in zip(*both(kernel, x.contiguous(memory_format=layout)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert ours.dtype == dtype


def test_positions_numbered_by_the_windows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: numbers as if the value ended with its last window."""
    honest = pool_gradient._numbers
    monkeypatch.setattr(pool_gradient, "_numbers", lambda covered, _, device: honest(covered, covered, device))
    test_gradients_are_pytorchs("cubes", torch.float32, torch.contiguous_format)
    with pytest.raises(AssertionError):
        test_gradients_are_pytorchs("positions after the last window", torch.float32, torch.contiguous_format)
