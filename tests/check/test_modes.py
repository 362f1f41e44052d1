"""A mode's own error is operand rounding and nothing else, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mutants
from postlude.chain import Chain
from postlude.check.modes import RoundedOperands, has_no_convolution, pytorch_switches, resolve
from postlude.check.points import tensors_for
from postlude.errors import PrecisionError
from postlude.reference import evaluate, round_to_format

CPU = torch.device("cpu")
FORMATS = ["tf32", "float16", "bfloat16"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("chain", [mutants.CHAIN_61, mutants.CHAIN_23], ids=["61", "23"])
def test_mode_agrees_with_the_reference(chain: Chain, name: str) -> None:
    tensors = tensors_for(chain, mutants.INPUT_SHAPE, torch.float64, seed=1)
    with RoundedOperands(name):
        rounded = evaluate(chain, tensors)
    assert torch.equal(rounded, evaluate(chain, tensors, rounded_to=name))
    assert not torch.equal(rounded, evaluate(chain, tensors))


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_rounded_backward_too(name: str) -> None:
    x, w, g = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 7), (3, 7), (5, 3)))
    x.requires_grad_()
    with RoundedOperands(name):
        y = F.linear(x, w)
        (grad,) = torch.autograd.grad(y, x, g)
    exact = round_to_format(g, name) @ round_to_format(w, name)
    torch.testing.assert_close(grad, exact, atol=1e-14, rtol=1e-14)
    assert float((grad - g @ w).abs().max()) > 1e-5


def test_nothing_else_is_rounded() -> None:
    x = torch.randn(50, dtype=torch.float64)
    with RoundedOperands("bfloat16"):
        inside = (x * 3, x.sum(), F.group_norm(x.view(1, 10, 5), 2))
    assert all(map(torch.equal, inside, (x * 3, x.sum(), F.group_norm(x.view(1, 10, 5), 2))))


def test_precision_words() -> None:
    assert resolve("auto", torch.float32, CPU) == "fp32"
    assert resolve("fp32", torch.bfloat16, CPU) == "bf16"  # 16-bit data runs in its own format
    assert resolve("tf32", torch.float32, CPU) == "tf32"
    with pytest.raises(PrecisionError, match="unknown precision 'half'"):
        resolve("half", torch.float32, CPU)


@pytest.mark.parametrize(("precision", "word"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_switches_are_set_and_put_back(precision: str, word: str) -> None:
    switches = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    with pytorch_switches(precision, torch.device("cuda")):
        assert [switch.fp32_precision for switch in switches] == [word, word]
    assert [switch.fp32_precision for switch in switches] == before
    with pytorch_switches(precision, CPU):
        assert [switch.fp32_precision for switch in switches] == before


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "fp32"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)), "tf32"),
        (nn.ParameterDict({"weight": nn.Parameter(torch.ones(4, 3, 3, 3))}), "tf32"),  # F.conv2d
        (nn.ParameterDict({"bias": nn.Parameter(torch.ones(1, 8, 1, 1))}), "fp32"),
    ],
)
def test_products_follow_their_own_switch(model: nn.Module, expected: str) -> None:
    """PyTorch's defaults: convolutions in TF32, matrix products in IEEE fp32. A budget for TF32 would let a product of
    rounded operands pass where PyTorch's is exact."""
    assert resolve("auto", torch.float32, torch.device("cuda"), has_no_convolution(model)) == expected
