"""Training steps with batch_norm and layer_norm compiled ahead of time: every launch compiles, fits, does not spill."""

from __future__ import annotations

import pytest

from cases import Builder, conv
from kernels import offline
from kernels.offline import Compiled
from plan.test_convolve import card as machine_of
from postlude.chain import Chain
from postlude.plan import Plan, Problem
from postlude.plan.gpu import lower_for_gpu
from postlude.plan.problem import Spec
from postlude.run.ahead import program_of
from postlude.run.execute import prepare

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]
BATCH = Builder(2, conv(2, (64, 128))).op("mish").batch_norm().op("mul", 2.0).chain()
ROWS = (
    Builder(3, conv(3, (32, 64), 4, transposed=True, stride=2, padding=1))
    .op("add", "one")
    .layer_norm()
    .op("gelu", approximate="none")
    .op("mul", "channel")
    .chain()
)
LONG = Builder(2).op("silu").layer_norm(2).op("add", "full").chain()
# name → chain, input, value, normalised shape
PLANS: dict[str, tuple[Chain, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "batch_norm": (BATCH, (64, 64, 128, 128), (64, 128, 126, 126), ()),
    "layer_norm": (ROWS, (32, 32, 16, 32, 32), (32, 64, 32, 64, 64), (64,)),
    "long rows": (LONG, (8, 16, 80, 100), (8, 16, 80, 100), (80, 100)),
}
KERNELS = {
    "batch_norm": {"combine_batch_kernel", "combine_batch_sums_kernel", "finish_kernel", "gradient_kernel"},
    "layer_norm": {"rows_kernel", "rows_gradient_kernel", "add_channels_kernel"},
    "long rows": {"rows_kernel", "rows_gradient_kernel", "add_channels_kernel"},
}


def launches(name: str, dtype: str, architecture: int) -> list[Compiled]:
    chain, shape, value, rows = PLANS[name]
    shapes = {"input": shape, "full": value, "last": rows, "one": (1,)}
    if chain.producer is not None:
        ends = (chain.producer.in_channels, chain.producer.out_channels)
        shapes["weight"] = (*(ends if chain.producer.transposed else ends[::-1]), *chain.producer.kernel)
    specs = tuple(Spec(shapes.get(role, (value[1],)), dtype, "contiguous") for role in chain.roles)
    problem, not_ours = Problem(specs, "cuda", "fp32", True), "our own convolution is compiled elsewhere"
    plan = lower_for_gpu(chain, problem, machine_of(architecture), even_if_slower=True, not_ours=not_ours)
    assert isinstance(plan, Plan), plan
    needs = [slot not in chain.moved for slot in range(len(specs))]
    program = program_of(chain, prepare(chain, plan), problem, needs)
    assert [gradient is not None for gradient in program.gradients] == needs
    return offline.compiled_calls((*program.forward, *program.backward), architecture)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("dtype", "card"), [("float32", 90), ("bfloat16", 80)])
def test_compiles_within_each_cards_limits(name: str, dtype: str, card: int, monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, card)
    compiled = launches(name, dtype, card)
    assert {found.name for found in compiled} >= KERNELS[name]
    for found in compiled:
        assert found.shared <= offline.CARDS[card], found.name
        used = offline.resources(found.ptx, card)
        assert used.registers * 32 * found.warps <= 65_536, (found.name, used)
        assert used.spilled == 0, (found.name, used)
        if found.name == "rows_kernel" and dtype == "float32" and name == "layer_norm":
            assert "ld.global.v4.b32" in found.ptx
            assert "st.global.v4.b32" in found.ptx
            assert "div.s64" not in found.ptx  # a tile's rows are of one channel
