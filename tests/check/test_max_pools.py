"""The verifier at a max_pool: windows whose largest is ahead by no more than rounding, and windows of relu's zeros."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import Builder, conv
from postlude.chain import Chain
from postlude.check import chain_points, kinks, verify_chain
from postlude.check.max_pools import ahead_of_the_second

CHAIN = Builder(2, conv(2, (8, 16))).norm(4).op("relu").pool("max", 2).chain()


def honest(_: Chain, tensors: Sequence[Tensor]) -> Tensor:
    """Computes like a kernel: rounds the convolution's result, and nothing after it until the end."""
    x, weight, bias, gamma, beta = tensors
    value = F.conv2d(x, weight).float() + bias.float()[:, None, None]
    value = torch.relu(F.group_norm(value, 4, gamma.float(), beta.float()))
    return F.max_pool2d(value, 2).to(x.dtype)


def outcome() -> str:
    points = chain_points(CHAIN, (2, 8, 35, 34), torch.bfloat16, "cpu")
    return str(verify_chain(honest, CHAIN, points, backward=True))


def test_an_honest_kernel_is_right_in_sixteen_bits() -> None:
    assert outcome().startswith("right")


def test_windows_of_zeros_that_are_compared_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: an element that only the kernel sees above zero has a window of its own."""
    monkeypatch.setattr(kinks, "_with_ties", lambda _, near, __: near)
    points = list(chain_points(CHAIN, (2, 8, 35, 34), torch.bfloat16, "cpu"))
    spared = [verify_chain(honest, CHAIN, points, backward=True)]
    monkeypatch.undo()
    spared.append(verify_chain(honest, CHAIN, points, backward=True))
    without, with_ties = (
        max(q.errors.worst for q in verdict.quantities if "input" in q.name and q.errors is not None)
        for verdict in spared
    )
    assert with_ties < without / 4


@pytest.mark.parametrize(
    ("name", "how"),
    [("max_pool2d", ((2, 2),)), ("max_pool2d", (3, 2, 1)), ("max_pool2d", (3, 2, 1, 1, True)), ("max_pool3d", (2,))],
)
def test_how_far_the_largest_is_ahead(name: str, how: tuple[object, ...]) -> None:
    shape = (2, 3, 7, 8) if name.endswith("2d") else (2, 3, 4, 6, 5)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pool = getattr(torch, name)
    values, places = getattr(F, f"{name}_with_indices")(x, *how)
    gap = ahead_of_the_second(name, (x, *how), {})
    assert gap is not None
    assert gap.shape == values.shape
    # Without its own largest, a window's second is what PyTorch finds.
    flat, first = x.flatten(2).clone(), (0,) * (values.dim() - 2)
    flat[0, 0, places[(0, 0, *first)]] = -torch.inf
    second = pool(flat.view(shape), *how)[(0, 0, *first)]
    torch.testing.assert_close(gap[(0, 0, *first)], values[(0, 0, *first)] - second)
    assert ahead_of_the_second(name, (x, 1), {}) is None
    assert ahead_of_the_second(name, (x, 2, 2, 0, 2), {}) is None
