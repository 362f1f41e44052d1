"""Each channel's largest magnitude by Triton's interpreter: short rows and long ones, several samples of a program."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from postlude.plan.gemm import Arithmetic
from postlude.plan.problem import spec_of
from postlude.run.compose import HEADER, compose
from postlude.stages.pack import find_largest
from tracing import run_stage

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore")]
KEEPING = Arithmetic("float16", 2, scaled=True, keeps_infinities=True)
# Six samples are one program's, eleven are eleven programs'; 4100 positions are two tiles.
SHAPES = [(6, 5, 1, 1), (11, 3, 1, 7), (6, 20, 15, 15), (6, 3, 30, 30), (11, 3, 32, 32), (2, 3, 41, 100)]


def largest(x: Tensor) -> tuple[Tensor, bool]:
    """The largest magnitude of each channel, and whether there was an infinity."""
    (found,) = run_stage(lambda given: find_largest(given, spec_of(x), KEEPING), x)
    assert found is not None
    return found[:-1].view(torch.float32), bool(found[-1])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_counts(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    x = torch.randn(shape).contiguous(memory_format=layout)
    for sample, channel in ((0, 0), (shape[0] - 1, shape[1] - 1)):
        x[sample, channel, -1, -1] = -100.0
    assert torch.equal(largest(x)[0], x.abs().amax((0, 2, 3)))
    assert not largest(x)[1]
    x[-1, -1, 0, 0] = -math.inf
    assert torch.equal(largest(x)[0], x.nan_to_num(neginf=0.0).abs().amax((0, 2, 3)))
    assert largest(x)[1]


@pytest.mark.parametrize(
    "right", ["tl.cast(i, tl.int64) * S * C", "(TILES_PER_PROGRAM if HAS_SHORT_ROWS else 1) * S * C"]
)
def test_samples_left_out_are_seen_to_fail(right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a program reads its first sample again and again; every program reads the first one's."""
    module = importlib.import_module("postlude.kernels.triton.pack")
    source = Path(str(module.__file__)).read_text()
    assert right in source
    wrong = compose(HEADER + source.replace(right, "0"))["largest_kernel"]
    monkeypatch.setattr(module, "largest_kernel", wrong)
    x = torch.randn(22, 3, 15, 15)
    assert not torch.equal(largest(x)[0], x.abs().amax((0, 2, 3)))
