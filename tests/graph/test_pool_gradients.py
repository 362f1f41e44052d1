"""Which max pools of a graph have a gathered gradient, and that a network with one trains as before."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import postlude
from postlude.graph import backend, fusion

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]
POOLS = {
    "side by side": (nn.MaxPool3d(2), True),
    "a window for each axis": (nn.MaxPool3d((1, 2, 2), (1, 2, 2)), True),
    "overlapping": (nn.MaxPool3d(3, 2, 1), False),
    "with gaps": (nn.MaxPool3d(2, 3), False),
    "padded": (nn.MaxPool3d(2, 2, 1), False),
    "dilated": (nn.MaxPool3d(2, 2, dilation=2), False),
    "partly outside": (nn.MaxPool3d(2, ceil_mode=True), False),
}


@pytest.fixture(autouse=True)
def targets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operators that Inductor is given; the CPU's pools count as a GPU's."""
    seen: list[Any] = []

    def compile_fx(graph: torch.fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    gather = functools.partial(fusion.gather_pool_gradients, device="cpu")
    monkeypatch.setattr(fusion, "gather_pool_gradients", gather)
    return seen


@pytest.mark.parametrize("name", POOLS)
def test_a_network_trains_as_before(name: str, targets: list[Any]) -> None:
    pool, is_gathered = POOLS[name]
    plain, x = nn.Sequential(nn.Conv3d(2, 3, 3), pool, nn.Conv3d(3, 2, 1)).double(), torch.randn(2, 2, 8, 9, 7).double()
    model = copy.deepcopy(plain)
    postlude.optimize(model, x, rest="inductor", verify=False)
    found = []
    for one in (model, plain):
        y = one(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(one.parameters()))])
    torch.testing.assert_close(*found)
    assert (torch.ops.postlude.max_pool3d.default in targets) == is_gathered


def test_inference_keeps_pytorchs(targets: list[Any]) -> None:
    model, x = nn.Sequential(nn.Conv3d(2, 3, 3), nn.MaxPool3d(2)), torch.randn(2, 2, 6, 6, 6)
    with torch.no_grad():
        expected = model(x)
        postlude.optimize(model, x, rest="inductor", verify=False)
        torch.testing.assert_close(model(x), expected)
    assert torch.ops.aten.max_pool3d.default in targets
    assert torch.ops.postlude.max_pool3d.default not in targets


def test_symbolic_sizes_keep_pytorchs(targets: list[Any]) -> None:
    """Which positions no window covers would be a guard, and sizes of the other kind would be compiled again."""
    model = nn.Sequential(nn.Conv3d(2, 3, 1), nn.MaxPool3d(2))
    torch.compile(model, backend=backend.Backend(rest="inductor"), dynamic=True)(torch.randn(2, 2, 6, 8, 10))
    assert torch.ops.aten.max_pool3d.default in targets
