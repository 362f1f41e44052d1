"""The gradients of a convolution of few channels, compiled for the host and run thread by thread, against float64."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cuda_host.build import HostKernels
from postlude.plan.few_channels_gradient import FewChannelsGradient
from postlude.run import launch
from postlude.stages.few_channels_gradient import few_channels_gradient
from tracing import run_stage

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernel for the host"),
]
Mutant = tuple[str, str]
Run = Callable[..., tuple[Tensor | None, Tensor | None]]
TWO = FewChannelsGradient("float16", 2, depth=3, height=4, rows=2, warps=2)
ONE = dataclasses.replace(TWO, planes=1)
BFLOAT = dataclasses.replace(TWO, planes=1, operand="bfloat16")
BOTH, WEIGHT, INPUT = (True, True), (True, False), (False, True)


@dataclass(frozen=True)
class Case:
    name: str
    settings: FewChannelsGradient
    cin: int
    cout: int
    kernel: tuple[int, int, int] = (3, 3, 3)
    padding: tuple[int, int, int] = (0, 0, 0)
    space: tuple[int, int, int] = (4, 6, 7)
    dtype: torch.dtype = torch.float32
    transposed: bool = False
    last: bool = False  # channels-last input
    wanted: tuple[bool, bool] = BOTH

    @property
    def tolerance(self) -> float:
        if self.settings.planes == 2:
            return 5e-7
        return {"float16": 1e-3, "bfloat16": 8e-3}[self.settings.operand]


CASES = (
    Case("two planes, tiles in y and z", TWO, 3, 24, space=(6, 7, 8)),
    Case("two planes, weight alone", TWO, 3, 24, wanted=WEIGHT),
    Case("two planes, input alone", TWO, 3, 8, wanted=INPUT),
    Case("two planes, tiles in x, padded, channels-last", TWO, 3, 8, padding=(1, 2, 0), space=(2, 4, 70), last=True),
    Case("two planes, one channel", dataclasses.replace(TWO, programs=2), 1, 6, padding=(2, 1, 1)),
    Case("two planes, two channels", dataclasses.replace(TWO, height=6, rows=3), 2, 8, (2, 3, 4), (1, 0, 3)),
    Case("two planes, transposed", dataclasses.replace(TWO, rows=1), 4, 16, padding=(2, 2, 2), transposed=True),
    Case("two planes, 1×1×1", TWO, 3, 32, (1, 1, 1), space=(2, 5, 6)),
    Case("two planes, flat", TWO, 3, 8, (1, 3, 3), (0, 1, 1), space=(1, 9, 33)),
    Case("one plane", ONE, 3, 24, padding=(1, 1, 1), last=True),
    Case("bf16 plane of fp32", BFLOAT, 3, 8, wanted=WEIGHT),
    Case("fp16", ONE, 3, 8, padding=(0, 1, 2), dtype=torch.float16),
    Case("bf16, transposed", BFLOAT, 1, 8, padding=(2, 1, 0), dtype=torch.bfloat16, transposed=True, last=True),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(lambda: tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def on_host(built: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(case: Case, x: Tensor, w: Tensor, table: Tensor, mutant: Mutant = ("", "")) -> tuple[Tensor | None, ...]:
        def stage(x: Tensor, w: Tensor, table: Tensor) -> tuple[Tensor | None, Tensor | None]:
            needs_weight, needs_input = case.wanted
            settings = (case.padding, case.settings, case.transposed)
            return few_channels_gradient(x, w, table, *settings, needs_input, needs_weight)

        monkeypatch.setattr(launch, "cuda_kernel", lambda call, _: built(call, mutant))
        return run_stage(stage, x, w, table)

    return run


def tensors(case: Case, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, and [N, C_OUT] shifts and slopes of very different sizes."""
    x = torch.randn(batch, case.cin, *case.space).to(case.dtype)
    w = torch.randn(*((case.cin, case.cout) if case.transposed else (case.cout, case.cin)), *case.kernel)
    x = x.contiguous(memory_format=torch.channels_last_3d) if case.last else x
    sizes = 1e-6 * 10.0 ** torch.randint(-3, 3, (batch, case.cout))
    shift, slope = (torch.randn(batch, case.cout, dtype=torch.float64) * sizes for _ in range(2))
    return x, w.to(case.dtype), shift, slope


def truth(case: Case, x: Tensor, w: Tensor, shift: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dW and the table."""
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    if case.transposed:
        crop = tuple(k - 1 - p for k, p in zip(case.kernel, case.padding))
        v = F.conv_transpose3d(x, w, padding=crop)  # type: ignore[arg-type]
    else:
        v = F.conv3d(x, w, padding=case.padding)
    each = (..., None, None, None)
    dv = shift[each] + slope[each] * v.detach()
    dx, dw = torch.autograd.grad(v, [x, w], dv)
    power = 15 - torch.frexp(dv.abs().amax((2, 3, 4)).nan_to_num()).exponent
    scaled = [torch.ldexp(shift, power), torch.ldexp(slope, power), power, torch.zeros_like(shift)]
    return dx, dw, torch.stack([part.float() for part in scaled], 2)


def error(found: Tensor | None, true: Tensor) -> float:
    return 0.0 if found is None else float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_are_right_to_rounding(case: Case, on_host: Run) -> None:
    given = tensors(case)
    dx, dw, table = truth(case, *given)
    found = on_host(case, *given[:2], table)
    assert (found[1] is not None, found[0] is not None) == case.wanted
    assert max(error(found[0], dx), error(found[1], dw)) < case.tolerance, (error(found[0], dx), error(found[1], dw))
    if found[0] is not None:
        assert (found[0].dtype, found[0].stride()) == (given[0].dtype, given[0].stride())


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12])
def test_any_size_of_input_and_gradient_is_as_precise(size: float, on_host: Run) -> None:
    case = CASES[4]
    x, w, shift, slope = tensors(case)
    x, w, slope = x * size, w / size, slope.abs()
    dx, dw, table = truth(case, x, w, shift * 1e-3, slope)
    found = on_host(case, x, w, table)
    assert max(error(found[0], dx), error(found[1], dw)) < case.tolerance


def test_a_channel_of_small_gradients_is_as_precise(on_host: Run) -> None:
    """Each channel's dW has its own scale, and a weight of zeros does not take the scale from the others."""
    case = CASES[0]
    x, w, shift, slope = tensors(case)
    shift[:, 3], slope[:, 3] = shift[:, 3] * 1e-12, slope[:, 3] * 1e-12
    w[5] = 0
    shift[:, 5] = 1.0
    dx, dw, table = truth(case, x, w, shift, slope)
    found = on_host(case, x, w, table)
    assert found[1] is not None
    assert error(found[1][3], dw[3]) < case.tolerance
    assert error(found[0], dx) < case.tolerance


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_sample_and_channel(bad: float, on_host: Run) -> None:
    case = dataclasses.replace(CASES[0], space=(3, 4, 5))
    given = tensors(case, 3)
    _, _, table = truth(case, *given)
    clean = on_host(case, *given[:2], table)
    table[1, 4, :2] = bad
    dx, dw = on_host(case, *given[:2], table)
    assert dx is not None
    assert dw is not None
    assert clean[0] is not None
    assert clean[1] is not None
    assert not dx[1].isfinite().any()
    assert not dw[4].isfinite().any()
    assert torch.equal(dx[[0, 2]], clean[0][[0, 2]])
    others = [c for c in range(24) if c != 4]
    assert torch.equal(dw[others], clean[1][others])


def test_same_bits_of_the_inputs_gradient_however_many_programs(on_host: Run) -> None:
    case = CASES[2]
    given = tensors(case)
    table = truth(case, *given)[2]
    one_each = on_host(case, *given[:2], table)
    few = on_host(dataclasses.replace(case, settings=dataclasses.replace(TWO, programs=3)), *given[:2], table)
    assert one_each[0] is not None
    assert few[0] is not None
    assert torch.equal(one_each[0], few[0])


MUTANTS = {
    "the low plane of dv dropped from dx": ("mma(part[kd][m], low[m], b.x, b.y);", ";"),
    "what two tiles share counted twice": ("HAS_DX ? reach : 0, i == 0", "0, i == 0"),
    "chunks of a pair swapped": ("chunk = 2 * (owned + p) + matrix % 2;", "chunk = 2 * (owned + p) + 1 - matrix % 2;"),
    "rows outside are not zeros": (
        "(u32)y < (u32)BLOCK_H ? (y * DV_ROW",
        "true ? ((y + BLOCK_H) % BLOCK_H * DV_ROW",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.usefixtures("poisoned_memory")  # what a mutant leaves unwritten must not be an earlier run's right answer
def test_a_mutant_is_seen_to_fail(name: str, on_host: Run) -> None:
    case = dataclasses.replace(CASES[0], cout=8)
    given = tensors(case, 1)
    dx, dw, table = truth(case, *given)
    found = on_host(case, *given[:2], table, MUTANTS[name])
    assert not max(error(found[0], dx), error(found[1], dw)) < 10 * case.tolerance


def test_one_long_sum_is_seen_to_be_less_precise(on_host: Run) -> None:
    """Without additions in ordinary fp32: the emulated tensor cores cut off what does not fit."""
    settings = dataclasses.replace(TWO, depth=1, height=16)
    case = Case("", settings, 1, 8, (1, 1, 1), space=(1, 16, 32), wanted=WEIGHT)
    x, w, shift, _ = tensors(case, 1)
    x = x.abs() + 0.3  # sums that grow
    _, dw, table = truth(case, x, w, shift, torch.zeros_like(shift))
    errors = {}
    for promote in (4, 16):
        mutant = ("constexpr int PROMOTE_ROWS = 4,", f"constexpr int PROMOTE_ROWS = {promote},")
        errors[promote] = error(on_host(case, x, w, table, mutant)[1], dw)
    assert errors[4] < 5e-7 < errors[16], errors


@pytest.mark.parametrize("wrong", [{"cout": 40}, {"cin": 5}])
def test_what_the_kernel_cannot_do_is_refused(wrong: dict[str, object], on_host: Run) -> None:
    case = dataclasses.replace(CASES[0], **wrong)  # type: ignore[arg-type]
    given = tensors(case)
    with pytest.raises(ValueError, match="this kernel"):
        on_host(case, *given[:2], torch.empty(0))
