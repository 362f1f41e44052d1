"""The gradient passes of real plans compiled ahead of time for the cards we support: they fit and do not spill."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases import CHAIN_61, Builder, conv
from kernels import offline
from kernels.offline import Compiled
from plan.test_convolve import card as machine_of
from postlude.chain import Chain, Normalize
from postlude.plan import Plan
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.problem import Problem, Spec, memory_format
from postlude.stages.gradient import gradient_passes
from postlude.steps import pass_slots
from tracing import traced_calls

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]
card = offline.card

BLOCK = Builder(3, conv(3, (32, 32), padding=1)).norm(None).op("leaky_relu", slope=0.01).chain()
RESIDUAL = Builder(3, conv(3, (64, 64), padding=1, bias=False)).norm(8).op("add", "full").op("silu").chain()
VECTORS = (
    Builder(3, conv(3, (32, 128), padding=1))
    .op("gelu", approximate="none")
    .op("mul", "channel")
    .norm(8)
    .op("mul", "channel")
    .op("gelu", approximate="tanh")
    .op("add", "channel")
    .chain()
)
MANY = Builder(3, conv(3, (32, 64), bias=False)).norm(8, affine=False)
for _ in range(3):
    MANY = MANY.op("mul", "channel").op("silu").op("add", "channel")
PLAIN = Builder(2).op("silu").op("mul", Builder(2).value).op("add", "full").chain()
SHAPES = {
    "61": (CHAIN_61, (16, 64, 32, 32, 32)),
    "block": (BLOCK, (2, 32, 128, 128, 128)),
    "residual": (RESIDUAL, (2, 64, 33, 34, 35)),
    "vectors": (VECTORS, (2, 32, 64, 64, 64)),
    "most sums": (MANY.chain(), (2, 32, 64, 64, 64)),
    "no norm": (PLAIN, (8, 128, 64, 64)),
    "short rows": (Builder(2).norm(8).op("tanh").chain(), (512, 128, 15, 15)),
}
LAYOUTS = ("contiguous", "channels_last")


def plan_of(chain: Chain, shape: tuple[int, ...], dtype: str, layout: Any, architecture: int) -> Plan:
    producer = chain.producer
    channels = producer.out_channels if producer else shape[1]
    space = producer.output_space(shape[2:]) if producer else shape[2:]
    shapes = {"input": shape, "full": (shape[0], channels, *space)}
    if producer is not None:
        ends = (producer.in_channels, producer.out_channels)
        shapes["weight"] = (*(ends if producer.transposed else ends[::-1]), *producer.kernel)
    large = ("input", "full")
    slots = [
        Spec(shapes.get(role, (channels,)), dtype, layout if role in large else "contiguous") for role in chain.roles
    ]
    plan = lower_for_gpu(chain, Problem(tuple(slots), "cuda", "auto", False), machine_of(architecture), True)
    assert isinstance(plan, Plan), plan
    return plan


def compiled_launches(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, layout: Any, architecture: int
) -> list[Compiled]:
    chain, shape = SHAPES[name]
    monkeypatch.setattr("postlude.plan.gpu.own_convolution", lambda *_: "its result's layout is the input's")
    plan = plan_of(chain, shape, dtype, layout, architecture)
    assert (plan.tile is not None and plan.tile.block_c > 0) == (layout == "channels_last")
    form = memory_format(layout, chain.dims)
    value = torch.empty(plan.value.shape, dtype=getattr(torch, dtype), device="meta", memory_format=form)
    vector = value.new_empty(plan.value.shape[1])
    tensors = [value if role == "full" else vector for role in chain.roles]
    norm = next((step for step in chain.steps if isinstance(step, Normalize)), None)
    acc = torch.float64 if dtype == "float64" else torch.float32
    means = value.new_empty(shape[0] * ((norm.groups if norm else None) or len(vector)), dtype=acc)
    needs = frozenset(pass_slots(chain, len(chain.steps)))

    def stage(value: Tensor, dy: Tensor, mean: Tensor, rstd: Tensor, *tensors: Tensor) -> None:
        gradient_passes(plan, needs, value, None if norm is None else (mean, rstd), dy, tensors)

    found = offline.compiled_calls(traced_calls(stage, value, value, means, means, *tensors), architecture)
    has_vectors = any(chain.roles[slot] != "full" for slot in needs)
    assert (found[-1].name == "add_channels_kernel") == has_vectors
    assert len(found) == (1 if norm is None else 3) + has_vectors
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_compiles_within_each_cards_limits(name: str, layout: str, card: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # 16 bits of either kind take the same registers: one of them in each layout.
    sixteen = "float16" if layout == "contiguous" else "bfloat16"
    dtypes = (sixteen, "float32", "float64") if card == 90 else ("bfloat16",)
    if card != 90 and name != "vectors":
        pytest.skip("compiled for sm_90 only")
    for dtype in dtypes:
        for found in compiled_launches(monkeypatch, name, dtype, layout, card):
            assert found.shared <= offline.CARDS[card], found.name
            used = offline.resources(found.ptx, card)
            assert used.registers * 32 * found.warps <= 65_536, (found.name, dtype, used)
            least = 64 if dtype == "float64" else 0  # for correctness only: no card is fast at it
            assert used.spilled <= least, (found.name, dtype, used)


def test_reads_and_writes_whole_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    for layout in LAYOUTS:
        ptx = {found.name: found.ptx for found in compiled_launches(monkeypatch, "61", "bfloat16", layout, 90)}
        sums, gradient = ptx["sums_kernel"], ptx["gradient_kernel"]
        # 34³ positions are a multiple of 8, not of 16.
        assert sums.count("ld.global.v4.b32") >= 2
        assert gradient.count("ld.global.v4.b32") >= 2
        assert "st.global.v4.b32" in gradient
