"""The passes over all channels, forward and of the gradients, compiled ahead of time for the cards we support."""

from __future__ import annotations

import dataclasses

import pytest

from cases import Builder, conv
from kernels import offline
from kernels.offline import Compiled
from level2 import OVER_CHANNELS, SOFTMAXED
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
card = offline.card
WIDE = Builder(2, conv(2, (16, 300))).norm(4).op("gelu", approximate="none").op("add", "full").op("mul", "row")
LENGTH = Builder(3, conv(3, (96, 192))).softmax("normalize", 1e-12).op("mul", 14.0).op("mul", "channel").op("silu")
CHAINS = {
    **OVER_CHANNELS,
    **SOFTMAXED,
    "300 channels": (WIDE.reduce("amin", "channels").chain(), (8, 16, 64, 64)),
    "length of 192 channels": (LENGTH.chain(), (1, 96, 6, 34, 34)),
}
# A gradient takes a place among the tensors.
TRAINED = Builder(2, conv(2, (16, 300))).norm(4).op("gelu", approximate="none").op("mul", "channel")
WIDE_TRAINED = {"300 channels": (TRAINED.reduce("amin", "channels").chain(), (8, 16, 64, 64))}


def compiled(chain: Chain, shape: tuple[int, ...], layout: str, dtype: str, card: int) -> tuple[Compiled, KernelCall]:
    given = problem(chain, shape, layout, device="cuda", convolution="pytorch")
    given = dataclasses.replace(given, tensors=tuple(dataclasses.replace(s, dtype=dtype) for s in given.tensors))
    plan = lower(chain, given, machine_of(card), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.value.layout == layout
    program = program_of(chain, prepare(chain, plan), given, [False] * len(given.tensors))
    (call,) = (one for one in kernel_calls(program.forward) if one.kernel == "channels_kernel")
    (found,) = offline.compiled_calls([call], card)
    return found, call


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", CHAINS)
def test_compiles_within_each_cards_limits(name: str, layout: str, card: int) -> None:
    if card not in (80, 90) or (card == 80 and name == "79"):
        pytest.skip("compiled for sm_90, some for sm_80")
    found, _ = compiled(*CHAINS[name], layout, "float32" if card == 90 else "bfloat16", card)
    used = offline.resources(found.ptx, card)
    assert found.shared <= offline.CARDS[card]
    assert used.registers * 32 * found.warps <= 65_536
    assert used.spilled == 0, used


def test_rows_are_read_in_vectors_and_each_channels_numbers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    offline.use_card(monkeypatch, 90)
    found, call = compiled(*OVER_CHANNELS["92"], "contiguous", "float32", 90)
    constants = dict(call.constants)
    assert (constants["BLOCK_S"], constants["BLOCK_C"], call.warps) == (64, 64, 4)
    ptx = found.ptx
    assert ptx.count("ld.global.v4.b32") == 8  # 126² positions are a multiple of 4: 32 elements for each of 128 threads
    assert ptx.count("ld.global.b32") == 5 * 8  # bias, mean, rstd, weight and bias of 8 channels


def compiled_gradients(chain: Chain, shape: tuple[int, ...], layout: str, dtype: str, card: int) -> list[Compiled]:
    given = problem(chain, shape, layout, device="cuda", convolution="pytorch", needs_grad=True)
    given = dataclasses.replace(given, tensors=tuple(dataclasses.replace(s, dtype=dtype) for s in given.tensors))
    plan = lower(chain, given, machine_of(card), even_if_slower=True)
    assert isinstance(plan, Plan), plan
    assert plan.chain == chain
    program = program_of(chain, prepare(chain, plan), given, [True] * len(given.tensors))
    calls = [one for one in kernel_calls(program.backward) if one.kernel in ("sums_kernel", "gradient_kernel")]
    calls += [one for one in kernel_calls(program.forward) if one.kernel == "channels_kernel"]
    return offline.compiled_calls(calls, card)


# Each kind of gradient in one layout: a choice, logsumexp, softmax, a length, and the most channels, on two cards.
GRADIENTS = [
    *((90, name, "contiguous") for name in ("25", "92", "300 channels")),
    *((90, name, "channels_last") for name in ("49", "58", "length of 192 channels", "300 channels")),
    (80, "58", "contiguous"),
]


@pytest.mark.parametrize(("card", "name", "layout"), GRADIENTS, indirect=["card"])
def test_gradients_compile_within_each_cards_limits(name: str, layout: str, card: int) -> None:
    dtype = "float32" if card == 90 else "bfloat16"
    for found in compiled_gradients(*(CHAINS | WIDE_TRAINED)[name], layout, dtype, card):
        used = offline.resources(found.ptx, card)
        assert found.shared <= offline.CARDS[card], found.name
        assert used.registers * 32 * found.warps <= 65_536, (found.name, used)
        assert used.spilled == 0, (found.name, used)


def test_a_value_that_no_gradient_depends_on_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 25 the gradient is found from a few numbers for each position; of 92 the value is read in vectors."""
    offline.use_card(monkeypatch, 90)
    for name, vectors in (("25", 0), ("92", 4)):
        chain = (SOFTMAXED | OVER_CHANNELS)[name]
        found = {one.name: one.ptx for one in compiled_gradients(*chain, "contiguous", "float32", 90)}
        assert found["gradient_kernel"].count("ld.global.v4.b32") == vectors
        assert found["gradient_kernel"].count("st.global.v4.b32") == 4
