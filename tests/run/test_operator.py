"""The registered operator: PyTorch's own checks of it, and models that compile through it without a break."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import postlude.run.site  # noqa: F401  registers the operators
from cases import BY_NAME
from postlude import reference
from postlude.check import tensors_for
from postlude.nn import FusedChain, Mean

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
MODULES = {
    "23": lambda: (nn.Conv3d(3, 8, 3), nn.GroupNorm(4, 8), Mean()),
    "61": lambda: (nn.ConvTranspose3d(3, 8, 3), nn.ReLU(), nn.GroupNorm(4, 8)),
    "2-D": lambda: (nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.1)),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of PyTorch's own check
def test_pytorchs_own_checks_of_an_operator() -> None:
    case = BY_NAME["conv mul norm clamp mul max"]
    tensors = [t.requires_grad_() for t in tensors_for(case.chain, case.shape, torch.float64)]
    torch.library.opcheck(torch.ops.postlude.chain.default, (tensors, [], case.chain.dumps()))


@pytest.mark.parametrize("name", ["61 small", "23 small", "conv norm residual relu", "conv mul norm clamp mul max"])
def test_gradients_are_autograds(name: str) -> None:
    case = BY_NAME[name]
    tensors = [t.requires_grad_() for t in tensors_for(case.chain, case.shape, torch.float64)]
    tensors[1].requires_grad_(False)
    wanted = [t for t in tensors if t.requires_grad]
    truth = reference.evaluate(case.chain, tensors)
    ours = torch.ops.postlude.chain(tensors, [], case.chain.dumps())
    dy = torch.randn_like(truth)
    expected = torch.autograd.grad(truth, wanted, dy)
    for found, true in zip(torch.autograd.grad(ours, wanted, dy), expected, strict=True):
        torch.testing.assert_close(found, true)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_a_fused_chain_compiles_without_a_break_and_gives_the_same(name: str, grad: bool) -> None:
    torch.manual_seed(0)
    modules = MODULES[name]()
    fused, plain = FusedChain(*modules), nn.Sequential(*modules)
    x = torch.randn(2, 3, *[9, 8, 10][: 2 if name == "2-D" else 3], requires_grad=grad)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        results: list[Tensor] = [compiled(x), fused(x), plain(x)]
    for y in results[:2]:
        torch.testing.assert_close(y, results[2], rtol=1e-4, atol=1e-5)
    if grad:
        wanted = [x, *fused.parameters()]
        dy = torch.randn_like(results[2])
        ours, _, theirs = (torch.autograd.grad(y, wanted, dy) for y in results)
        for found, true in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, true, rtol=1e-3, atol=1e-4)


def test_a_chain_of_nothing_is_named() -> None:
    with pytest.raises(Exception, match="neither a convolution nor a norm"):
        torch.compile(FusedChain(nn.ReLU()), fullgraph=True, backend="aot_eager")(torch.ones(2, 3, 4, 4))


def test_autocast_outside_changes_nothing_of_it() -> None:
    """The chain's dtypes are part of it: what a tracer is told, the result and the gradients."""
    case = BY_NAME["conv norm residual relu"]
    text, tensors = case.chain.dumps(), [t.requires_grad_() for t in tensors_for(case.chain, case.shape, torch.float32)]
    y = torch.ops.postlude.chain(tensors, [], text)
    expected = [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.ops.postlude.chain(tensors, [], text)
        found = [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]
        with FakeTensorMode() as mode:
            told = torch.ops.postlude.chain([mode.from_tensor(t) for t in tensors], [], text)
    assert told.dtype == y.dtype
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_an_operator_that_autocast_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: autocast left on."""
    monkeypatch.setattr("postlude.run.site.call", lambda runner, tensors: runner(tensors))
    with pytest.raises(AssertionError):
        test_autocast_outside_changes_nothing_of_it()
