"""Autocast's cast before a convolution belongs to the chain that made the value; kernels interpreted."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import postlude
from gpu_plans import planned_for_a_gpu
from postlude.graph import casts

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def is_narrowed(x: torch.fx.Node, dtype: torch.dtype) -> bool:
        return x.op == "call_function" and x.meta["val"].dtype == torch.float32 and dtype.itemsize == 2

    monkeypatch.setattr(casts, "_is_narrowed", is_narrowed)
    with planned_for_a_gpu():
        yield


class Net(nn.Module):
    """`float` stands for what CUDA's autocast does before a norm."""

    def __init__(self, has_skip: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.second, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.has_skip = has_skip

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x).float()))
        z = torch.relu(self.last(self.second(y).float()))
        return torch.cat([y, z], 1) if self.has_skip else z


@pytest.mark.parametrize("has_skip", [False, True])
def test_the_cast_is_the_last_step_unless_somebody_else_reads_the_value(has_skip: bool) -> None:
    torch.manual_seed(0)
    plain, x = Net(has_skip), torch.randn(2, 4, 5, 5)
    model = copy.deepcopy(plain)
    with torch.autocast("cpu", torch.float16):
        result = postlude.optimize(model, x, verify=False, rest="eager")
        first, second = result.sites
        assert str(first.chain).endswith("relu" if has_skip else "relu → to float16")
        assert (first.is_fused, second.is_fused) == (True, True)
        assert second.problem is not None
        assert second.problem.x.dtype == "float16"
        results = [one(x) for one in (model, plain)]
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
    grads = [torch.autograd.grad(y.square().mean(), list(m.parameters())) for y, m in zip(results, (model, plain))]
    for ours, theirs in zip(*grads):
        assert float((ours - theirs).norm()) <= 1e-2 * float(theirs.norm()) + 1e-6


class Fork(nn.Module):
    """Two convolutions read one value, as a block of a ResNet and its shortcut do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.block, self.shortcut = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x).float()))
        return self.block(y) + self.shortcut(y)


@pytest.mark.parametrize("trains", [False, True])
def test_a_value_is_cast_once_unless_gradients_are_added_behind_the_casts(trains: bool) -> None:
    torch.manual_seed(0)
    plain, x = Fork(), torch.randn(2, 4, 5, 5)
    model = copy.deepcopy(plain)
    with torch.autocast("cpu", torch.float16), torch.set_grad_enabled(trains):
        result = postlude.optimize(model, x, verify=False, rest="eager")
        (site,) = (site for site in result.sites if site.name == "first")
        assert site.is_fused
        assert str(site.chain).endswith("relu" if trains else "relu → to float16")
        torch.testing.assert_close(model(x), plain(x), rtol=2e-2, atol=2e-2)
