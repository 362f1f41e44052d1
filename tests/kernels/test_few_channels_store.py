"""The stored convolution of few channels, compiled for the host and run thread by thread, against float64."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cuda_host.build import HostKernels
from kernels.test_few_channels import CASES, TWO, Case, Mutant, convolution, tensors
from postlude.run import launch
from postlude.stages.few_channels_store import convolve_stored
from tracing import run_stage

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernel for the host"),
]
Run = Callable[..., Tensor]
KEPT = Case("three channels, padded", TWO, 3, 24, padding=(1, 1, 1), space=(3, 6, 9))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(lambda: tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def on_host(built: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(
        case: Case, x: Tensor, w: Tensor, b: Tensor | None, keeps: bool = False, mutant: Mutant = ("", "")
    ) -> Tensor:
        def stage(x: Tensor, w: Tensor, b: Tensor | None = None) -> tuple[Tensor]:
            return (convolve_stored(x, w, b, case.padding, case.settings, keeps, case.transposed),)

        monkeypatch.setattr(launch, "cuda_kernel", lambda call, _: built(call, mutant))
        (found,) = run_stage(stage, x, w, *([] if b is None else [b]))
        assert found is not None
        return found

    return run


def error(found: Tensor, truth: Tensor) -> float:
    assert found.shape == truth.shape
    return float((found.double() - truth).abs().max() / truth.square().mean().sqrt())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("poisoned_memory")
def test_is_right_to_rounding(case: Case, on_host: Run) -> None:
    x, w, b = tensors(case)
    rounds_result = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.dtype]
    most = max(rounds_result, 10 * case.tolerance if case.tolerance > 1e-6 else 0)
    assert error(on_host(case, x, w, b), convolution(case, x, w, b)) < most


@pytest.mark.parametrize("size", [1e-36, 1e-12, 1e12, 3e37])
@pytest.mark.parametrize("keeps", [False, True])
def test_any_size_of_input_is_as_precise(size: float, keeps: bool, on_host: Run) -> None:
    x, w, _ = tensors(KEPT)
    x, w = x * size, w / size
    assert error(on_host(KEPT, x, w, None, keeps), convolution(KEPT, x, w, None)) < 1e-5


def test_same_bits_however_many_programs(on_host: Run) -> None:
    x, w, b = tensors(KEPT)
    few = dataclasses.replace(KEPT, settings=dataclasses.replace(TWO, programs=3))
    assert torch.equal(on_host(KEPT, x, w, b), on_host(few, x, w, b))


def infinite() -> tuple[Tensor, Tensor, Tensor]:
    """Infinities of both signs and NaN in a corner, at a border and inside, beside numbers that no plane holds."""
    x, w, b = tensors(KEPT)
    x[0, 0, 1, 1, 1], x[0, 2, 2, 5, 8], x[1, 1, 0, 0, 0], x[1, 2, 1, 3, 4] = torch.inf, -torch.inf, torch.inf, torch.nan
    x[:, :, 1, 2, 2] *= 1e-30
    w.view(-1)[1::4] *= 1e-25
    assert b is not None
    return x, w, b


def is_pytorchs(found: Tensor, truth: Tensor) -> bool:
    """The same infinities and NaN, and finite numbers as exact as without any."""
    odd = ~truth.isfinite()
    off = (found.double() - truth)[~odd].abs().max() / truth[~odd].square().mean().sqrt()
    return torch.equal(found[odd].nan_to_num(7), truth[odd].float().nan_to_num(7)) and float(off) < 1e-5


@pytest.mark.parametrize("which", ["input", "weight"])
def test_infinities_come_out_as_of_pytorch(which: str, on_host: Run) -> None:
    x, w, b = infinite()
    if which == "weight":
        x, _, _ = tensors(KEPT)
        w[5, 1, 0, 2, 1], w[7, 2, 2, 2, 2], w[9, 0, 1, 1, 1] = torch.inf, -torch.inf, torch.nan
    truth = convolution(KEPT, x, w, b)
    assert truth.isposinf().any()
    assert truth.isneginf().any()
    assert truth.isfinite().any()
    assert is_pytorchs(on_host(KEPT, x, w, b, keeps=True), truth)


MUTANTS = {
    "the low plane dropped": ("mma(part[n], low, b[n].x, b[n].y);", ";"),
    "the scale of the input forgotten": ("int power = exponents[WARPS] - 28;", "int power = -14;"),
    "channels in another order": ("int o = i / 2 * 8 + i % 2;", "int o = i / 2 * 8 + 1 - i % 2;"),
    "half of the columns": ("k / 4 * OW + k % 4 * 8]", "k / 4 * OW + k % 2 * 8]"),
    "the last row left out": ("if (k / 4 < rows &&", "if (k / 4 < rows - 1 &&"),
    "the bias forgotten": ("* low * high + bias", "* low * high"),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.usefixtures("poisoned_memory")
def test_a_mutant_is_seen_to_fail(name: str, on_host: Run) -> None:
    case = dataclasses.replace(KEPT, space=(3, 5, 38))
    x, w, b = tensors(case)
    assert not error(on_host(case, x, w, b, False, MUTANTS[name]), convolution(case, x, w, b)) < 1e-4


OF_INFINITIES = {
    "not computed again": ("mend(at, offsets + t, fragments + lane, t, sums);", ";"),
    "the last chunk's repetition kept": ("u32 kept = j * 4 + t < TAP_CHUNKS ? ~0u : 0u;", "u32 kept = ~0u;"),
    "an infinity that sets the scale": ("return is_finite(v) ? fabsf(v) : 0.0f;", "return fabsf(v);"),
    "numbers that round to zero": ("? copysignf(0x1p-24f, v) : scaled", "? scaled : scaled"),
}


@pytest.mark.parametrize("name", OF_INFINITIES)
def test_a_mutant_of_infinities_is_seen_to_fail(name: str, on_host: Run) -> None:
    x, w, b = infinite()
    w[3, 1, 0, 0, 0] = torch.inf
    x[1, 1, 2, 2, 3] = 1e-30
    truth = convolution(KEPT, x, w, b)
    assert is_pytorchs(on_host(KEPT, x, w, b, True), truth)
    assert not is_pytorchs(on_host(KEPT, x, w, b, True, OF_INFINITIES[name]), truth)
