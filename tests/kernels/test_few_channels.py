"""The convolution of few channels, compiled for the host and run thread by thread, against float64."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cuda_host.build import HostKernels
from postlude.plan.few_channels import FewChannels
from postlude.run import launch
from postlude.stages import few_channels
from postlude.stages.cuts import Partials
from postlude.stages.few_channels import convolve_moments
from tracing import run_stage

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernel for the host"),
]
Mutant = tuple[str, str]
Run = Callable[..., tuple[Tensor, Tensor, Tensor]]
TWO = FewChannels("float16", 2, depth=2, height=4, rows=2, warps=2)
ONE = dataclasses.replace(TWO, planes=1)
BFLOAT = dataclasses.replace(TWO, planes=1, operand="bfloat16")


@dataclass(frozen=True)
class Case:
    name: str
    settings: FewChannels
    cin: int
    cout: int
    kernel: tuple[int, int, int] = (3, 3, 3)
    padding: tuple[int, int, int] = (0, 0, 0)
    space: tuple[int, int, int] = (5, 7, 9)
    dtype: torch.dtype = torch.float32
    transposed: bool = False
    last: bool = False  # channels-last input
    bias: bool = True

    @property
    def tolerance(self) -> float:
        rounds_input = self.dtype == torch.float32 and self.settings.planes == 1
        return {"float16": 1e-3, "bfloat16": 8e-3}[self.settings.operand] if rounds_input else 1e-6


CASES = (
    Case("two planes", TWO, 3, 24),
    Case("two planes, tiles in x, padded, channels-last", TWO, 3, 8, padding=(1, 2, 0), space=(3, 5, 38), last=True),
    Case("two planes, one channel, no bias", TWO, 1, 6, padding=(2, 1, 1), bias=False),
    Case("two planes, two channels, odd tile", dataclasses.replace(TWO, height=3, rows=3), 2, 8, (2, 3, 4), (1, 0, 3)),
    Case("two planes, transposed", dataclasses.replace(TWO, rows=1), 4, 8, padding=(2, 2, 2), transposed=True),
    Case("two planes, blocks of channels", TWO, 3, 40, (1, 1, 1), space=(3, 5, 6)),
    Case("one plane", ONE, 3, 24, padding=(1, 1, 1), last=True),
    Case("one plane, 1×1×1", ONE, 4, 32, (1, 1, 1)),
    Case("bf16 plane", BFLOAT, 3, 8),
    Case("fp16", ONE, 3, 8, padding=(0, 1, 2), dtype=torch.float16),
    Case("bf16, transposed", BFLOAT, 1, 8, padding=(2, 1, 0), dtype=torch.bfloat16, transposed=True, last=True),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(lambda: tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def on_host(built: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(case: Case, x: Tensor, w: Tensor, b: Tensor | None, mutant: Mutant = ("", "")) -> Any:
        def stage(x: Tensor, w: Tensor, b: Tensor | None = None) -> Partials:
            return convolve_moments(x, w, b, case.padding, case.settings, case.transposed)

        monkeypatch.setattr(launch, "cuda_kernel", lambda call, _: built(call, mutant))
        return run_stage(stage, x, w, *([] if b is None else [b]))

    return run


def tensors(case: Case, batch: int = 2) -> tuple[Tensor, Tensor, Tensor | None]:
    x = torch.randn(batch, case.cin, *case.space).to(case.dtype)
    w = torch.randn(*((case.cin, case.cout) if case.transposed else (case.cout, case.cin)), *case.kernel)
    x = x.contiguous(memory_format=torch.channels_last_3d) if case.last else x
    return x, w.to(case.dtype), torch.randn(case.cout).to(case.dtype) if case.bias else None


def convolution(case: Case, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    x, w, b = x.double(), w.double(), None if b is None else b.double()
    if case.transposed:
        crop = tuple(k - 1 - p for k, p in zip(case.kernel, case.padding))
        return F.conv_transpose3d(x, w, b, padding=crop)  # type: ignore[arg-type]
    return F.conv3d(x, w, b, padding=case.padding)


def expected(case: Case, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tile by tile: [N, C_OUT, TILES] means and squares, [TILES] counts."""
    parts = [
        tile.flatten(2)
        for plane in y.split(case.settings.depth, 2)
        for row in plane.split(case.settings.height, 3)
        for tile in row.split(32, 4)
    ]
    means = [part.mean(2) for part in parts]
    squares = [(part - mean[..., None]).square().sum(2) for part, mean in zip(parts, means)]
    counts = torch.tensor([float(part.shape[2]) for part in parts])
    return torch.stack(means, 2), torch.stack(squares, 2), counts


def errors(case: Case, found: tuple[Tensor, ...], y: Tensor) -> tuple[float, float]:
    """The errors of the means, relative to the outputs' size, and of the variances, relative to the mean of squares."""
    mean, m2, counts = expected(case, y)
    assert torch.equal(found[2], counts.expand(len(y), -1))
    size = float(y.square().mean().sqrt())
    off_mean = (found[0].double() - mean).abs().max() / size
    off_m2 = ((found[1].double() - m2).abs() / counts).max() / size**2
    return float(off_mean), float(off_m2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("poisoned_memory")
def test_moments_are_right_to_rounding(case: Case, on_host: Run) -> None:
    x, w, b = tensors(case)
    off_mean, off_m2 = errors(case, on_host(case, x, w, b), convolution(case, x, w, b))
    assert max(off_mean, off_m2) < case.tolerance, (off_mean, off_m2)


@pytest.mark.parametrize("size", [1e-36, 1e-12, 1e12, 3e37])
def test_any_size_of_input_is_as_precise(size: float, on_host: Run) -> None:
    case = CASES[0]
    x, w, _ = tensors(case)
    x, w = x * size, w / size
    y = convolution(case, x, w, None)
    assert max(errors(case, on_host(case, x, w, None), y)) < case.tolerance


def test_a_large_mean_does_not_spoil_the_squares(on_host: Run) -> None:
    case = CASES[0]
    x, w, b = tensors(case)
    assert b is not None
    y = convolution(case, x, w, b + 100)
    _, m2, counts = expected(case, y)
    found = on_host(case, x, w, b + 100)[1].double()
    assert float(((found - m2).abs() / counts).max() / y.var()) < 1e-5


@pytest.mark.parametrize("which", [0, 6, 9], ids=["two planes", "one plane", "fp16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_sample(which: int, bad: float, on_host: Run) -> None:
    case = CASES[which]
    x, w, b = tensors(case, 3)
    clean = on_host(case, x, w, b)
    x[1, 1, 2, 3, 4] = bad
    mean, m2, counts = on_host(case, x, w, b)
    assert (mean[1] * m2[1]).sum(1).isnan().all()
    assert torch.equal(counts, clean[2])
    for ours, theirs in ((mean, clean[0]), (m2, clean[1])):
        assert torch.equal(ours[[0, 2]], theirs[[0, 2]])


def test_same_bits_however_many_programs(on_host: Run) -> None:
    case = CASES[0]
    x, w, b = tensors(case)
    x[0] = 0
    one_each = on_host(case, x, w, b)
    few = on_host(dataclasses.replace(case, settings=dataclasses.replace(case.settings, programs=3)), x, w, b)
    assert all(torch.equal(a, b) for a, b in zip(one_each, few))


MUTANTS = {
    "the low plane dropped": ("mma(part[n], low, b[n].x, b[n].y);", ";"),
    "no halo in y": ("chunk / TAP_CHUNKS_W % KH * ROW_PITCH +", "0 +"),
    "lanes' means not merged": ("all.y + apart * weight, ", "all.y, "),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen_to_fail(name: str, on_host: Run) -> None:
    case = CASES[0]
    x, w, b = tensors(case)
    off = errors(case, on_host(case, x, w, b, MUTANTS[name]), convolution(case, x, w, b))
    assert max(off) > 10 * case.tolerance, off


@pytest.mark.parametrize(
    "wrong",
    [
        {"cin": 5},
        {"kernel": (5, 3, 3)},
        {"padding": (3, 0, 0)},
        {"dtype": torch.float16},  # in two planes
        {"settings": dataclasses.replace(TWO, height=3)},
        {"settings": dataclasses.replace(BFLOAT, planes=2)},
    ],
)
def test_what_the_kernel_cannot_do_is_refused(wrong: dict[str, object], on_host: Run) -> None:
    case = dataclasses.replace(CASES[0], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"this kernel|one plane|less than fp32|divide"):
        on_host(case, *tensors(case))


def test_the_source_is_part_of_the_package() -> None:
    source = launch.cuda_source("few_channels.cu")
    assert "few_channels_moments" in source.text
    assert {name for name, _ in source.headers} >= {"operands.cuh", "geometry.cuh", "tile.cuh", "products.cuh"}
    assert Path(few_channels.__file__).parent.parent.name == "postlude"
