"""The last pass of the gradients that packs what it finds, by Triton's interpreter, with wrong kernels seen to fail."""

from __future__ import annotations

import pytest
import torch

from run.test_training import CHAINS, assert_gradients, inputs, training
from tracing import kernel_calls
from wrong_kernels import replace_text

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("poisoned_memory"),
]
# Where the text is, the right text, the wrong text, a chain that tells them apart
MUTANTS = [
    ("pack_gradient", "(PW + o_w)[:, None] * C_PACKED", "o_w[:, None] * C_PACKED", "block"),
    ("pack", "tl.zeros([BLOCK_PAD, BLOCK_C]", "tl.full([BLOCK_PAD, BLOCK_C], 1.0", "block"),
    ("pack_gradient", "of_groups(p_a, p_b", "of_groups(p_a, p_a", "transposed"),
    ("pack_gradient", "(z * H + y) * tl.num_programs(1) + ", "", "block"),
    ("tiles", "blocks[START].to", "blocks[0].to", "residual"),
    ("weight_gradient", "p_parts += PRODUCTS * PRODUCT_M * PRODUCT_N", "p_parts += 0", "transposed"),
    ("weight_gradient", "tap = TAPS - 1 - i_tap if IS_FLIPPED else i_tap", "tap = i_tap", "transposed"),
]


@pytest.fixture(autouse=True)
def packs_every_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only where it is faster."""
    monkeypatch.setattr("postlude.plan.trained.packs_gradient", lambda dx, dw: dx is not None and dw is not None)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["block", "transposed", "residual", "gated"])
def test_is_autograds(name: str, layout: str) -> None:
    tensors = inputs(CHAINS[name], torch.float64, layout)
    run = training(CHAINS[name], tensors)
    calls = kernel_calls(run.program(tensors, [True] * len(tensors)).backward)
    assert [call.kernel for call in calls].count("packed_gradient_kernel") == 1
    assert_gradients(CHAINS[name], tensors)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}: {m[2][:40]}")
def test_a_wrong_one_is_seen_to_fail(mutant: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    where, right, wrong, name = mutant
    replace_text(monkeypatch, where, right, wrong)
    with pytest.raises(AssertionError):
        assert_gradients(CHAINS[name], inputs(CHAINS[name], torch.float64))
