"""Every way of writing a word comes out as that word, with PyTorch's numbers and gradients to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from postlude import reference
from postlude.graph.backend import Backend
from postlude.graph.capture import capture_function
from postlude.graph.match import Declined, Match, match
from postlude.graph.tidy import functionalise

N, C = 2, 4
VECTOR, ONE, ROW, FULL = (
    torch.rand(C, 1, 1) + 0.5,
    torch.tensor([0.7]),
    torch.randn(N, C, 1, 1),
    torch.randn(N, C, 5, 6),
)
CONV = nn.Conv2d(C, C, 3, padding=1)
Body = Callable[[Tensor], Tensor]

# The line of the chain after its convolution → the ways to write it.
SPELLINGS: dict[str, list[Body]] = {
    "relu": [nn.ReLU(), F.relu, Tensor.relu, torch.relu_],
    "hardtanh(0, 6)": [nn.ReLU6(), F.relu6, lambda x: F.relu6(x, inplace=True), nn.Hardtanh(0.0, 6.0)],
    "hardtanh": [nn.Hardtanh(), F.hardtanh, F.hardtanh_],
    "clamp_min(0)": [lambda x: x.clamp(min=0), lambda x: torch.clamp_min(x, 0), lambda x: x.clip(0.0)],
    "clamp_max(0.5)": [lambda x: x.clamp(max=0.5), lambda x: x.clamp_max(0.5), lambda x: x.clamp_(max=0.5)],
    "clamp(-1, 0.5)": [lambda x: x.clamp(-1, 0.5), lambda x: torch.clip(x, -1, 0.5)],
    "leaky_relu(0.2)": [nn.LeakyReLU(0.2), lambda x: F.leaky_relu(x, 0.2)],
    "elu": [nn.ELU(), F.elu, F.elu_, lambda x: F.celu(x, 1.0)],
    "elu(0.5)": [nn.ELU(0.5), lambda x: F.elu(x, 0.5)],
    "elu(0.5, 1, 2)": [nn.CELU(0.5), lambda x: F.celu(x, 0.5)],
    "elu(1.67326, 1.0507)": [nn.SELU(), torch.selu],
    "silu": [nn.SiLU(), F.silu],
    "gelu": [nn.GELU(), F.gelu],
    "gelu(tanh)": [nn.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")],
    "mish": [nn.Mish(), F.mish, nn.Mish(inplace=True)],
    "hardswish": [nn.Hardswish(), F.hardswish],
    "hardsigmoid": [nn.Hardsigmoid(), F.hardsigmoid],
    "softplus": [nn.Softplus(), F.softplus],
    "softplus(2, 10)": [nn.Softplus(2, 10), lambda x: F.softplus(x, 2, 10)],
    "tanh": [nn.Tanh(), torch.tanh, Tensor.tanh_, F.tanh],
    "sigmoid": [nn.Sigmoid(), torch.sigmoid, F.sigmoid, Tensor.sigmoid_],
    "abs": [torch.abs, abs, Tensor.absolute],
    "abs → sqrt": [lambda x: x.abs().sqrt()],
    "pow(2)": [lambda x: x**2, torch.square, lambda x: torch.pow(x, 2.0), lambda x: x.pow_(2)],
    "pow(3)": [lambda x: x**3, lambda x: x.pow(3)],
    "reciprocal": [torch.reciprocal, lambda x: x.reciprocal_()],
    "reciprocal → mul(2)": [lambda x: 2 / x],
    "detach": [Tensor.detach],
    "add(2)": [lambda x: x + 2, lambda x: 2 + x, lambda x: x.add_(2), lambda x: torch.add(x, 1, alpha=2)],
    "add(tensor)": [lambda x: x + FULL, lambda x: FULL + x, lambda x: torch.add(FULL, x)],
    "add(per sample and channel)": [lambda x: x + ROW, lambda x: ROW + x, lambda x: x.add_(ROW)],
    "sub(2)": [lambda x: x - 2, lambda x: torch.subtract(x, 2), lambda x: x.sub_(2)],
    "sub(6)": [lambda x: torch.sub(x, 2, alpha=3)],
    "rsub(2)": [lambda x: 2 - x, lambda x: torch.rsub(x, 2)],
    "sub(per channel)": [lambda x: x - VECTOR, lambda x: x - VECTOR[None]],
    "rsub(per channel)": [lambda x: VECTOR - x, lambda x: torch.rsub(x, VECTOR)],
    "mul(2)": [lambda x: x * 2, lambda x: 2 * x, lambda x: torch.multiply(x, 2), lambda x: x.mul_(2)],
    "mul(-1)": [lambda x: -x, torch.neg, torch.negative],
    "mul(per sample and channel)": [lambda x: x * ROW, lambda x: ROW * x],
    "mul(one number)": [lambda x: x * ONE, lambda x: ONE * x, lambda x: x * ONE[0], lambda x: x * ONE.view(1, 1, 1, 1)],
    "div(2)": [lambda x: x / 2, lambda x: torch.true_divide(x, 2), lambda x: x.div_(2), lambda x: torch.divide(x, 2)],
    "div(per channel)": [lambda x: x / VECTOR, lambda x: torch.div(x, VECTOR)],
    "rdiv(per channel)": [lambda x: VECTOR / x, lambda x: torch.div(VECTOR, x)],
    "maximum(one number)": [
        lambda x: torch.maximum(x, ONE),
        lambda x: torch.max(ONE, x),
        lambda x: torch.max(x, torch.tensor(0.25)),
    ],
    "minimum(per channel)": [lambda x: torch.minimum(VECTOR, x), lambda x: torch.min(x, VECTOR)],
    "prelu(per channel)": [nn.PReLU(C), lambda x: F.prelu(x, VECTOR.view(-1))],
    "prelu(one number)": [nn.PReLU(), lambda x: F.prelu(x, ONE)],
    "batch_norm(per channel)": [nn.BatchNorm2d(C).eval()],
    "batch_norm(0.1, per channel, 1, 0)": [nn.BatchNorm2d(C, eps=0.1, affine=False).eval()],
    "batch_norm(batch)": [
        nn.BatchNorm2d(C),
        nn.BatchNorm2d(C, affine=False, track_running_stats=False).eval(),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.batch_norm(x, torch.zeros(C), torch.ones(C), training=True),
    ],
    "layer_norm over the last axis": [nn.LayerNorm(6), lambda x: F.layer_norm(x, (6,)), nn.LayerNorm(6, bias=False)],
    "layer_norm over the last 2 axes": [nn.LayerNorm((5, 6)), lambda x: F.layer_norm(x, x.shape[2:])],
    "layer_norm over the last 3 axes": [nn.LayerNorm((C, 5, 6), elementwise_affine=False)],
    "adaptive_avg_pool over space": [nn.AdaptiveAvgPool2d(1), lambda x: F.adaptive_avg_pool2d(x, (1, 1))],
    "mean over space": [lambda x: x.mean((2, 3)), lambda x: x.mean((-2, -1), keepdim=True)],
    "logsumexp over channels": [lambda x: torch.logsumexp(x, dim=1), lambda x: x.logsumexp((-3,), keepdim=True)],
    "softmax over channels": [nn.Softmax(1), lambda x: torch.softmax(x, -3), lambda x: F.softmax(x, dim=1)],
    "log_softmax over channels → mul(2)": [lambda x: F.log_softmax(x, 1) * 2.0],
    "normalize over channels": [lambda x: F.normalize(x), lambda x: F.normalize(x, dim=-3, eps=1e-5)],
    "normalize over channels → mul(2) → mul(per channel) → silu": [
        lambda x: F.silu(F.normalize(x, dim=1) * 2.0 * VECTOR),
    ],
    "mean over channels": [lambda x: x.mean(1), lambda x: torch.mean(x, (1,), keepdim=True)],
    "sum over channels → gelu": [lambda x: F.gelu(x.sum(1))],
    "min over channels → tanh → sub(one number)": [
        lambda x: torch.tanh(torch.min(x, dim=1, keepdim=True)[0]) - ONE,
    ],
    "amax over channels": [lambda x: x.amax(1), lambda x: torch.amax(x, (1,), keepdim=True)],
    "amin over channels": [lambda x: x.amin(1), lambda x: torch.amin(x, dim=-3)],
    "max over channels": [
        lambda x: torch.max(x, dim=1)[0],
        lambda x: x.max(1, keepdim=True).values,
    ],
    "min over channels": [lambda x: torch.min(x, 1)[0], lambda x: x.min(dim=-3).values],
    "max_pool(2)": [nn.MaxPool2d(2), lambda x: F.max_pool2d(x, 2, 2), lambda x: torch.max_pool2d(x, (2, 2))],
    "max_pool(3, s2, p1)": [nn.MaxPool2d(3, 2, 1), lambda x: F.max_pool2d(x, 3, stride=2, padding=1)],
    "max_pool(2×3, s1×2, p1, ceil)": [nn.MaxPool2d((2, 3), (1, 2), 1, ceil_mode=True)],
    "avg_pool(2)": [nn.AvgPool2d(2), lambda x: F.avg_pool2d(x, (2, 2), count_include_pad=False)],
    "avg_pool(3, s2, p1, without padding)": [nn.AvgPool2d(3, 2, 1, count_include_pad=False)],
    "avg_pool(2, divided by 3)": [nn.AvgPool2d(2, divisor_override=3)],
    "relu → max_pool(2) → mul(per channel) → tanh": [lambda x: torch.tanh(F.max_pool2d(F.relu(x), 2) * VECTOR)],
    "relu → mul(value 0, value 1)": [lambda x: x * F.relu(x)],
    "tanh → sub(value 0, value 1)": [lambda x: x - torch.tanh(x)],
    "tanh → sub(value 0)": [lambda x: torch.tanh(x) - x],
    "tanh → mul(value 0, value 1)": [lambda x: x * torch.tanh(x)],
    "relu → tanh": [lambda x: torch.tanh(F.dropout(F.relu(x), 0.5, training=False))],
}
ROWS = [
    pytest.param(line, body, id=f"{line} {n}") for line, bodies in SPELLINGS.items() for n, body in enumerate(bodies)
]


def found_in(body: Body, x: Tensor) -> tuple[list[Match], list[Declined]]:
    graph = capture_function(lambda x: body(CONV(x)), [x])
    functionalise(graph)
    return match(graph)


def constants_of(found: Match, x: Tensor) -> list[Tensor]:
    """The tensors behind a match's slots: what the body closes over is a constant of the graph."""
    interpreter = torch.fx.Interpreter(found.nodes[0].graph.owning_module, garbage_collect_values=False)
    interpreter.run(x)
    return [interpreter.env[node] for node in found.tensors]


@pytest.mark.parametrize(("line", "body"), ROWS)
def test_is_understood_and_computes_what_pytorch_does(line: str, body: Body) -> None:
    for training in (False, True):
        x = torch.randn(N, C, 5, 6, requires_grad=training)
        (found,), declined = found_in(body, x)
        assert str(found.chain).removeprefix("conv2d(4→4, k3, p1) → ") == line
        assert declined == []
        theirs = body(CONV(x))
        ours = reference.evaluate(found.chain, constants_of(found, x))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert ours.stride() == theirs.stride()
        if training and theirs.requires_grad:
            weights = torch.randn_like(theirs)
            ours, theirs = (torch.autograd.grad(y, x, weights)[0] for y in (ours, theirs))
            # In place, elu takes its gradient from its result.
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if body is F.elu_ else 0.0)


DECLINED: dict[str, Body] = {
    "active dropout": lambda x: F.dropout(x, 0.5),
    "pow with the exponent 0.5": lambda x: x**0.5,
    "pow with the exponent 9": lambda x: x**9,
    "clamp with inf": lambda x: x.clamp(-1.0, float("inf")),
    "mul.Tensor with inf, which is not finite": lambda x: x * float("inf"),
    "sub with alpha=2": lambda x: torch.sub(x, FULL, alpha=2),
    "to more than one position": nn.AdaptiveAvgPool2d(2),
    "aten.max.dim whose indices are used": lambda x: torch.add(*torch.max(x, dim=1)),
    "aten.min.dim over axes [2]: only channels is supported": lambda x: torch.min(x, dim=2)[0],
    "aten.logsumexp over axes [1, 2]": lambda x: torch.logsumexp(x, (1, 2)),
    "aten.amax over axes []": lambda x: torch.amax(x),
    "aten.mean.dim over axes [2]": lambda x: x.mean(2),
    "aten.softmax.int over axis 2": lambda x: torch.softmax(x, 2),
    "a length over other axes than channels": lambda x: F.normalize(x, dim=2),
    "a length that is not what its vector is divided by": lambda x: x.norm(dim=1, keepdim=True),
    "aten.max_pool2d with a dilation": nn.MaxPool2d(2, dilation=2),
    "aten.avg_pool2d with gaps between its windows": nn.AvgPool2d(2, 3),
    "max_pool2d_with_indices is not in the vocabulary": lambda x: torch.add(*F.max_pool2d(x, 2, return_indices=True)),
    "celu with an alpha": lambda x: F.celu(x, -1.0),
    "neither full nor per channel": lambda x: x + torch.randn(N, 1, 1, 1),
    "clamp.Tensor is not in the vocabulary": lambda x: torch.clamp(x, VECTOR, VECTOR),
}


@pytest.mark.parametrize(("reason", "body"), DECLINED.items())
def test_what_is_not_understood_says_why(reason: str, body: Body) -> None:
    found, declined = found_in(body, torch.randn(N, C, 5, 6))
    assert found == []
    assert any(reason in item.reason for item in declined), declined


# Where a value is read from before the pool or beside it, the chain ends before it; so do tensors of the pooled size.
POOLED: dict[str, tuple[str, Body]] = {
    "a skip": ("relu", lambda x: (h := F.relu(x), F.interpolate(F.max_pool2d(h, 2), size=(5, 6)) + h)[1]),
    "a norm of what is pooled": ("relu", lambda x: F.max_pool2d(h := F.relu(x), 1) + F.group_norm(h, 2)),
    "a sum with what is pooled": ("relu", lambda x: F.max_pool2d(h := F.relu(x), 3, 1, 1) + h),
    "a tensor after it": ("relu → max_pool(1)", lambda x: F.max_pool2d(F.relu(x), 1) + FULL),
    "a norm after it": ("max_pool(2) → tanh", lambda x: F.group_norm(torch.tanh(F.max_pool2d(x, 2)), 2)),
    "windows of 289 positions": ("relu", lambda x: F.avg_pool2d(F.relu(x), 17, 17, 8)),
}


@pytest.mark.parametrize("name", POOLED)
def test_where_a_chain_ends_at_a_pool(name: str) -> None:
    line, body = POOLED[name]
    found, _ = found_in(body, torch.randn(N, C, 5, 6))
    assert len(found) == (2 if "norm" in name else 1)
    assert str(found[0].chain).removeprefix("conv2d(4→4, k3, p1) → ") == line


def test_a_mean_over_one_axis_that_stays_is_a_pool_of_one_window() -> None:
    x = torch.randn(N, C, 5, 6)
    (found,), _ = found_in(lambda x: torch.tanh((x * 2).mean(2, keepdim=True) + VECTOR), x)
    line = "mul(2) → avg_pool(5×1) → add(per channel) → tanh"
    assert str(found.chain).removeprefix("conv2d(4→4, k3, p1) → ") == line
    theirs = torch.tanh((CONV(x) * 2).mean(2, keepdim=True) + VECTOR)
    torch.testing.assert_close(reference.evaluate(found.chain, constants_of(found, x)), theirs)


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("relu", lambda x: F.relu(x).mean(2, keepdim=True)),  # nothing that goes through a convolution
        ("mul(2)", lambda x: (x * 2).mean(3, keepdim=True)),  # windows along rows
        ("mul(2)", lambda x: (x * 2).mean(2)),  # an axis less
        ("mul(2)", lambda x: (x * 2).sum(2, keepdim=True)),
    ],
)
def test_other_means_over_one_axis_end_a_chain(line: str, body: Body) -> None:
    (found,), _ = found_in(body, torch.randn(N, C, 5, 6))
    assert str(found.chain).removeprefix("conv2d(4→4, k3, p1) → ") == line


@pytest.mark.usefixtures("fresh_dynamo")
def test_on_a_cpu_a_chain_ends_before_the_pool() -> None:
    backend = Backend(rest="eager")
    body = nn.Sequential(CONV, nn.GroupNorm(2, C), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(N, C, 5, 6)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(body, backend=backend)(x), body(x))
    (captured,) = backend.captured
    assert [str(site.chain).rpartition("→ ")[2] for site in captured.sites] == ["relu"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(C, C, 3), nn.BatchNorm2d(C)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")
def test_running_statistics_and_the_counter_move_as_pytorchs() -> None:
    """In training the norm is one of the chain, which moves them once per step."""
    eager = Block()
    fused, backend = copy.deepcopy(eager), Backend()
    fused.compile(backend=backend)
    for _ in range(3):
        x = torch.randn(N, C, 7, 6)
        torch.testing.assert_close(fused(x), eager(x), rtol=0, atol=0)
    for ours, theirs in zip(fused.state_dict().values(), eager.state_dict().values()):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    for model in (eager, fused):
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), eager(x), rtol=0, atol=0)
    assert str(backend.captured[0].sites[0].chain).endswith("batch_norm(batch) → relu")
    assert str(backend.captured[-1].sites[0].chain).endswith("batch_norm(per channel) → relu")
