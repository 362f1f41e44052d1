"""The pass that ends in a pool, and gradient passes behind one, compiled ahead of time for the cards we support."""

from __future__ import annotations

import dataclasses

import pytest

from cases import Builder, conv
from kernels import offline
from kernels.offline import Compiled
from level2 import POOLED
from plan.test_convolve import card as machine_of
from plan.test_lower import problem
from postlude.chain import Chain
from postlude.plan import Plan, lower
from postlude.plan.program import KernelCall
from postlude.run.ahead import program_of
from postlude.run.execute import prepare
from tracing import kernel_calls

pytest.importorskip("triton")
pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]
STEM = Builder(2, conv(2, (3, 64), 7, stride=2, padding=3, bias=False)).batch_norm().op("relu").pool("max", 3, 2, 1)
CHAINS = {**{name: POOLED[name] for name in ("35", "50", "72", "85")}, "stem": (STEM.chain(), (32, 3, 224, 224))}
KERNELS = ("pools_kernel", "sums_kernel", "gradient_kernel")


def compiled(
    chain: Chain, shape: tuple[int, ...], layout: str, dtype: str, trains: bool
) -> list[tuple[Compiled, KernelCall]]:
    given = problem(chain, shape, layout, device="cuda", convolution="pytorch", needs_grad=trains)
    given = dataclasses.replace(given, tensors=tuple(dataclasses.replace(s, dtype=dtype) for s in given.tensors))
    plan = lower(chain, given, machine_of(90), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    needs = [trains and slot not in chain.moved for slot in range(len(given.tensors))]
    program = program_of(chain, prepare(chain, plan), given, needs)
    calls = [one for one in kernel_calls((*program.forward, *program.backward)) if one.kernel in KERNELS]
    return list(zip(offline.compiled_calls(calls, 90), calls, strict=True))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", CHAINS)
def test_compiles_within_the_cards_limits(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    found = compiled(*CHAINS[name], layout, "float32", trains=True)
    assert len(found) == (3 if name in ("72", "85", "stem") else 2)
    for one, _ in found:
        used = offline.resources(one.ptx, 90)
        assert used.registers * 32 * one.warps <= 65_536 // 2, one.name  # two programs of a multiprocessor at least
        assert used.spilled == 0, used


def test_sixteen_bits_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    for layout in ("contiguous", "channels_last"):
        assert compiled(*CHAINS["85"], layout, "bfloat16", trains=True)


def test_each_thread_has_four_windows_and_their_taps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    ((found, call),) = compiled(*CHAINS["50"], "contiguous", "float32", trains=False)
    constants = dict(call.constants)
    assert (constants["BLOCK_S"], constants["BLOCK_C"], call.warps) == (512, 0, 4)
    # Four windows of eight taps, the bias of the convolution, both scales and the bias after the pool.
    assert found.ptx.count("ld.global") == 4 * 8 + 4


def test_a_gradient_of_the_values_size_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels load one in any case; behind a pool nothing reads that, and the compiler leaves it out."""
    offline.use_card(monkeypatch, 90)
    chain = Builder(2).norm(1, affine=False).pool("avg", 4).chain()
    for found, call in compiled(chain, (8, 16, 64, 64), "channels_last", "float32", trains=True)[1:]:
        elements = dict(call.constants)["BLOCK_S"] * dict(call.constants)["BLOCK_C"] // (32 * found.warps)
        vectors = found.ptx.count("ld.global.v4.b32")
        assert vectors == 2 * elements // 4, found.name  # the value, and the pooled gradient along channels


def test_packed_constants_are_seen() -> None:
    """The text that ptxas turned into wrong gradients of a pool with overlapping windows, and one that it did not."""
    for number, is_seen in ((1, True), (65536, True), (65537, False), (-1, False)):
        ptx = f"mov.b32 \t%r59, {number};\nadd.s16x2 \t%r60, %r58, %r59;\n"
        assert bool(offline.packed_constants(f".version 8.7\n{ptx}")) == is_seen, number
        assert offline.packed_constants(f".version 9.3\n{ptx}") == []
