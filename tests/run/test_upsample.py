"""The gradient of upsampling against PyTorch's, the operator in autograd, and the graphs that hold it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table

import postlude
from postlude.graph import upsample as graphs
from postlude.plan.problem import CHANNELS_LAST, Layout
from postlude.plan.upsample import Upsampling
from postlude.run import upsample as operators
from postlude.run.upsample import by_pytorch, text_of

pytestmark = pytest.mark.interpret

WAYS = {
    "trilinear by 2": Upsampling((2, 3, 4), (4, 6, 8), True),
    "trilinear, corners aligned": Upsampling((2, 3, 4), (5, 6, 9), True, aligns_corners=True),
    "trilinear by given factors": Upsampling((2, 3, 4), (4, 6, 8), True, factors=(2.0, 2.0, 2.0)),
    "trilinear, one axis as it was": Upsampling((3, 2, 2), (3, 4, 4), True),
    "trilinear to odd sizes": Upsampling((3, 4, 5), (7, 9, 13), True),
    "bilinear by 2": Upsampling((5, 4), (10, 8), True),
    "bilinear by 8": Upsampling((2, 3), (16, 24), True),
    "nearest by 2": Upsampling((2, 3, 4), (4, 6, 8), False),
    "nearest to odd sizes": Upsampling((3, 4, 5), (7, 9, 13), False),
    "nearest by 3": Upsampling((4, 5), (12, 15), False),
    "nearest-exact": Upsampling((3, 4), (7, 9), False, is_exact=True),
}


@pytest.fixture
def short_reach(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mutant: the last of the results that read a position is forgotten."""
    honest = Upsampling._reach
    operators._runner.cache_clear()
    monkeypatch.setattr(Upsampling, "_reach", lambda self, scale: honest(self, scale) - (scale < 1))
    yield
    operators._runner.cache_clear()


def gradients(how: Upsampling, layout: Layout, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, and PyTorch's in float64."""
    form = CHANNELS_LAST[len(how.small)] if layout == "channels_last" else torch.contiguous_format
    torch.manual_seed(0)
    dy = torch.randn(2, channels, *how.large).contiguous(memory_format=form)
    ours = torch.ops.postlude.upsample_gradient(dy, text_of(how), layout)
    x = torch.zeros(2, channels, *how.small, dtype=torch.float64, requires_grad=True)
    (truth,) = torch.autograd.grad(by_pytorch(x, how), x, dy.double())
    assert ours.is_contiguous(memory_format=form)
    return ours, truth


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", WAYS)
def test_gradient_is_pytorchs(name: str, layout: Layout) -> None:
    ours, truth = gradients(WAYS[name], layout)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 8), st.integers(0, 8), st.sampled_from(["linear", "corners", "near", "exact"]))
def test_any_size_up_to_eight_times_larger(small: int, times: int, more: int, kind: str) -> None:
    large = min(small * times + more, small * 8)
    how = Upsampling((1, small), (1, large), kind in ("linear", "corners"), kind == "corners", kind == "exact")
    if how.is_served:
        ours, truth = gradients(how, "contiguous", 1)
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("short_reach")
def test_a_share_that_is_left_out_is_seen() -> None:
    with pytest.raises(AssertionError):
        test_gradient_is_pytorchs("bilinear by 8", "channels_last")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of PyTorch's own check
@pytest.mark.parametrize("name", ["trilinear by 2", "nearest by 2"])
def test_operator_is_differentiable_twice_and_declared_right(name: str) -> None:
    how = WAYS[name]
    x = torch.randn(1, 2, *how.small, dtype=torch.float64, requires_grad=True)
    text = text_of(how)
    y = torch.ops.postlude.upsample(x, text)
    torch.testing.assert_close(y, by_pytorch(x, how))
    dy = torch.randn_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    (ddy,) = torch.autograd.grad(dx, dy, torch.ones_like(dx))
    torch.testing.assert_close(ddy, by_pytorch(torch.ones_like(x), how))
    single = torch.randn(dy.shape, requires_grad=True)
    torch.library.opcheck(torch.ops.postlude.upsample_gradient.default, (single, text, "contiguous"))


@pytest.mark.parametrize("name", WAYS)
def test_compilers_take_the_forward_pass_apart(name: str) -> None:
    """Else it remains a call of a library's kernel, which fuses with nothing."""
    how, graphs = WAYS[name], []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = aot_function(
        lambda x: torch.ops.postlude.upsample(x, text_of(how)), keep, decompositions=select_decomp_table()
    )
    compiled(torch.randn(1, 2, *how.small, requires_grad=True))
    targets = [str(node.target) for node in graphs[0].graph.nodes if "upsample" in str(node.target)]
    assert not [target for target in targets if how.is_linear or "vec" in target]  # nearest has a lowering


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv3d(2, 4, 1), nn.Upsample(scale_factor=2, mode="trilinear")
        self.last = nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.first(x))
        return self.last(F.interpolate(y, size=(8, 8, 12), mode="nearest"))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_graph_in_training_holds_it(
    is_wrong: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    """Runs as on a GPU. If the check says that it is wrong, PyTorch's operator stays."""
    monkeypatch.setattr(graphs, "_is_served", lambda x, how: how.is_served)
    if is_wrong:
        request.getfixturevalue("short_reach")
    plain, x = Decoder(), torch.randn(1, 2, 2, 2, 3)
    model = copy.deepcopy(plain)
    result = postlude.optimize(model, x, rest="eager")
    assert result.gathered == (() if is_wrong else ("up", "upsample_nearest3d"))
    assert ("wrong" in caplog.text) == is_wrong
    grads = [torch.autograd.grad(one(x).square().sum(), list(one.parameters())) for one in (model, plain)]
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.compiler.reset()
        assert postlude.optimize(copy.deepcopy(plain), x, rest="eager").gathered == ()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("rest", ["eager", "inductor"])
def test_a_batch_of_another_size_is_pytorchs(rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second size on, the batch is a symbol of the graph."""
    monkeypatch.setattr(graphs, "_is_served", lambda x, how: how.is_served)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward)
    plain = Decoder()
    model = copy.deepcopy(plain)
    result = postlude.optimize(model, torch.randn(2, 2, 2, 2, 3), rest=rest)
    for batch in (3, 4):
        x = torch.randn(batch, 2, 2, 2, 3)
        grads = [torch.autograd.grad(one(x).square().sum(), list(one.parameters())) for one in (model, plain)]
        for ours, theirs in zip(*grads):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert [captured.gathered for captured in result.backend.captured] == [("up", "upsample_nearest3d"), ()]
