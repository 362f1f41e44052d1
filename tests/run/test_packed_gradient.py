"""The last pass of the gradients that packs what it finds, by Triton's interpreter, with wrong kernels seen to fail."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from postlude.run.packed_gradient import PackedGradientPass
from postlude.run.programs import HEADER, compose
from run.test_training import CHAINS, assert_gradients, gradients, inputs, training

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("poisoned_memory"),
]
# Where the text is, the right text, the wrong text, a chain that tells them apart
MUTANTS = [
    ("pack_gradient", "(PW + o_w)[:, None] * CP", "o_w[:, None] * CP", "block"),
    ("pack_gradient", "tl.zeros([PAD, BLOCK_C]", "tl.full([PAD, BLOCK_C], 1.0", "block"),
    ("pack_gradient", "tl.load(p_b + o_g", "tl.load(p_a + o_g", "transposed"),
    ("pack_gradient", "(z * H + y) * tl.num_programs(1) + ", "", "block"),
    ("pack_gradient", "blocks[1 + TOTALS].to", "b_g.to", "residual"),
    ("weight_gradient", "p_parts += GROUPS * ROWS * COLUMNS", "p_parts += 0", "transposed"),
    ("weight_gradient", "tap = TAPS - 1 - i_tap if FLIP else i_tap", "tap = i_tap", "transposed"),
]


@pytest.fixture(autouse=True)
def packs_every_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only where it is faster."""
    monkeypatch.setattr("postlude.plan.gpu.packs_gradient", lambda dx, dw: dx is not None and dw is not None)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ["block", "transposed", "residual", "gated"])
def test_is_autograds(name: str, layout: str) -> None:
    tensors = inputs(CHAINS[name], torch.float64, layout)
    run = training(CHAINS[name], tensors)
    gradients(run, tensors)
    assert all(isinstance(passes.gradient, PackedGradientPass) for passes in run.gradients.values())
    assert_gradients(CHAINS[name], tensors)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}: {m[2][:40]}")
def test_a_wrong_one_is_seen_to_fail(mutant: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    where, right, wrong, name = mutant
    module = importlib.import_module(f"postlude.kernels.triton.{where}")
    source = Path(str(module.__file__)).read_text()
    assert right in source
    for key, made in compose(HEADER + source.replace(right, wrong)).items():
        if key.endswith("_kernel") and hasattr(module, key):
            monkeypatch.setattr(module, key, made)
    with pytest.raises(AssertionError):
        assert_gradients(CHAINS[name], inputs(CHAINS[name], torch.float64))
