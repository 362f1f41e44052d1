"""Linear layers compiled ahead of time: KernelBench's shapes for Hopper, one of each way for the other cards."""

from __future__ import annotations

import pytest

from cases import Builder, conv
from kernels import offline
from kernels.offline import Compiled
from plan.test_convolve import card as machine_of
from postlude.chain import Chain
from postlude.plan import Plan, Problem, lower
from postlude.plan.linear import LinearGemm
from postlude.plan.problem import Spec
from postlude.run.ahead import program_of
from postlude.run.execute import prepare

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]
card = offline.card


def layer(inner: int, outer: int) -> Builder:
    return Builder(0, conv(0, (inner, outer)))


GROUPS = layer(1024, 4096).op("silu").op("add", "channel").norm(64).chain()
BATCH = layer(4096, 4096).op("mul", "channel").batch_norm().op("gelu", approximate="none").chain()
# name → chain, rows
CHAINS: dict[str, tuple[Chain, int]] = {
    "pointwise": (layer(8192, 8192).op("mish").op("mish").chain(), 1024),
    "gelu": (layer(8192, 8192).op("add", "channel").op("silu").op("tanh").op("gelu", approximate="none").chain(), 1024),
    "another tensor": (layer(8192, 8192).layer_norm(affine=False).op("add", "full").op("mul", "full").chain(), 1024),
    "groups": (GROUPS, 32768),
    "batch": (BATCH, 16384),
    "softmax": (layer(8192, 8192).op("gelu", approximate="none").softmax().chain(), 1024),
    "logsumexp": (layer(8192, 8192).op("mul", 2.0).reduce("logsumexp", "channels", True).op("mish").chain(), 1024),
    "normed rows": (layer(8192, 4096).op("silu").layer_norm().op("mul", "channel").softmax().chain(), 1024),
    "cut": (layer(16384, 16384).op("silu").op("mul", 2.0).chain(), 128),
    "cut, long rows": (layer(32768, 32768).op("sigmoid").reduce("sum", "sample", True).chain(), 128),
    "odd": (layer(1000, 1003).op("relu").chain(), 777),
}
EVERYWHERE = ("groups", "cut", "softmax")  # one of each way


def problem_of(chain: Chain, rows: int, dtype: str = "float32", trains: bool = False) -> Problem:
    inner, outer = chain.convolution.in_channels, chain.convolution.out_channels
    shapes = {"input": (rows, inner), "weight": (outer, inner), "full": (rows, outer)}
    specs = [Spec(shapes.get(role, (outer,)), dtype, "contiguous") for role in chain.roles]
    return Problem(tuple(specs), "cuda", "auto", trains)


def compiled(name: str, architecture: int, dtype: str = "float32", trains: bool = False) -> list[Compiled]:
    chain, rows = CHAINS[name]
    problem = problem_of(chain, rows, dtype, trains)
    plan = lower(chain, problem, machine_of(architecture), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert isinstance(plan.own, LinearGemm) == (dtype == "float32")
    if isinstance(plan.own, LinearGemm):
        assert plan.own.cuts_weight == name.startswith("cut")
    needs = [trains and role != "running" for role in chain.roles]
    program = program_of(chain, prepare(chain, plan), problem, needs)
    return offline.compiled_calls((*program.forward, *program.backward), architecture)


def assert_fits(launches: list[Compiled], architecture: int) -> None:
    for found in launches:
        used = offline.resources(found.ptx, architecture)
        assert found.shared <= offline.CARDS[architecture], found.name
        assert used.registers * 32 * found.warps <= 65_536, (found.name, used)
        if architecture == 90:  # on cards without wgmma the operands wait in registers too
            least = 32 if found.name == "rows_gradient_kernel" else 0  # of the longest rows
            assert used.spilled <= least, (found.name, used)


@pytest.mark.parametrize("name", CHAINS)
def test_compiles_within_each_cards_limits(name: str, card: int) -> None:
    if card != 90 and name not in EVERYWHERE:
        pytest.skip("compiled for sm_90 only")
    assert_fits(compiled(name, card), card)


@pytest.mark.parametrize("name", ["groups", "batch", "cut", "softmax", "normed rows"])
def test_a_training_step_compiles_for_hopper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    launches = compiled(name, 90, trains=True)
    assert sum(found.name == "linear_kernel" for found in launches) == 3
    assert_fits(launches, 90)


def test_sixteen_bits_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    assert_fits([one for name in ("softmax", "batch", "gelu") for one in compiled(name, 90, "bfloat16")], 90)


def test_the_product_uses_hoppers_own_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    for name in ("pointwise", "cut"):
        (ptx,) = (found.ptx for found in compiled(name, 90) if found.name == "linear_kernel")
        assert "wgmma.mma_async" in ptx
        assert "cp.async.bulk.tensor" in ptx
