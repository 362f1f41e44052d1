"""Every launch under autocast compiled for Hopper: float32 parameters with 16-bit values, bfloat16 among them, which
Triton's interpreter cannot compute in."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from autocasting import autocasted, with_parameters
from cases import CHAIN_61, Builder, conv
from kernels import offline
from kernels.test_compile import BLOCK, DILATED, RESIDUAL, UP_NORM, launches_of, of_shape
from postlude.chain import Chain
from postlude.check import tensors_for
from postlude.plan import convolve
from postlude.plan.boxes import boxes_for
from postlude.plan.gemm import Arithmetic
from postlude.stages import pack

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]

PRELU = Builder(3, conv(3, (32, 32), padding=1)).norm(None).op("prelu", "channel").chain()
WIDE = Builder(3, conv(3, (192, 64), padding=1)).norm(8).op("silu").chain()
ROWS = Builder(3, conv(3, (32, 64), 2, transposed=True, stride=2)).layer_norm(1).op("gelu", approximate="none").chain()
CHANNELS = Builder(3, conv(3, (32, 32), padding=1)).op("silu").reduce("logsumexp", "channels").chain()
FEW = Builder(2, conv(2, (3, 16))).op("mul", "channel").op("silu").chain()
SHAPE = (2, 32, 32, 32, 32)
# name → chain, input, the input's dtype where it is not autocast's, a kernel that must be among its launches
PLANS: dict[str, tuple[Chain, tuple[int, ...], torch.dtype | None, str]] = {
    "boxes": (BLOCK, SHAPE, None, "convolve_boxes_kernel"),
    "boxes, prelu": (PRELU, SHAPE, None, "convolve_boxes_kernel"),
    "boxes, float32 input": (BLOCK, SHAPE, torch.float32, "convolve_boxes_kernel"),
    "boxes, group_norm and a residual": (RESIDUAL, (2, 64, 32, 32, 32), torch.float32, "convolve_boxes_kernel"),
    "packed": (WIDE, (2, 192, 32, 32, 32), None, "convolve_kernel"),
    "transposed": (CHAIN_61, (2, 64, 32, 32, 32), None, "convolve_kernel"),
    "phases": (UP_NORM, (2, 64, 32, 32, 32), None, "convolve_phases_kernel"),
    "unfolded": (FEW, (16, 3, 128, 128), torch.float32, "unfold_input_kernel"),
    "library": (DILATED, SHAPE, None, "moments_kernel"),
    "rows": (ROWS, SHAPE, None, "rows_kernel"),
    "over channels": (CHANNELS, SHAPE, None, "channels_kernel"),
}
TRAINED = ("boxes, prelu", "boxes, float32 input", "boxes, group_norm and a residual", "rows")


def names_of(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, trains: bool = False) -> list[str]:
    chain, shape, x, _ = PLANS[name]
    made = tensors_for(chain, (1, shape[1], *[3] * chain.dims), dtype, "cpu")
    layout = "channels_last" if chain.dims == 3 else "contiguous"
    tensors = [of_shape(t.to("meta"), shape, chain, role, layout) for t, role in zip(made, chain.roles)]
    tensors = [_last(t, shape, chain) if role == "last" else t for t, role in zip(tensors, chain.roles)]
    tensors = with_parameters(chain, tensors, torch.float32)
    tensors[0] = tensors[0].to(x or dtype)
    ours = autocasted(chain, tensors, "cuda", dtype)
    assert isinstance(ours, Chain), ours
    offline.use_card(monkeypatch, 90)
    return [found.name for found in launches_of(ours, tensors, 90, trains=trains)]


def _last(tensor: Tensor, shape: tuple[int, ...], chain: Chain) -> Tensor:
    """A layer_norm's parameter, of the size that the input really has."""
    assert chain.producer is not None
    return tensor.new_empty(chain.producer.output_space(shape[2:])[-tensor.dim() :])


@pytest.mark.parametrize("name", PLANS)
def test_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PLANS[name][3] in names_of(monkeypatch, name, torch.bfloat16)


def test_compiles_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "convolve_boxes_kernel" in names_of(monkeypatch, "boxes", torch.float16)


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names_of(monkeypatch, name, torch.bfloat16, trains=True)


def test_a_weight_packed_in_its_own_dtype_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the fault that switched five sites of nnU-Net off."""
    honest = pack.packed_weight

    def faulty(outputs: int, width: int, depth: int, arithmetic: Arithmetic, weight: Tensor) -> tuple[Tensor, Tensor]:
        return honest(outputs, width, depth, dataclasses.replace(arithmetic, operands="float32"), weight)

    monkeypatch.setattr(pack, "packed_weight", faulty)
    with pytest.raises(Exception, match="dtype"):
        names_of(monkeypatch, "boxes", torch.bfloat16)


def test_a_float32_input_read_in_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: rows of channels where they lie, although they are no operands."""

    def in_place(*args: object) -> object:
        return dataclasses.replace(boxes_for(*args), packs=False)  # type: ignore[arg-type, type-var]

    monkeypatch.setattr(convolve, "boxes_for", in_place)
    with pytest.raises(Exception, match="dtype"):
        names_of(monkeypatch, "boxes, float32 input", torch.bfloat16)
