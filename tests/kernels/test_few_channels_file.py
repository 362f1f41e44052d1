"""The CUDA C++ that files hold, compiled for the host and run thread by thread, against float64."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cuda_host.build import build_text
from postlude.chain import Normalize, Value
from postlude.export.few_channels import source
from postlude.plan.few_channels import FewChannels, Geometry

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernel for the host"),
]
SETTINGS = FewChannels("float16", 2, depth=2, height=4, rows=2, warps=2)
NORM = Normalize("group_norm", Value(0), 2, 1e-5)
Run = Callable[..., Tensor]
Mutant = tuple[str, str]


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """[N, tiles, COUT, 3]: counts, sums and sums of squares of a convolution."""
    built: dict[object, ctypes.CDLL] = {}

    def run(
        x: Tensor, w: Tensor, padding: tuple[int, int, int] = (0, 0, 0), mutant: Mutant = ("", ""), blocks: int = 3
    ) -> Tensor:
        kd, kh, kw = w.shape[2:]
        shape = Geometry(w.shape[1], w.shape[0], (kd, kh, kw), padding, False, "float32")
        if (shape, mutant) not in built:
            text = source(SETTINGS, shape, NORM)
            assert not mutant[0] or text.count(mutant[0]) == 1
            text = text.replace(*mutant) if mutant[0] else text
            built[shape, mutant] = ctypes.CDLL(str(build_text(tmp_path_factory.mktemp("file"), text, "moments_kernel")))
        out = [size + 2 * p - k + 1 for size, p, k in zip(x.shape[2:], padding, w.shape[2:])]
        tiles = -(-out[0] // 2) * -(-out[1] // 4) * -(-out[2] // 32)
        found = torch.full((len(x), tiles, len(w), 3), float("nan"), dtype=torch.float64)
        values = [x.data_ptr(), w.data_ptr(), found.data_ptr(), *(x.shape[i] for i in (0, 2, 3, 4)), 0]
        slots = (ctypes.c_int64 * len(values))(*values)
        assert built[shape, mutant].launch(blocks, 1, 64, slots, len(values)) == 0
        return found

    return run


def expected(x: Tensor, w: Tensor, padding: tuple[int, int, int] = (0, 0, 0)) -> tuple[Tensor, Tensor]:
    """The same of the whole sample in float64, and of one number the size."""
    y = F.conv3d(x.double(), w.double(), padding=padding).flatten(2)
    sums = torch.stack([torch.full_like(y[..., 0], y.shape[2]), y.sum(2), y.square().sum(2)], 2)
    return sums, y.square().mean().sqrt()


def error(found: Tensor, wanted: Tensor, size: Tensor) -> float:
    """Of means and of mean squares, in units of the numbers' size."""
    found = found.sum(1)
    assert torch.equal(found[..., 0], wanted[..., 0])
    off = (found - wanted)[..., 1:].abs() / wanted[..., :1]
    return float((off / torch.stack([size, size.square()])).max())


def tensors(
    cin: int = 3,
    cout: int = 24,
    space: tuple[int, int, int] = (5, 7, 9),
    kernel: tuple[int, int, int] = (3, 3, 3),
) -> tuple[Tensor, Tensor]:
    return torch.randn(2, cin, *space), torch.randn(cout, cin, *kernel)


@pytest.mark.parametrize(
    ("cin", "cout", "space", "kernel", "padding"),
    [
        (3, 24, (5, 7, 9), (3, 3, 3), (0, 0, 0)),
        (4, 8, (3, 5, 38), (3, 3, 3), (1, 2, 0)),
        (3, 32, (4, 4, 5), (2, 1, 4), (1, 0, 1)),
    ],
)
def test_moments_are_right_to_rounding(
    cin: int,
    cout: int,
    space: tuple[int, int, int],
    kernel: tuple[int, int, int],
    padding: tuple[int, int, int],
    moments: Run,
) -> None:
    x, w = tensors(cin, cout, space, kernel)
    assert error(moments(x, w, padding), *expected(x, w, padding)) < 1e-6


@pytest.mark.parametrize("size", [1e-36, 1e-12, 1e12, 3e37])
def test_any_size_of_input_is_as_precise(size: float, moments: Run) -> None:
    x, w = tensors()
    x, w = x * size, w / size
    assert error(moments(x, w), *expected(x, w)) < 1e-6


def test_a_large_mean_does_not_spoil_the_squares(moments: Run) -> None:
    x, w = tensors()
    x = x + 100
    count, total, squares = moments(x, w).sum(1).unbind(2)
    y = F.conv3d(x.double(), w.double()).flatten(2)
    found = squares / count - (total / count).square()
    assert float((found / y.var(2, correction=0) - 1).abs().max()) < 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_sample(bad: float, moments: Run) -> None:
    x, w = tensors()
    clean = moments(x, w)
    x[1, 1, 2, 3, 4] = bad
    found = moments(x, w)
    assert torch.equal(found[0], clean[0])
    assert not found[1].sum(0)[:, 1:].isfinite().any()


def test_same_bits_however_many_blocks(moments: Run) -> None:
    x, w = tensors()
    x[0] = 0
    assert torch.equal(moments(x, w, blocks=1), moments(x, w, blocks=4))


MUTANTS = {
    "the low plane dropped": ("mma(part[n], low, b[n].x, b[n].y);", ";"),
    "no halo in y": (" + tap / KW % KH * PITCH", ""),
    "columns past the end counted": ("&& k % 4 * 8 + g < width", ""),
    "a warp left out": ("p < parts + WARPS * 8 * COUT", "p < parts + 8 * COUT"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen_to_fail(name: str, moments: Run) -> None:
    x, w = tensors()
    found = moments(x, w, mutant=MUTANTS[name])
    wanted, size = expected(x, w)
    found[..., 0] = 0
    found[:, 0, :, 0] = wanted[..., 0]  # whatever it counted
    assert error(found, wanted, size) > 1e-5


def test_words_that_must_be_there_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Geometry(3, 24, (3, 3, 3), (0, 0, 0), False, "float32")
    text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a: text(self, *a).replace("STEPS = 7", "STEPS = TAPS / 4"))
    with pytest.raises(ValueError, match="the kernel sets STEPS 0 times"):
        source(dataclasses.replace(SETTINGS, depth=11), shape, NORM)


def test_rows_lie_where_the_library_has_them() -> None:
    """64 bytes more than a multiple of 128: taps in neighbouring rows are read from different banks."""
    assert "PITCH = 36, PLANE = 148;" in source(SETTINGS, Geometry(3, 24, (1, 1, 3), (0, 0, 0), False, "float32"), NORM)
