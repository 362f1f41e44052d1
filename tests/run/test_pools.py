"""Pools behind chains, by Triton's interpreter: values, what is not finite, ties, gradients."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import BY_NAME, Builder, conv
from postlude import reference
from postlude.chain import Chain
from postlude.check import chain_points, tensors_for, verify_chain
from postlude.plan import Plan, lower, problem_of
from postlude.run import execute
from postlude.run.compose import HEADER, compose
from postlude.windows import Windows
from run.test_channels import trained
from run.test_gpu import CARD, fused, library_convolution
from run.test_training import gradients
from tracing import kernel_calls, program_of

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
library_convolution = library_convolution
LAYOUTS = ["contiguous", "channels_last"]
POOLS = ["max", "avg"]


def error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-2))


def forward_error(chain: Chain, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> float:
    """The error relative to the largest number; dtype, shape and strides must be PyTorch's."""
    tensors = list(tensors_for(chain, shape, dtype, "cpu", 0, "normal", layout))  # type: ignore[arg-type]
    ours, theirs = fused(chain, tensors), reference.evaluate(chain, tensors)
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    return error(ours, reference.evaluate(chain, tensors, dtype=torch.float64))


def gradient_error(chain: Chain, shape: tuple[int, ...], layout: str, memory: str = "default") -> float:
    drawn = tensors_for(chain, shape, torch.float64, "cpu", 0, "normal", layout)  # type: ignore[arg-type]
    tensors = [t.requires_grad_(slot not in chain.moved) for slot, t in enumerate(drawn)]
    truth = gradients(lambda ts: reference.evaluate(chain, ts), tensors)
    ours = gradients(trained(chain, tensors, memory), tensors)
    return max(error(one.detach(), true.detach()) for one, true in zip(ours, truth, strict=True))


@pytest.mark.parametrize(
    ("name", "layout"), [("conv norm relu max_pool", LAYOUTS[0]), ("conv mul max_pool clamp", LAYOUTS[1])]
)
@pytest.mark.usefixtures("poisoned_memory", "library_convolution")
def test_is_right_by_the_rule(name: str, layout: str) -> None:
    case = BY_NAME[name]
    points = chain_points(case.chain, case.shape, torch.float32, "cpu", 2, layout)  # type: ignore[arg-type]
    verdict = verify_chain(fused, case.chain, points)
    assert verdict.right, verdict


@st.composite
def pooled(draw: st.DrawFn) -> tuple[Chain, tuple[int, ...], str]:
    """Any windows that PyTorch takes, on sizes that they do not divide."""
    dims = draw(st.sampled_from((2, 3)))
    kernel = tuple(draw(st.integers(1, 4 if dims == 2 else 3)) for _ in range(dims))
    stride = tuple(draw(st.integers(1, size)) for size in kernel)
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel)
    op, ceil = draw(st.sampled_from(POOLS)), draw(st.booleans())
    space = tuple(size + draw(st.integers(0, 7)) for size in kernel)
    builder = Builder(dims).norm(draw(st.sampled_from((1, None))))
    if draw(st.booleans()):
        builder = builder.op("silu").op("mul", "channel")
    counts, divisor = draw(st.booleans()), draw(st.sampled_from((None, 3))) if op == "avg" else None
    builder = builder.pool(op, kernel, stride, padding, ceil=ceil, counts_padding=counts, divisor=divisor)
    chain = builder.op("tanh").op("add", "channel").chain() if draw(st.booleans()) else builder.chain()
    return chain, (2, draw(st.sampled_from((1, 3, 20))), *space), draw(st.sampled_from(LAYOUTS))


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(pooled())
def test_any_windows_forward_and_backward(drawn: tuple[Chain, tuple[int, ...], str]) -> None:
    chain, shape, layout = drawn
    note(f"{chain} {shape} {layout}")
    assert forward_error(chain, shape, torch.float64, layout) < 1e-12
    assert gradient_error(chain, shape, layout) < 1e-9


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", POOLS)
@pytest.mark.usefixtures("poisoned_memory")
def test_after_our_own_convolution(op: str, layout: str) -> None:
    for built in (Builder(2, conv(2, (3, 6))).op("relu"), Builder(2, conv(2, (3, 6)))):
        chain = built.pool(op, 2).op("add", "channel").chain()
        assert forward_error(chain, (2, 3, 7, 8), torch.float64, layout) < 1e-13


@pytest.mark.parametrize("memory", ["default", "lean"])
@pytest.mark.parametrize("op", POOLS)
@pytest.mark.usefixtures("library_convolution")
def test_gradients_behind_a_convolution(op: str, memory: str) -> None:
    for built in (
        Builder(2, conv(2, (2, 4))).norm(2).op("silu").op("mul", "channel").pool(op, 2).op("tanh"),
        Builder(2, conv(2, (2, 4))).op("add", "full").op("silu").pool(op, 3, 2, 1),
        Builder(2, conv(2, (2, 4))).pool(op, 2),
    ):
        assert gradient_error(built.chain(), (2, 2, 7, 6), "contiguous", memory) < 1e-9


def test_gradients_are_packed_behind_a_pool() -> None:
    """In the kernel that writes both products' operand."""
    chain = Builder(2, conv(2, (8, 16), padding=1)).norm(2).op("silu").pool("max", 2).chain()
    tensors = [t.requires_grad_() for t in tensors_for(chain, (1, 8, 6, 32), torch.float16)]
    problem = dataclasses.replace(problem_of(tensors), device="cuda", needs_grad=True)
    plan = lower(chain, problem, CARD, even_if_slower=True)
    assert isinstance(plan, Plan)
    assert plan.gradients.are_packed
    calls = kernel_calls(program_of(plan, tensors, [True] * len(tensors)).backward)
    assert any(call.kernel == "packed_gradient_kernel" for call in calls)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    truth = gradients(lambda ts: reference.evaluate(chain, ts), exact)
    for ours, true in zip(gradients(execute.prepare(chain, plan), tensors), truth, strict=True):
        assert error(ours.detach(), true.detach()) < 0.1


WINDOWS = [
    [1.0, 2.0, math.nan, 0.0],
    [math.nan, 1.0, math.inf, 3.0],
    [-math.inf] * 4,
    [math.inf, -math.inf, 1.0, 2.0],
    [-math.inf, -2.0, -3.0, -math.inf],
    [0.0, -0.0, 0.0, -0.0],
]


def follows_pytorch(op: str, layout: str = "contiguous", padding: int = 0) -> bool:
    """On windows with NaN and infinities, side by side."""
    rows = torch.tensor(WINDOWS).view(-1, 2, 2)
    x = torch.cat(list(rows), 1)[None, None].repeat(1, 3, 1, 1)  # [1, 3, 2, 12]
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x
    chain = Builder(2).op("add", 0.0).pool(op, 2, 2, padding).chain()
    return bool(fused(chain, [x]).isclose(reference.evaluate(chain, [x]), equal_nan=True).all())


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", POOLS)
def test_nan_and_infinities_are_pytorchs(op: str, layout: str, padding: int) -> None:
    assert follows_pytorch(op, layout, padding)


def tied(chain: Chain, seed: int) -> float:
    """The gradients' error on integer inputs, many of them equal: gradients must go where PyTorch's go."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 2, (2, 3, 7, 8), generator=generator).double().requires_grad_()
    truth = gradients(lambda ts: reference.evaluate(chain, ts), [x])
    return max(error(o.detach(), t.detach()) for o, t in zip(gradients(trained(chain, [x]), [x]), truth, strict=True))


TIED = [Builder(2).op("mul", 1.0).op("pow", exponent=2).pool("max", *sizes).chain() for sizes in ((2,), (3, 2, 1))]


@pytest.mark.parametrize("chain", TIED, ids=str)
def test_of_equal_ones_the_first_gets_the_gradient(chain: Chain) -> None:
    assert tied(chain, 0) < 1e-12


def with_mutant(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, *names: str) -> None:
    module = importlib.import_module("postlude.kernels.triton.pools")
    source = Path(str(module.__file__)).read_text()
    assert source.count(right) == 1
    made = compose(HEADER + source.replace(right, wrong))
    for name in names:
        monkeypatch.setattr(module, name, made[name])
    compose.cache_clear()


@pytest.fixture(autouse=True)
def _composed_anew() -> object:
    """Composed functions hold the device functions that they were made with."""
    yield
    compose.cache_clear()


def test_a_lost_nan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with_mutant(monkeypatch, '(b_x > b_y) | ~(b_x <= float("inf"))', "b_x > b_y", "pools_kernel")
    assert not follows_pytorch("max")


def test_the_last_of_equal_ones_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with_mutant(monkeypatch, "(b_x > b_y) | ", "(b_x >= b_y) | ", "pools_kernel")
    assert tied(TIED[0], 0) > 1e-3


def test_a_wrong_window_of_the_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: only the last of the windows that a position is in."""
    with_mutant(monkeypatch, "o_w = x // STRIDE_W - i_x", "o_w = x // STRIDE_W", "pool_gradient")
    chain = Builder(2).norm(1).pool("avg", 3, 2).chain()
    assert gradient_error(chain, (1, 2, 7, 9), "contiguous") > 1e-2


def test_a_border_that_counts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with_mutant(monkeypatch, "tl.minimum(end, SIZE) - tl.maximum(first, 0)", "end - first", "pools_kernel")
    chain = Builder(2).norm(1).pool("avg", 3, 2, 1, counts_padding=False).chain()
    assert forward_error(chain, (1, 2, 7, 9), torch.float64, "contiguous") > 1e-2


@pytest.mark.parametrize(("first", "second"), [*itertools.product(((2, 2), (3, 2), (3, 3)), ((2, 2), (3, 1), (2, 3)))])
def test_two_pools_are_one(first: tuple[int, int], second: tuple[int, int]) -> None:
    """The largest of the largest, bit for bit and with NaN; the mean of means over windows that do not overlap."""
    before, after = (Windows(*((size,) * 2 for size in pair), (0, 0)) for pair in (first, second))
    x = torch.randn(2, 3, 19, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x[0, 0, 4, 5], x[1, 2, 9, 9], x[1, 1, 0, 0] = math.nan, math.inf, -math.inf
    both = before.joined(after, may_overlap=True)
    assert both is not None
    twice = torch.max_pool2d(torch.max_pool2d(x, *first), *second)
    torch.testing.assert_close(torch.max_pool2d(x, both.kernel, both.stride), twice, rtol=0, atol=0, equal_nan=True)
    even = before.joined(after, may_overlap=False)
    assert (even is None) == (first[0] != first[1])
    if even is not None:
        mean = torch.nn.functional.avg_pool2d
        torch.testing.assert_close(
            mean(x, even.kernel, even.stride), mean(mean(x, *first), *second), rtol=1e-13, atol=1e-13, equal_nan=True
        )


def test_what_is_not_one_pool() -> None:
    plain, padded = Windows((2, 2), (2, 2), (0, 0)), Windows((2, 2), (2, 2), (1, 1))
    assert plain.joined(padded, may_overlap=True) is None
    assert padded.joined(plain, may_overlap=True) is None
    assert dataclasses.replace(plain, is_ceil=True).joined(plain, may_overlap=True) is None
    assert Windows((1, 1), (2, 2), (0, 0)).joined(plain, may_overlap=True) is None
